"""Verifies episodes: one EpisodeCompleted in, one VerdictReached and one terminal RolloutScored out."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from rollstream.environments import registry
from rollstream.environments.observing import finite, finite_components
from rollstream.environments.protocol import (
    Blobs,
    Environment,
    Episode,
    Graders,
    Sandboxes,
    Services,
    Task,
    Verdict,
    World,
    is_stepped,
    verification_limit_s,
)
from rollstream.environments.receipts import require_whole
from rollstream.environments.roles import RecordedRoles
from rollstream.environments.tickets import Tickets
from rollstream.errors import EnvironmentFailure, EpisodeTimeout
from rollstream.eventlog.lanes import fence
from rollstream.eventlog.producer import Publisher
from rollstream.models.openai import ModelPool
from rollstream.reaping import SandboxKeeping
from rollstream.settings import Limits
from schemas.envelope import now
from schemas.episode import EpisodeCompleted
from schemas.identities import event_id
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.sandbox import SandboxHolder
from schemas.step import Execution
from schemas.verdict import StepReward, VerdictReached


class VerifyHandler:
    """What verifier_worker does with a record of `episodes.completed`."""

    def __init__(
        self,
        limits: Limits,
        tickets: Tickets,
        graders: Graders,
        models: ModelPool,
        publisher: Publisher,
        worker: str,
        sandboxes: SandboxKeeping | None = None,
        blobs: Blobs | None = None,
    ) -> None:
        self._limits = limits
        self._tickets = tickets
        self._graders = graders
        self._models = models
        self._publisher = publisher
        self._worker = worker
        self._sandboxes = sandboxes
        self._blobs = blobs

    async def verify(self, episode: EpisodeCompleted, revision: int = 0, version: str | None = None) -> None:
        """Score one episode and publish its terminal record.

        Args:
            revision: of the verdict; above 0 when it was asked for once more.
            version: which version of the environment it was asked of; None for whichever is installed.

        Raises:
            BoundaryFailure: scoring failed; the attempt ends `errored`, never with a zero.
        """
        environment = registry.load(episode.environment)
        if version not in (None, environment.version):
            raise EnvironmentFailure(
                f"expected environment {environment.name} in version {version}, found {environment.version} in {self._worker}: "
                "restart it with the new version and regrade again",
                stage="verification",
                kind="environment_version",
                retryable=True,
            )
        task = registry.admit(environment, await self._tickets.open_task(episode.ticket, episode.session))
        world, steps = await self._end_of(environment, task, episode)
        started = time.monotonic()
        roles = RecordedRoles(self._models, episode, episode.limits.max_output_bytes, self._worker, fence.get())
        played = Episode(episode.messages, episode.submission, episode.stop_reason, world, steps)
        services = Services(self._graders, roles, self._boxes(episode), self._blobs)
        try:
            scoring = self._score(environment, task, played, services)
            verdict = await (scoring if revision else _within_episode(episode, scoring))
            reached = _reached(environment, episode, roles.execution, verdict, steps, time.monotonic() - started, revision)
        except Exception:
            # What was asked of models is paid for, whatever came of it.
            await self._publisher.publish(roles.calls)
            raise
        await self._publisher.publish([*roles.calls, reached, RolloutScored.of_verdict(episode, reached)])

    async def verify_again(self, retry: RetryScheduled) -> None:
        """Verify the episode of a retry; the agent does not play again."""
        assert retry.episode is not None, "the schema promises an episode"
        await self.verify(retry.episode, retry.revision, retry.environment_version)

    def _boxes(self, episode: EpisodeCompleted) -> Sandboxes | None:
        """Boxes for the verification of one episode, of the backend that its run names."""
        backend = episode.composition.sandbox
        if self._sandboxes is None or backend is None:
            return None
        holder = SandboxHolder(worker=self._worker, run=episode.run, session=episode.session)
        return self._sandboxes.of_session(backend, holder)

    async def _end_of(
        self, environment: Environment[Task], task: Task, episode: EpisodeCompleted
    ) -> tuple[World | None, list[StepReward]]:
        """The final world and what the steps earned, out of the sealed receipt: not by the agent's word."""
        if not is_stepped(environment):
            return None, []
        receipt = None if episode.receipt is None else await self._tickets.open_receipt(episode.receipt, episode.session)
        require_whole(episode.session, episode.actions, receipt)
        if receipt is None:
            return (await registry.apart(environment, registry.seed, environment, task)).world, []
        return registry.world_of(environment, receipt.world), receipt.rewards

    async def _score(self, environment: Environment[Task], task: Task, played: Episode, services: Services) -> Verdict:
        limit = verification_limit_s(environment, task, self._limits.verification_timeout_seconds)
        try:
            async with asyncio.timeout(limit) as deadline:
                return await environment.verify(task, played, services)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EpisodeTimeout(
                f"environment {environment.name} gave no verdict within {limit:g} s", stage="verification"
            ) from None


async def _within_episode(episode: EpisodeCompleted, scoring: Coroutine[Any, Any, Verdict]) -> Verdict:
    """A verdict, in what the agent has left of the episode's time.

    Raises:
        EpisodeTimeout: it takes longer.
    """
    limit_s = episode.limits.episode_timeout_s
    try:
        async with asyncio.timeout(max(0.0, limit_s - episode.timing.agent_s)) as deadline:
            return await scoring
    except TimeoutError:
        if not deadline.expired():
            raise
        raise EpisodeTimeout(f"episode and verdict took longer than {limit_s:g} s", stage="verification") from None


def _reached(
    environment: Environment[Task],
    episode: EpisodeCompleted,
    execution: Execution,
    verdict: Verdict,
    steps: list[StepReward],
    duration_s: float,
    revision: int,
) -> VerdictReached:
    reward = finite(environment.name, "reward", verdict.reward, "verification")
    success = verdict.success
    if success is None and reward is not None:
        success = reward >= environment.success_threshold
    return VerdictReached(
        event_id=event_id("VerdictReached", episode.session, revision, execution.id),
        occurred_at=now(),
        caused_at=episode.occurred_at,
        **episode.ids(),
        execution=execution,
        revision=revision,
        episode=episode.event_id,
        environment_version=environment.version,
        reward=reward,
        success=success,
        components=finite_components(environment.name, verdict.components, "verification"),
        steps=steps,
        diagnostics=dict(verdict.diagnostics),
        hermetic=verdict.hermetic,
        duration_s=duration_s,
    )
