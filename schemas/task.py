"""Tasks as they stand on `tasks.in`: one record a group."""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from schemas import identities
from schemas.envelope import Event, Headers, SessionIds, now
from schemas.values import Composition, EpisodeLimits, GroupRef, JsonObject, Name, TaskRef


class TaskSubmitted(Event):
    """A task was published, to be attempted `attempts` times.

    This is the only event that carries grading data in the clear: `row` is everything its author wrote. Nothing but
    environment code and the private store reads it.
    """

    kind: Literal["TaskSubmitted"] = "TaskSubmitted"
    run: Name
    group: Name
    task: TaskRef
    environment: Name
    composition: Composition = Composition()
    attempts: Annotated[int, Field(ge=1, le=10_000)] = 1
    limits: EpisodeLimits = EpisodeLimits()
    row: JsonObject
    """The task itself, flat: public input and grading fields together, in the environment's own schema."""

    @classmethod
    def create(
        cls, *, run: str, environment: str, task: TaskRef, row: JsonObject, at: datetime | None = None, **fields: Any
    ) -> "TaskSubmitted":
        at = at or now()
        group = identities.group_id(run, environment, task.dataset, task.id, task.epoch)
        return cls(
            event_id=identities.event_id("TaskSubmitted", group),
            occurred_at=at,
            caused_at=at,
            run=run,
            group=group,
            task=task,
            environment=environment,
            row=row,
            **fields,
        )

    def sessions(self) -> Iterator[SessionIds]:
        """The first session of each attempt."""
        return first_sessions(self.run, self.group, self.attempts, self.environment, self.task)

    def key(self) -> bytes:
        return self.group.encode()

    def headers(self) -> Headers:
        return [
            *super().headers(),
            ("run_id", self.run.encode()),
            ("group_id", self.group.encode()),
            ("group_size", b"%d" % self.attempts),
            ("environment", self.environment.encode()),
        ]


def first_sessions(run: str, group: str, size: int, environment: str, task: TaskRef | None) -> Iterator[SessionIds]:
    """The ids of the first session (round 0, try 0) of each attempt of a group."""
    for index in range(size):
        rollout = identities.rollout_id(group, index)
        yield SessionIds(
            run=run,
            group=GroupRef(id=group, size=size, index=index),
            task=task,
            rollout=rollout,
            session=identities.session_id(rollout, 0, 0),
            environment=environment,
        )
