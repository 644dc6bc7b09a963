"""Plays episodes: one SessionReady in; its steps and one EpisodeCompleted out."""

import asyncio
import logging
import time
from uuid import uuid4

from rollstream.errors import EpisodeTimeout, ModelFailure
from rollstream.eventlog.lanes import fence
from rollstream.eventlog.producer import Publisher
from rollstream.models.openai import ModelPool
from schemas.envelope import now
from schemas.episode import EpisodeCompleted, EpisodeTiming, StopReason
from schemas.identities import event_id
from schemas.session import SessionReady, Submission
from schemas.step import Execution
from schemas.values import ChatMessage
from services.agent_worker.harnesses import registry
from services.agent_worker.harnesses.protocol import AgentSession
from services.agent_worker.pauses import Pauses
from services.agent_worker.recording import RecordedModels

log = logging.getLogger(__name__)


class PlayHandler:
    """What agent_worker does with a record of `sessions.ready`."""

    def __init__(self, models: ModelPool, publisher: Publisher, pauses: Pauses, worker: str, cleanup_timeout_s: float) -> None:
        self._models = models
        self._publisher = publisher
        self._pauses = pauses
        self._worker = worker
        self._cleanup_timeout_s = cleanup_timeout_s

    async def play(self, descriptor: SessionReady) -> None:
        """Play one session to its end and publish it; a session of a paused run goes back to the log instead.

        Raises:
            BoundaryFailure: the model server or a limit of the system failed; steps made so far are in the log.
        """
        if await self._pauses.parked(descriptor):
            return
        try:
            await self._play(descriptor)
        except ModelFailure as error:
            await self._pauses.consider(descriptor.run, error)
            raise
        self._pauses.went_well(descriptor.run)

    async def _play(self, descriptor: SessionReady) -> None:
        harness = registry.load(descriptor.composition.harness)
        registry.check(harness, descriptor)
        execution = Execution(id=str(uuid4()), fence=fence.get(), worker=self._worker)
        models = RecordedModels(descriptor, execution, self._models, self._publisher)
        started, started_at = time.monotonic(), now()
        try:
            session = await harness.open(descriptor, models)
            try:
                stop_reason, messages = await self._interact(session, descriptor, models)
            except BaseException:
                await self._abandon(session)
                raise
            submission = await self._close(session)
        except BaseException:
            await models.flush()
            raise
        completed = EpisodeCompleted(
            event_id=event_id("EpisodeCompleted", descriptor.session),
            occurred_at=now(),
            caused_at=descriptor.occurred_at,
            **descriptor.ids(),
            execution=execution,
            composition=descriptor.composition,
            environment_version=descriptor.environment_version,
            harness_version=harness.version,
            stop_reason=stop_reason,
            submission=submission,
            messages=messages,
            tools=descriptor.tools,
            steps=models.step_ids,
            calls=models.calls,
            timing=EpisodeTiming(
                # Wall clocks of two hosts may disagree; a queue is never negative.
                queued_s=max(0.0, (started_at - descriptor.occurred_at).total_seconds()),
                agent_s=time.monotonic() - started,
                model_s=models.model_s,
            ),
            limits=descriptor.limits,
            seeded_at=descriptor.occurred_at,
            submitted_at=descriptor.submitted_at,
            ticket=descriptor.ticket,
        )
        await self._publisher.publish([*models.take_unpublished(), completed])

    async def _interact(
        self, session: AgentSession, descriptor: SessionReady, models: RecordedModels
    ) -> tuple[StopReason, list[ChatMessage]]:
        """Observe, act. A single-turn environment has no answer, so the first message is the last."""
        limits = descriptor.limits
        try:
            async with asyncio.timeout(limits.episode_timeout_s) as episode, asyncio.timeout(limits.agent_timeout_s) as agent:
                turn = await session.activate(descriptor.messages)
        except TimeoutError:
            if agent.expired():
                self._blame_model(models, limits.agent_timeout_s)
                return "agent_timeout", models.messages
            if episode.expired():
                raise EpisodeTimeout(f"episode ran longer than {limits.episode_timeout_s:g} s", stage="agent") from None
            raise
        reason = turn.stop_reason or "completed"
        if reason == "length" and models.budget_spent:
            reason = "max_model_tokens"
        return reason, [*descriptor.messages, *turn.messages]

    @staticmethod
    def _blame_model(models: RecordedModels, limit_s: float) -> None:
        """An agent that used up its time is scored; one that spent most of it waiting for one answer is not to blame.

        Raises:
            ModelFailure: the call under way had been waiting for at least half of the agent's time.
        """
        waited_s = models.waiting_s
        if waited_s * 2 >= limit_s:
            raise ModelFailure(
                f"the model gave no answer for {waited_s:.0f} s of the agent's {limit_s:g} s",
                kind="model_timeout",
                retryable=True,
            )

    async def _close(self, session: AgentSession) -> Submission:
        try:
            async with asyncio.timeout(self._cleanup_timeout_s) as cleanup:
                return await session.close()
        except TimeoutError:
            if not cleanup.expired():
                raise
            limit = f"{self._cleanup_timeout_s:g} s"
            raise EpisodeTimeout(f"harness did not hand in within {limit}", stage="cleanup") from None

    async def _abandon(self, session: AgentSession) -> None:
        """Close a session that failed: what it holds must be let go, but what it hands in counts no more."""
        try:
            await self._close(session)
        except Exception as error:
            # The failure under way is the one to tell.
            log.warning("while closing a failed session: %r", error)
