"""Verifies episodes: one EpisodeCompleted in, one VerdictReached and one terminal RolloutScored out."""

import asyncio
import math
import time
from uuid import uuid4

from rollstream.environments import registry
from rollstream.environments.protocol import Environment, Episode, Services, Task, Verdict
from rollstream.environments.tickets import open_ticket
from rollstream.errors import EnvironmentFailure, EpisodeTimeout
from rollstream.eventlog.lanes import fence
from rollstream.eventlog.producer import Publisher
from rollstream.sealing import Sealer
from rollstream.settings import Limits
from schemas.envelope import now
from schemas.episode import EpisodeCompleted
from schemas.identities import event_id
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.step import Execution
from schemas.verdict import VerdictReached


class VerifyHandler:
    """What verifier_worker does with a record of `episodes.completed`."""

    def __init__(self, limits: Limits, sealer: Sealer, services: Services, publisher: Publisher, worker: str) -> None:
        self._limits = limits
        self._sealer = sealer
        self._services = services
        self._publisher = publisher
        self._worker = worker

    async def verify(self, episode: EpisodeCompleted) -> None:
        """Score one episode and publish its terminal record.

        Raises:
            BoundaryFailure: scoring failed; the attempt ends `errored`, never with a zero.
        """
        environment = registry.load(episode.environment)
        task = registry.admit(environment, open_ticket(self._sealer, episode.ticket, episode.session))
        started = time.monotonic()
        verdict = await self._score(environment, task, episode)
        reached = self._reached(environment, episode, verdict, time.monotonic() - started)
        await self._publisher.publish([reached, RolloutScored.of_verdict(episode, reached)])

    async def verify_again(self, retry: RetryScheduled) -> None:
        """Verify the episode of a retry; the agent does not play again."""
        assert retry.episode is not None, "the schema promises an episode"
        await self.verify(retry.episode)

    async def _score(self, environment: Environment[Task], task: Task, episode: EpisodeCompleted) -> Verdict:
        limit = self._limits.verification_timeout_seconds
        played = Episode(messages=episode.messages, submission=episode.submission, stop_reason=episode.stop_reason)
        try:
            async with asyncio.timeout(limit) as deadline:
                return await environment.verify(task, played, self._services)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EpisodeTimeout(
                f"environment {environment.name} gave no verdict within {limit:g} s", stage="verification"
            ) from None

    def _reached(
        self, environment: Environment[Task], episode: EpisodeCompleted, verdict: Verdict, duration_s: float
    ) -> VerdictReached:
        reward = _number(environment, "reward", verdict.reward)
        success = verdict.success
        if success is None and reward is not None:
            success = reward >= environment.success_threshold
        execution = Execution(id=str(uuid4()), fence=fence.get(), worker=self._worker)
        return VerdictReached(
            event_id=event_id("VerdictReached", episode.session, 0, execution.id),
            occurred_at=now(),
            caused_at=episode.occurred_at,
            **episode.ids(),
            execution=execution,
            episode=episode.event_id,
            environment_version=environment.version,
            reward=reward,
            success=success,
            components={
                name: number
                for name, value in verdict.components.items()
                if (number := _number(environment, name, value)) is not None
            },
            diagnostics=dict(verdict.diagnostics),
            hermetic=verdict.hermetic,
            duration_s=duration_s,
        )


def _number(environment: Environment[Task], name: str, value: object) -> float | None:
    """A reward as the log takes it; anything else is the environment's failure, not the agent's."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvironmentFailure(
            f"environment {environment.name}: expected a finite number as {name}, found {value!r}",
            stage="verification",
            kind="bad_reward",
        )
    return float(value)
