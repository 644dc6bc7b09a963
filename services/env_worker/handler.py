"""Seeds sessions: one task in, one SessionReady for each attempt out."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from rollstream import harnesses
from rollstream.backends import default_backend
from rollstream.environments import registry
from rollstream.environments.intake import Unreadable, read_task
from rollstream.environments.protocol import Environment, Task, TaskLimits, is_stepped, require_roles
from rollstream.environments.tickets import Tickets
from rollstream.errors import EnvironmentFailure, Poison, Refused
from rollstream.eventlog.control import RunControl
from rollstream.eventlog.failures import TaskFailure
from rollstream.eventlog.pools import Pools
from rollstream.eventlog.producer import Publisher
from rollstream.eventlog.reading import Record
from rollstream.placements import agent_box, placement_of, with_backend
from rollstream.settings import Settings
from schemas.action import ToolCall, Utterance
from schemas.envelope import SessionIds, now, utc_of
from schemas.events import describe
from schemas.identities import event_id, session_id
from schemas.retry import RetryScheduled
from schemas.session import SessionReady, Submission
from schemas.task import Redrive, TaskSubmitted
from schemas.values import Composition, EpisodeLimits, JsonObject

ORACLE = "oracle"
"""The one harness whose runs are given the environment's own solution."""
CHUNK = 500
"""Sessions published at a time, so that a group of thousands does not stand in memory at once."""


class SeedHandler:
    """What env_worker does with a record of `tasks.in`, and with a retry that asks for a new session."""

    def __init__(self, settings: Settings, tickets: Tickets, publisher: Publisher, control: RunControl) -> None:
        self._settings = settings
        self._pools = Pools.of(settings)
        self._tickets = tickets
        self._publisher = publisher
        self._control = control

    async def seed(self, record: Record) -> None:
        """Seed every attempt of one task, or those that its headers ask for when it is published again.

        A task that turns out to be another pool's is left to that pool.

        Raises:
            TaskFailure: the record cannot be read, or its task cannot be played; carries what is known of the attempts.
        """
        headers = record.header_map()
        found = self._read(record)
        if self._pools.of_task(headers, found if isinstance(found, TaskSubmitted) else None) != self._settings.pool:
            return
        try:
            again = Redrive.of(headers)
        except ValueError as error:
            raise TaskFailure(()) from Poison(f"expected headers that say which attempts are driven again, found {error}")
        if isinstance(found, Unreadable):
            raise TaskFailure(_asked_for(again, found.group.sessions()) if found.group else ()) from found
        submitted = found
        if self._control.cancelled(submitted.run):
            return
        attempts = list(_asked_for(again, submitted.sessions()))
        try:
            template = await self._template(submitted.environment, submitted.row, submitted.composition, submitted.limits)
            tickets = [await self._tickets.seal_task(submitted.row, ids.session) for ids in attempts]
        except Exception as error:
            raise TaskFailure(attempts) from error
        for start in range(0, len(attempts), CHUNK):
            chunk = zip(attempts[start : start + CHUNK], tickets[start : start + CHUNK], strict=True)
            await self._publisher.publish([self._session(submitted, ids, template, ticket) for ids, ticket in chunk])

    def _read(self, record: Record) -> TaskSubmitted | Unreadable:
        try:
            return read_task(
                record.value,
                record.header_map(),
                self._settings.defaults,
                self._settings.limits.for_episode(),
                utc_of(record.timestamp_ms),
            )
        except Unreadable as error:
            return error

    async def seed_again(self, retry: RetryScheduled) -> None:
        """Open the next session of an attempt, from the ticket of the one before.

        Raises:
            BoundaryFailure: the ticket does not open, or the task cannot be seeded (any more).
        """
        row = await self._tickets.open_task(retry.ticket, retry.session)
        session = session_id(retry.rollout, retry.next_round, retry.next_try)
        ids = retry.ids() | {"session": session, "round": retry.next_round, "try_": retry.next_try}
        template = await self._template(retry.environment, row, retry.composition, retry.limits)
        ready = SessionReady(
            event_id=event_id("SessionReady", session),
            occurred_at=now(),
            caused_at=retry.occurred_at,
            **ids,
            **template,
            ticket=await self._tickets.seal_task(row, session),
            submitted_at=retry.submitted_at,
            failures=retry.failures,
        )
        await self._publisher.publish([ready])

    @staticmethod
    def _session(submitted: TaskSubmitted, ids: SessionIds, template: dict[str, Any], ticket: str) -> SessionReady:
        return SessionReady(
            event_id=event_id("SessionReady", ids.session),
            occurred_at=now(),
            caused_at=submitted.occurred_at,
            **ids.ids(),
            **template,
            ticket=ticket,
            submitted_at=submitted.occurred_at,
        )

    async def _template(self, name: str, row: JsonObject, composition: Composition, limits: EpisodeLimits) -> dict[str, Any]:
        """What all sessions of a task have in common: the environment's answer to it."""
        environment = registry.load(name)
        task = registry.admit(environment, row)
        seeded = await registry.apart(environment, registry.seed, environment, task)
        require_roles(environment, seeded, composition)
        placement = placement_of(seeded.placement, _needs_sandbox(composition.harness))
        composition = with_backend(composition, placement, default_backend(self._settings))
        plays_reference = composition.harness == ORACLE
        reference = await registry.apart(environment, _reference, environment, task) if plays_reference else None
        actions: Sequence[ToolCall | Utterance] = ()
        if plays_reference and is_stepped(environment) and seeded.world is not None:
            actions = await registry.apart(environment, environment.reference_actions, task)
        return {
            "environment_version": environment.version,
            "composition": composition,
            "interaction": seeded.interaction,
            "placement": placement,
            "sandbox": agent_box(placement, seeded.sandbox, self._settings.sandboxes.agent),
            "workspace": seeded.workspace,
            "messages": seeded.messages,
            "tools": seeded.tools,
            "limits": lowered(limits, seeded.limits, name),
            "reference": reference,
            "reference_actions": list(actions),
        }


def lowered(limits: EpisodeLimits, task: TaskLimits, environment: str) -> EpisodeLimits:
    """The run's limits, with those of the task where they are lower.

    Raises:
        EnvironmentFailure: those of the task are none.
    """
    changes: dict[str, float] = {}
    for name in ("episode_timeout_s", "agent_timeout_s", "max_steps", "max_model_tokens", "max_output_bytes"):
        own, given = getattr(task, name), getattr(limits, name)
        if own is not None and (given is None or own < given):
            changes[name] = own
    if not changes:
        return limits
    try:
        return EpisodeLimits.model_validate(limits.model_dump() | changes)
    except ValidationError as error:
        message = f"environment {environment}: expected limits of a task that leave it room, found {describe(error)}"
        raise EnvironmentFailure(message, stage="seed", kind="environment_broken") from None


def _needs_sandbox(harness: str) -> bool:
    """Whether a harness works in a box. One that only agent_worker knows is placed there."""
    try:
        return harnesses.capabilities(harness).needs_sandbox
    except Refused:
        return False


def _asked_for(again: Redrive | None, first: Iterable[SessionIds]) -> Iterable[SessionIds]:
    return first if again is None else again.sessions(first)


def _reference(environment: Environment[Task], task: Task) -> Submission:
    reference = environment.reference(task)
    if reference is None:
        raise Refused(f"harness {ORACLE} needs a reference solution, and this task of {environment.name} has none")
    return reference
