"""From a failed record to the events that settle it. Pure: what is to be published, given what went wrong.

    poison (cannot be read)      -> DeadLettered, and an errored terminal record made from the headers
    boundary failure             -> an errored terminal record: no reward, masked, retryable or not
    bug (anything unclassified)  -> DeadLettered with the traceback, and an errored terminal record

Whatever happens, an attempt that can be identified gets its terminal record, so nobody waits for it.
"""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollstream.errors import BoundaryFailure, Poison, Stage
from rollstream.eventlog.reading import Record
from schemas.envelope import Event, SessionEvent, SessionIds, header_map, session_ids_from, utc_of
from schemas.events import UndecodableEvent, decode
from schemas.failure import DeadLettered, ErrorInfo
from schemas.rollout import RolloutScored
from schemas.values import clean_text

MAX_MESSAGE = 4_000


@dataclass(frozen=True, slots=True)
class Boundary:
    """Which worker failed, at which stage of an episode, on which events."""

    worker: str
    stage: Stage
    expected: type[Event]


class TaskFailure(Exception):
    """A task could not become sessions; `__cause__` says why, and `attempts` which ones end with it."""

    def __init__(self, attempts: Iterable[SessionIds]) -> None:
        super().__init__()
        self.attempts = list(attempts)

    def __str__(self) -> str:
        return str(self.__cause__)


def settle(record: Record, error: Exception, boundary: Boundary) -> list[Event]:
    """The events that put an end to a record which could not be handled."""
    if isinstance(error, TaskFailure):
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return _settle(record, cause, boundary, error.attempts)
    ids = _ids(record, boundary.expected)
    return _settle(record, error, boundary, [] if ids is None else [ids])


def _settle(record: Record, error: Exception, boundary: Boundary, attempts: Sequence[SessionIds]) -> list[Event]:
    recorded_at = utc_of(record.timestamp_ms)
    info = error_info(error, boundary.stage)
    events: list[Event] = []
    if not isinstance(error, BoundaryFailure):
        events.append(dead_letter(record, error, boundary.worker, attempts[0] if attempts else None))
    events += [RolloutScored.of_failure(ids, info, caused_at=recorded_at) for ids in attempts]
    return events


def error_info(error: Exception, stage: Stage) -> ErrorInfo:
    """An exception as data."""
    message = clean_text(str(error))[:MAX_MESSAGE]
    if isinstance(error, BoundaryFailure):
        return ErrorInfo(kind=error.kind, stage=error.stage, message=message, retryable=error.retryable)
    if isinstance(error, Poison | UndecodableEvent):
        return ErrorInfo(kind="undecodable", stage=stage, message=message, retryable=False)
    return ErrorInfo(
        kind="internal_error", stage=stage, message=f"{type(error).__name__}: {message}"[:MAX_MESSAGE], retryable=False
    )


def dead_letter(record: Record, error: Exception, worker: str, ids: SessionIds | None) -> DeadLettered:
    readable = isinstance(error, Poison | UndecodableEvent)
    headers = header_map(record.headers)
    return DeadLettered.of_record(
        boundary=worker,
        reason=str(error) if readable else f"{type(error).__name__}: {error}",
        traceback=None if readable else "".join(traceback.format_exception(error)),
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value,
        headers=list(record.headers),
        recorded_at=utc_of(record.timestamp_ms),
        run=ids.run if ids else headers.get("run_id"),
        rollout=ids.rollout if ids else None,
    )


def _ids(record: Record, expected: type[Event]) -> SessionIds | None:
    """From the body if it can be read, since only the body knows the task; else from the headers."""
    try:
        event = decode(record.value, expected)
    except UndecodableEvent:
        return session_ids_from(header_map(record.headers))
    return event if isinstance(event, SessionEvent) else None


def headers_of(pairs: Sequence[tuple[str, bytes]] | None) -> tuple[tuple[str, bytes], ...]:
    """Record headers with absent values made empty."""
    return tuple((name, value or b"") for name, value in pairs or ())
