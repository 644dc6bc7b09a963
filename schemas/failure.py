"""Failures as data: the error inside a terminal rollout, and records that nobody could handle."""

from base64 import b64decode, b64encode
from datetime import datetime
from typing import Literal

from schemas.envelope import Event, Headers, now
from schemas.identities import event_id
from schemas.values import Name, Value, clean_text

FailureStage = Literal["admission", "seed", "agent", "verification", "cleanup"]


MAX_ORIGINAL_BYTES = 256 * 1024
"""Of a value kept inside a dead letter, which must fit a record itself. Longer ones stay where they are, in the log."""
MAX_ORIGINAL_KEY_BYTES = 4 * 1024
MAX_ORIGINAL_HEADERS_BYTES = 16 * 1024
MAX_WORDS = 16_000
"""Characters of a reason, and of a traceback."""


class ErrorInfo(Value):
    """What went wrong, where, and whether trying again could help."""

    kind: Name
    stage: FailureStage
    message: str
    retryable: bool


class DeadLettered(Event):
    """A record could not be handled. Original bytes and headers are kept, so that it can be published again.

    What would not fit is left out; `topic`, `partition` and `offset` say where it stands.
    """

    kind: Literal["DeadLettered"] = "DeadLettered"
    boundary: Name
    """Which worker refused it."""
    reason: str
    """One sentence: what was expected, what was found."""
    traceback: str | None = None
    topic: Name
    partition: int
    offset: int
    original_key: str | None
    """base64."""
    original_value: str | None
    """base64. Null when there was none, and when there is an `omitted_bytes`."""
    omitted_bytes: int | None = None
    """Size of a value that was too large to be kept here."""
    original_headers: list[tuple[str, str]]
    """Values in base64."""
    run: str | None = None
    rollout: str | None = None

    @classmethod
    def of_record(
        cls,
        *,
        boundary: str,
        reason: str,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]],
        recorded_at: datetime,
        traceback: str | None = None,
        run: str | None = None,
        rollout: str | None = None,
    ) -> "DeadLettered":
        omitted = len(value) if value is not None and len(value) > MAX_ORIGINAL_BYTES else None
        small_key = key if key is not None and len(key) <= MAX_ORIGINAL_KEY_BYTES else None
        return cls(
            event_id=event_id("DeadLettered", boundary, topic, partition, offset),
            occurred_at=now(),
            caused_at=recorded_at,
            boundary=boundary,
            reason=clean_text(reason)[:MAX_WORDS],
            traceback=None if traceback is None else clean_text(traceback)[-MAX_WORDS:],
            topic=topic,
            partition=partition,
            offset=offset,
            original_key=None if small_key is None else b64encode(small_key).decode(),
            original_value=None if value is None or omitted else b64encode(value).decode(),
            omitted_bytes=omitted,
            original_headers=_kept(headers),
            run=run,
            rollout=rollout,
        )

    def original_header_pairs(self) -> Headers:
        return [(name, b64decode(value)) for name, value in self.original_headers]

    def original_bytes(self) -> bytes | None:
        return None if self.original_value is None else b64decode(self.original_value)

    def key(self) -> bytes:
        return b"" if self.original_key is None else b64decode(self.original_key)

    def subject(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"

    def headers(self) -> Headers:
        extra = [("run_id", self.run), ("rollout_id", self.rollout)]
        return [
            *super().headers(),
            ("original_topic", self.topic.encode()),
            *((name, value.encode()) for name, value in extra if value is not None),
        ]


class DeadLetterSettled(Event):
    """Somebody dealt with a dead letter: it is no longer on the list of those that wait for a decision."""

    kind: Literal["DeadLetterSettled"] = "DeadLetterSettled"
    letter: Name
    """Id of the DeadLettered."""
    how: Literal["replayed", "discarded"]
    run: str | None = None

    @classmethod
    def create(cls, letter: DeadLettered, how: Literal["replayed", "discarded"]) -> "DeadLetterSettled":
        at = now()
        name = event_id("DeadLetterSettled", letter.event_id, how)
        return cls(event_id=name, occurred_at=at, caused_at=letter.occurred_at, letter=letter.event_id, how=how, run=letter.run)

    def key(self) -> bytes:
        return self.letter.encode()

    def headers(self) -> Headers:
        return [*super().headers(), *([] if self.run is None else [("run_id", self.run.encode())])]


def _kept(headers: list[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Headers in base64, as many as fit; names are text of any kind, so they are cleaned."""
    kept: list[tuple[str, str]] = []
    left = MAX_ORIGINAL_HEADERS_BYTES
    for name, content in headers:
        left -= len(name) + len(content or b"")
        if left < 0:
            break
        kept.append((clean_text(name), b64encode(content or b"").decode()))
    return kept
