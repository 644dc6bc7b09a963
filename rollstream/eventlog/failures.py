"""From a failed record to the events that settle it. Pure: what is to be published, given what went wrong.

    poison (cannot be read)      -> DeadLettered, and an errored terminal record made from the headers
    boundary failure             -> RetryScheduled while a retry can help and is allowed, else an errored terminal record
    bug (anything unclassified)  -> DeadLettered with the traceback, and an errored terminal record

Whatever happens, an attempt that can be identified gets its terminal record, so nobody waits for it.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rollstream.errors import BoundaryFailure, Poison, Stage
from rollstream.eventlog.reading import Record
from rollstream.eventlog.retries import Retriable, RetryPolicy, failures_before, plan, schedule
from schemas.envelope import Event, SessionEvent, SessionIds, header_map, session_ids_from, utc_of
from schemas.events import UndecodableEvent, decode_any
from schemas.failure import DeadLettered, ErrorInfo
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.values import clean_text
from topics.catalogue import ROLLOUTS_RETRIES

MAX_MESSAGE = 4_000


@dataclass(frozen=True, slots=True)
class Boundary:
    """Which worker failed, at which stage of an episode."""

    worker: str
    stage: Stage


class TaskFailure(Exception):
    """A task could not become sessions; `__cause__` says why, and `attempts` which ones end with it."""

    def __init__(self, attempts: Iterable[SessionIds]) -> None:
        super().__init__()
        self.attempts = list(attempts)

    def __str__(self) -> str:
        return str(self.__cause__)


class Settler:
    """Decides what becomes of failed records of one worker process, within a budget of retries for each run."""

    def __init__(self, boundary: Boundary, policy: RetryPolicy, budget_per_run: int) -> None:
        self._boundary = boundary
        self._policy = policy
        self._budget = budget_per_run
        self._spent: Counter[str] = Counter()

    def settle(self, record: Record, error: Exception, expected: tuple[type[Event], ...], at: datetime) -> list[Event]:
        """The events that put an end to a record which could not be handled, or let it be handled again.

        Args:
            expected: kinds of events that the record may hold.
            at: the time now.
        """
        if isinstance(error, TaskFailure):
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            return _end(record, cause, self._boundary, error.attempts)
        event = _readable(record, expected)
        if isinstance(error, BoundaryFailure) and isinstance(event, Retriable):
            retry = self._retry(event, error, at)
            if retry is not None:
                return [retry]
        ids = event if isinstance(event, SessionEvent) else session_ids_from(header_map(record.headers))
        return _end(record, error, self._boundary, [] if ids is None else [ids], _revision(record))

    def _retry(self, event: Retriable, error: BoundaryFailure, at: datetime) -> RetryScheduled | None:
        info = error_info(error, self._boundary.stage)
        failures = failures_before(event) + error.counts
        delay_s = plan(self._policy, info, max(1, failures), event.rollout) if error.counts else error.retry_after_s
        if delay_s is None:
            return None
        if error.counts:
            if self._spent[event.run] >= self._budget:
                return None
            self._spent[event.run] += 1
        delay_s = max(delay_s, error.retry_after_s or 0.0)
        return schedule(event, info, failures=failures, delay_s=delay_s, at=at, worker=self._boundary.worker)


def _revision(record: Record) -> int:
    """Which verdict a record was to lead to; 0 for all but what is verified once more on request."""
    revision = header_map(record.headers).get("revision", "")
    return int(revision) if revision.isdecimal() and record.topic == ROLLOUTS_RETRIES.name else 0


def _end(
    record: Record, error: Exception, boundary: Boundary, attempts: Sequence[SessionIds], revision: int = 0
) -> list[Event]:
    recorded_at = utc_of(record.timestamp_ms)
    info = error_info(error, boundary.stage)
    events: list[Event] = []
    # Nothing ends in silence: what has no attempt to end is in the dead letters, whatever failed.
    if not attempts or not isinstance(error, BoundaryFailure):
        events.append(dead_letter(record, error, boundary.worker, attempts[0] if attempts else None))
    events += [RolloutScored.of_failure(ids, info, caused_at=recorded_at, revision=revision) for ids in attempts]
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


def _readable(record: Record, expected: tuple[type[Event], ...]) -> Event | None:
    """The body if it can be read, since only the body knows everything; None leaves it to the headers."""
    try:
        return decode_any(record.value, expected)
    except UndecodableEvent:
        return None


def headers_of(pairs: Sequence[tuple[str, bytes]] | None) -> tuple[tuple[str, bytes], ...]:
    """Record headers with absent values made empty."""
    return tuple((name, value or b"") for name, value in pairs or ())
