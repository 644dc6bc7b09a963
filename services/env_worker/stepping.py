"""Carries out actions: one ActionRequested in, one ObservationReturned and what it earned out.

Nothing is kept that the record does not bring, but for environments that open something outside their worlds (`sessions`).
What cannot be carried out is answered too, because the agent waits.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from rollstream.environments import registry
from rollstream.environments.observing import finite, finite_components, info_of, seen_of
from rollstream.environments.protocol import (
    SteppedEnvironment,
    StepResult,
    StepServices,
    World,
    is_stepped,
    opens_resources,
)
from rollstream.environments.receipts import Receipt, require_next, trail_of
from rollstream.environments.roles import RecordedRoles
from rollstream.environments.tickets import Tickets
from rollstream.errors import BoundaryFailure, EnvironmentFailure, Refused
from rollstream.eventlog.failures import error_info
from rollstream.eventlog.lanes import fence
from rollstream.eventlog.producer import Publisher
from rollstream.models.openai import ModelPool
from rollstream.models.protocol import ContextOverflow
from schemas.action import ActionRequested, ObservationReturned, StepRewarded, observation_id
from schemas.envelope import Event, now
from schemas.events import describe
from schemas.identities import event_id
from schemas.verdict import StepReward
from services.env_worker.sessions import OpenSession, OpenSessions
from services.env_worker.trails import Trails
from services.env_worker.worlds import OpenWorld, WorldCache

R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Before:
    """Where an action finds its session; without a receipt when it is the first."""

    world: World
    receipt: Receipt | None


class StepHandler:
    """What env_worker does with a record of `env.actions`."""

    def __init__(
        self,
        tickets: Tickets,
        models: ModelPool,
        publisher: Publisher,
        cache: WorldCache,
        sessions: OpenSessions,
        step_timeout_s: float,
        worker: str,
    ) -> None:
        self._tickets = tickets
        self._models = models
        self._publisher = publisher
        self._cache = cache
        self._sessions = sessions
        self._trails = Trails()
        self._step_timeout_s = step_timeout_s
        self._worker = worker

    async def step(self, request: ActionRequested, partition: int = 0) -> None:
        """Carry out one action, or say why it cannot be.

        Args:
            partition: of the session, which goes to another worker with it.

        Raises:
            Exception: a bug of ours or of the environment's; the agent has been told, too.
        """
        started = time.monotonic()
        roles = RecordedRoles(self._models, request, request.max_output_bytes, self._worker, fence.get())
        events: list[Event] = []
        try:
            events = await self._carry_out(request, partition, roles, started)
            await self._publisher.publish([*events, *roles.calls])
        except Exception as error:
            if events:
                self._sessions.failed(request.session)
            failed = self._observation(request, started, failure=error_info(error, "agent"))
            # What was asked of models is paid for, whatever came of it.
            await self._publisher.publish([failed, *roles.calls])
            if not isinstance(error, BoundaryFailure):
                raise
            log.warning("session %s, action %d: %s", request.session, request.index, error, exc_info=error.__cause__)
        finally:
            await self._sessions.settle(request.session)

    async def _carry_out(self, request: ActionRequested, partition: int, roles: RecordedRoles, started: float) -> list[Event]:
        environment = registry.load(request.environment)
        if not is_stepped(environment):
            raise Refused(f"environment {environment.name} carries out no actions", stage="agent", kind="no_actions")
        stepped: SteppedEnvironment[Any, Any] = environment
        if not opens_resources(environment):
            return await self._carried_out(stepped, request, roles, started, None)
        async with self._sessions.turn(environment, request, partition) as held:
            if held.answered == request.event_id:
                # What is outside has changed already, and the answer is in the log, or on its way there.
                return []
            return await self._carried_out(stepped, request, roles, started, held)

    async def _carried_out(
        self,
        environment: SteppedEnvironment[Any, Any],
        request: ActionRequested,
        roles: RecordedRoles,
        started: float,
        held: OpenSession | None,
    ) -> list[Event]:
        before = await self._before(environment, request)
        digest = require_next(request, before.receipt)
        self._trails.take(request.session, request.index, before.receipt.digest if before.receipt else "", digest)
        world, result = await self._stepped(environment, request, before, roles, held)
        reward = finite(environment.name, "reward", result.reward, "agent")
        components = finite_components(environment.name, result.components, "agent")
        seen = seen_of(environment.name, request.action, result, request.max_output_bytes)
        receipt = Receipt(
            session=request.session,
            index=request.index,
            digest=digest,
            trail=trail_of([request.event_id], before.receipt.trail if before.receipt else ""),
            world=_written(environment, world),
            rewards=[*(before.receipt.rewards if before.receipt else []), StepReward(index=request.index, reward=reward)],
            done=result.done or result.truncated,
        )
        sealed = await self._tickets.seal_receipt(receipt)
        info = info_of(environment.name, result.info)
        self._cache.keep(sealed, OpenWorld(world, receipt))
        if held is not None:
            held.now(world, sealed, digest, request.event_id, done=receipt.done)
        observation = self._observation(
            request,
            started,
            messages=seen.messages,
            escaped=seen.escaped,
            done=result.done,
            truncated=result.truncated and not result.done,
            receipt=sealed,
        )
        if reward is None and not info and not components:
            return [observation]
        # What does not fit the log must not have earned anything: the observation goes first.
        return [observation, self._rewarded(request, reward, components, info)]

    async def _before(self, environment: SteppedEnvironment[Any, Any], request: ActionRequested) -> Before:
        """The world that the action finds.

        Raises:
            TicketRefused: ticket or receipt are another session's, or forged.
        """
        if request.receipt is None:
            task = registry.admit(environment, await self._tickets.open_task(request.ticket, request.session))
            return Before(await registry.apart(environment, registry.first_world, environment, task), None)
        opened = self._cache.take(request.session, request.index - 1, request.receipt)
        if opened is not None:
            return Before(opened.world, opened.receipt)
        # Cold: whoever brings somebody else's ticket is told so, although only the receipt is needed.
        await self._tickets.open_task(request.ticket, request.session)
        receipt = await self._tickets.open_receipt(request.receipt, request.session)
        return Before(registry.world_of(environment, receipt.world), receipt)

    async def _stepped(
        self,
        environment: SteppedEnvironment[Any, Any],
        request: ActionRequested,
        before: Before,
        roles: RecordedRoles,
        held: OpenSession | None,
    ) -> tuple[World, StepResult]:
        world = before.world
        opened = None
        if held is not None:
            entering = self._sessions.ready(held, request, world, before.receipt)
            world = await self._in_time(environment.name, entering, "open what its world needs", "open")
            held.stepping, opened = True, held.services()
        services = StepServices(roles, request.index, opened, request.event_id, request.max_output_bytes)
        stepping = environment.step(world, request.action, services)
        return await self._in_time(environment.name, stepping, "carry out an action", "step")

    async def _in_time(self, name: str, work: Awaitable[R], what: str, kind: str) -> R:
        """What an environment does, its failures typed and its time limited."""
        limit_s = self._step_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await work
        except TimeoutError as error:
            if not deadline.expired():
                raise EnvironmentFailure(
                    f"environment {name} raised {error!r}", stage="agent", kind=f"{kind}_raised"
                ) from error
            message = f"environment {name} did not {what} within {limit_s:g} s"
            raise EnvironmentFailure(message, stage="agent", kind=f"{kind}_timeout", retryable=True) from None
        except ContextOverflow as error:
            raise EnvironmentFailure(f"environment {name}: {error}", stage="agent", kind="role_context_overflow") from error
        except BoundaryFailure:
            raise
        except Exception as error:
            message = f"environment {name} raised {type(error).__name__}: {error}"
            raise EnvironmentFailure(message, stage="agent", kind=f"{kind}_raised") from error

    def _observation(self, request: ActionRequested, started: float, **told: Any) -> ObservationReturned:
        return ObservationReturned(
            event_id=observation_id(request.event_id),
            occurred_at=now(),
            caused_at=request.caused_at,
            **request.ids(),
            action=request.event_id,
            execution=request.execution,
            index=request.index,
            duration_s=time.monotonic() - started,
            worker=self._worker,
            **told,
        )

    @staticmethod
    def _rewarded(request: ActionRequested, reward: float | None, components: Any, info: Any) -> StepRewarded:
        return StepRewarded(
            event_id=event_id("StepRewarded", request.event_id),
            occurred_at=now(),
            caused_at=request.caused_at,
            **request.ids(),
            action=request.event_id,
            execution=request.execution,
            index=request.index,
            reward=reward,
            components=components,
            info=info,
        )


def _written(environment: SteppedEnvironment[Any, Any], world: World) -> str:
    """A world as it travels: what comes back from JSON must be a world again.

    Raises:
        EnvironmentFailure: it cannot be written down.
    """
    if not isinstance(world, environment.world_type):
        found = f"expected a {environment.world_type.__name__} from step, found a {type(world).__name__}"
        raise EnvironmentFailure(f"environment {environment.name}: {found}", stage="agent", kind="bad_world")
    try:
        written: str = world.model_dump_json()
    except (ValidationError, ValueError) as error:
        found = describe(error) if isinstance(error, ValidationError) else str(error)
        message = f"environment {environment.name}: its world cannot be written down: {found}"
        raise EnvironmentFailure(message, stage="agent", kind="bad_world") from error
    return written
