"""Seeds sessions: one task in, one SessionReady for each attempt out."""

from collections.abc import Iterable, Sequence
from typing import Any

from rollstream.environments import registry
from rollstream.environments.intake import Unreadable, read_task
from rollstream.environments.protocol import Environment, Task
from rollstream.environments.tickets import open_ticket, seal_task
from rollstream.errors import Poison, Refused
from rollstream.eventlog.control import RunControl
from rollstream.eventlog.failures import TaskFailure
from rollstream.eventlog.producer import Publisher
from rollstream.eventlog.reading import Record
from rollstream.sealing import Sealer
from rollstream.settings import Settings
from schemas.envelope import SessionIds, now, utc_of
from schemas.identities import event_id, session_id
from schemas.retry import RetryScheduled
from schemas.session import SessionReady, Submission
from schemas.task import Redrive, TaskSubmitted
from schemas.values import Composition, JsonObject

ORACLE = "oracle"
"""The one harness whose runs are given the environment's own solution."""
CHUNK = 500
"""Sessions published at a time, so that a group of thousands does not stand in memory at once."""


class SeedHandler:
    """What env_worker does with a record of `tasks.in`, and with a retry that asks for a new session."""

    def __init__(self, settings: Settings, sealer: Sealer, publisher: Publisher, control: RunControl) -> None:
        self._settings = settings
        self._sealer = sealer
        self._publisher = publisher
        self._control = control

    async def seed(self, record: Record) -> None:
        """Seed every attempt of one task, or those that its headers ask for when it is published again.

        Raises:
            TaskFailure: the record cannot be read, or its task cannot be played; carries what is known of the attempts.
        """
        headers = record.header_map()
        try:
            again = Redrive.of(headers)
        except ValueError as error:
            raise TaskFailure(()) from Poison(f"expected headers that say which attempts are driven again, found {error}")
        try:
            submitted = read_task(
                record.value,
                headers,
                self._settings.defaults,
                self._settings.limits.for_episode(),
                utc_of(record.timestamp_ms),
            )
        except Unreadable as error:
            raise TaskFailure(_asked_for(again, error.group.sessions()) if error.group else ()) from error
        if self._control.cancelled(submitted.run):
            return
        attempts = list(_asked_for(again, submitted.sessions()))
        try:
            sessions = self._sessions(submitted, attempts)
        except Exception as error:
            raise TaskFailure(attempts) from error
        for start in range(0, len(sessions), CHUNK):
            await self._publisher.publish(sessions[start : start + CHUNK])

    async def seed_again(self, retry: RetryScheduled) -> None:
        """Open the next session of an attempt, from the ticket of the one before.

        Raises:
            BoundaryFailure: the ticket does not open, or the task cannot be seeded (any more).
        """
        row = open_ticket(self._sealer, retry.ticket, retry.session)
        session = session_id(retry.rollout, retry.next_round, retry.next_try)
        ids = retry.ids() | {"session": session, "round": retry.next_round, "try_": retry.next_try}
        template = self._template(retry.environment, row, retry.composition)
        ready = SessionReady(
            event_id=event_id("SessionReady", session),
            occurred_at=now(),
            caused_at=retry.occurred_at,
            **ids,
            **template,
            limits=retry.limits,
            ticket=seal_task(self._sealer, row, session),
            submitted_at=retry.submitted_at,
            failures=retry.failures,
        )
        await self._publisher.publish([ready])

    def _sessions(self, submitted: TaskSubmitted, attempts: Sequence[SessionIds]) -> list[SessionReady]:
        template = self._template(submitted.environment, submitted.row, submitted.composition)
        return [
            SessionReady(
                event_id=event_id("SessionReady", ids.session),
                occurred_at=now(),
                caused_at=submitted.occurred_at,
                **ids.ids(),
                **template,
                limits=submitted.limits,
                ticket=seal_task(self._sealer, submitted.row, ids.session),
                submitted_at=submitted.occurred_at,
            )
            for ids in attempts
        ]

    def _template(self, name: str, row: JsonObject, composition: Composition) -> dict[str, Any]:
        """What all sessions of a task have in common: the environment's answer to it."""
        environment = registry.load(name)
        task = registry.admit(environment, row)
        seeded = environment.seed(task)
        return {
            "environment_version": environment.version,
            "composition": composition,
            "interaction": seeded.interaction,
            "placement": seeded.placement,
            "messages": seeded.messages,
            "tools": seeded.tools,
            "reference": _reference(environment, task) if composition.harness == ORACLE else None,
        }


def _asked_for(again: Redrive | None, first: Iterable[SessionIds]) -> Iterable[SessionIds]:
    return first if again is None else again.sessions(first)


def _reference(environment: Environment[Task], task: Task) -> Submission:
    reference = environment.reference(task)
    if reference is None:
        raise Refused(f"harness {ORACLE} needs a reference solution, and this task of {environment.name} has none")
    return reference
