"""Failures as data: the error inside a terminal rollout, and records that nobody could handle."""

from base64 import b64decode, b64encode
from datetime import datetime
from typing import Literal

from schemas.envelope import Event, Headers, now
from schemas.identities import event_id
from schemas.values import Name, Value, clean_text

FailureStage = Literal["admission", "seed", "agent", "verification", "cleanup"]


class ErrorInfo(Value):
    """What went wrong, where, and whether trying again could help."""

    kind: Name
    stage: FailureStage
    message: str
    retryable: bool


class DeadLettered(Event):
    """A record could not be handled. Original bytes and headers are kept, so that it can be published again."""

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
    """base64."""
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
        return cls(
            event_id=event_id("DeadLettered", boundary, topic, partition, offset),
            occurred_at=now(),
            caused_at=recorded_at,
            boundary=boundary,
            reason=clean_text(reason),
            traceback=None if traceback is None else clean_text(traceback),
            topic=topic,
            partition=partition,
            offset=offset,
            original_key=None if key is None else b64encode(key).decode(),
            original_value=None if value is None else b64encode(value).decode(),
            original_headers=[(name, b64encode(content or b"").decode()) for name, content in headers],
            run=run,
            rollout=rollout,
        )

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
