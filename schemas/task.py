"""Tasks as they stand on `tasks.in`: one record a group."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from schemas import identities
from schemas.envelope import Event, Headers, SessionIds, composition_headers, now
from schemas.values import Composition, EpisodeLimits, GroupRef, JsonObject, Name, TaskRef, Value


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
            *composition_headers(self.composition),
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


class Redrive(Value):
    """What the headers of a task record say that was published again, byte for byte, for some of its attempts only.

    Headers, because the bytes may be a task in anybody's form, and its ids come out of them.
    """

    round: Annotated[int, Field(ge=0)]
    indices: frozenset[int]

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Redrive | None":
        """None for a record that is there for the first time, and so for all its attempts.

        Raises:
            ValueError: the headers are garbage.
        """
        if "redrive_round" not in headers:
            return None
        indices = headers.get("redrive_indices", "").split(",")
        return cls(round=int(headers["redrive_round"]), indices=frozenset(int(index) for index in indices))

    def headers(self) -> Headers:
        indices = ",".join(str(index) for index in sorted(self.indices))
        return [("redrive_round", b"%d" % self.round), ("redrive_indices", indices.encode())]

    def sessions(self, first: Iterable[SessionIds]) -> Iterator[SessionIds]:
        """Of the first sessions of a group, those that are asked for, in the round that is asked for."""
        for ids in first:
            if ids.group.index in self.indices:
                session = identities.session_id(ids.rollout, self.round, 0)
                yield ids.model_copy(update={"session": session, "round": self.round})
