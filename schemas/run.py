"""Runs: everything published together, with its manifest."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.envelope import RunEvent, now
from schemas.identities import event_id
from schemas.values import Composition, EpisodeLimits, Name, Value


class DatasetManifest(Value):
    """Where the tasks came from, precisely enough to say whether another file is the same."""

    name: Name
    sha256: str
    """Of the rows as published, one canonical JSON text a line: re-compressing a file does not change it."""
    rows: Annotated[int, Field(ge=0)]


class RunPublished(RunEvent):
    """A run was announced; its tasks follow on `tasks.in`."""

    kind: Literal["RunPublished"] = "RunPublished"
    dataset: DatasetManifest
    groups: Annotated[int, Field(ge=0)]
    """How many groups the run consists of."""
    groups_sha256: str
    """Of the sorted group ids, one a line."""
    attempts: Annotated[int, Field(ge=1)]
    environments: dict[str, int]
    """Environment -> number of groups."""
    composition: Composition
    limits: EpisodeLimits
    versions: dict[str, str]
    """Of rollstream, Python and every environment named."""
    prompts_sha256: str | None = None
    """Of what the agent sees first of every task (messages and tools), one canonical JSON text a line, in the file's order."""
    benchmark: Name | None = None
    """Name of the benchmark that it was published as. A label: what makes two runs comparable is everything else."""

    @classmethod
    def create(cls, *, run: str, occurred_at: datetime | None = None, **fields: object) -> "RunPublished":
        at = occurred_at or now()
        body = {"run": run, "event_id": event_id("RunPublished", run), "occurred_at": at, "caused_at": at, **fields}
        return cls.model_validate(body)

    def difference(self, other: "RunPublished") -> list[str]:
        """What distinguishes two manifests of one run, a line each; empty when they are the same experiment."""
        lines = []
        for name in ("dataset", "groups", "groups_sha256", "attempts", "environments", "composition", "limits"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                lines.append(f"{name}: {_text(mine)} -> {_text(theirs)}")
        return lines


class RunPaused(RunEvent):
    """A run waits, because going on would only fail: its work is parked until somebody resumes it."""

    kind: Literal["RunPaused"] = "RunPaused"
    reason: str
    """One sentence for people: what failed, what to do."""
    cause: str
    """Machine-readable, e.g. `model_unauthorized`."""
    by: str = "unknown"

    @classmethod
    def create(cls, *, run: str, reason: str, cause: str, by: str) -> "RunPaused":
        at = now()
        name = event_id("RunPaused", run, by, at.isoformat())
        return cls(run=run, event_id=name, occurred_at=at, caused_at=at, reason=reason, cause=cause, by=by)


class RunResumed(RunEvent):
    """A paused run goes on."""

    kind: Literal["RunResumed"] = "RunResumed"

    @classmethod
    def create(cls, *, run: str) -> "RunResumed":
        at = now()
        return cls(run=run, event_id=event_id("RunResumed", run, at.isoformat()), occurred_at=at, caused_at=at)


class RunCancelled(RunEvent):
    """A run is over: what has not ended yet is skipped and stopped. There is no way back but `resume`."""

    kind: Literal["RunCancelled"] = "RunCancelled"

    @classmethod
    def create(cls, *, run: str) -> "RunCancelled":
        at = now()
        return cls(run=run, event_id=event_id("RunCancelled", run, at.isoformat()), occurred_at=at, caused_at=at)


def _text(value: object) -> str:
    return value.model_dump_json(exclude_none=True) if isinstance(value, Value) else str(value)
