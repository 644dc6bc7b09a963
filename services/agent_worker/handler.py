"""Plays episodes: one SessionReady in; its steps, its actions and one EpisodeCompleted out.

A session that was played before, by a worker that died, is gone on with: what the log tells of it is not done again.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from uuid import uuid4

from rollstream.errors import EpisodeTimeout, ModelFailure, Refused
from rollstream.eventlog.following import Inbox
from rollstream.eventlog.lanes import fence
from rollstream.eventlog.producer import Publisher
from rollstream.models.openai import ModelPool
from rollstream.placements import placement_of
from schemas.action import ToolCall, Utterance
from schemas.envelope import now
from schemas.episode import EpisodeCompleted, EpisodeTiming, StopReason
from schemas.identities import event_id
from schemas.session import PLACEMENTS_WITH_A_BOX, SessionReady, Submission
from schemas.step import AgentStepped, Execution
from schemas.values import ChatMessage, text_of
from services.agent_worker.boxes import AgentBoxes, OpenBox
from services.agent_worker.dialogue import Clock, Dialogue
from services.agent_worker.harnesses import registry
from services.agent_worker.harnesses.protocol import AgentSession, Harness, LimitReached, Mistake, Turn
from services.agent_worker.pauses import Pauses
from services.agent_worker.recording import RecordedModels
from services.agent_worker.replay import consistent_prefix, read_steps

log = logging.getLogger(__name__)

IN_WORDS = frozenset({"conversation", "gymnasium"})
"""Interactions in which what the agent says is what it does."""


class Sessions(Protocol):
    """What the log tells of sessions beside the record that opens them."""

    async def known(self, partition: int, offset: int) -> None: ...
    def is_over(self, session: str) -> bool: ...
    def over(self, session: str) -> None: ...
    def failed(self, session: str, partition: int) -> None: ...
    def inbox(self, session: str, partition: int) -> AbstractContextManager[Inbox]: ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """A session, and where in its topic it stands."""

    descriptor: SessionReady
    partition: int
    offset: int


class PlayHandler:
    """What agent_worker does with a record of `sessions.ready`."""

    def __init__(
        self,
        models: ModelPool,
        publisher: Publisher,
        pauses: Pauses,
        worker: str,
        cleanup_timeout_s: float,
        sessions: Sessions | None = None,
        prompt: Publisher | None = None,
        boxes: AgentBoxes | None = None,
    ) -> None:
        self._models = models
        self._publisher = publisher
        self._pauses = pauses
        self._worker = worker
        self._cleanup_timeout_s = cleanup_timeout_s
        self._sessions = sessions
        self._prompt = prompt or publisher
        """For what the environment waits for."""
        self._boxes = boxes

    async def receive(self, delivery: Delivery) -> None:
        """Play a session that the log delivered, from where it stands; one that is over is left alone.

        Raises:
            BoundaryFailure: as `play`.
        """
        assert self._sessions is not None, "made with sessions"
        session = delivery.descriptor.session
        await self._sessions.known(delivery.partition, delivery.offset)
        if self._sessions.is_over(session):
            return
        with self._sessions.inbox(session, delivery.partition) as inbox:
            try:
                await self.play(delivery.descriptor, inbox)
            except Exception:
                # What follows a failure is another session; a cancelled one may be delivered here again.
                self._sessions.failed(session, delivery.partition)
                raise
        self._sessions.over(session)

    async def play(self, descriptor: SessionReady, inbox: Inbox | None = None) -> None:
        """Play one session to its end and publish it; a session of a paused run goes back to the log instead.

        Args:
            inbox: what the log tells of it; nothing by default.

        Raises:
            BoundaryFailure: the model server, the environment or a limit of the system failed; steps made are in the log.
        """
        if await self._pauses.parked(descriptor):
            return
        try:
            await self._play(descriptor, inbox or Inbox(0))
        except ModelFailure as error:
            await self._pauses.consider(descriptor.run, error)
            raise
        self._pauses.went_well(descriptor.run)

    async def _play(self, descriptor: SessionReady, inbox: Inbox) -> None:
        harness = registry.load(descriptor.composition.harness)
        registry.check(harness, descriptor)
        execution = Execution(id=str(uuid4()), fence=fence.get(), worker=self._worker)
        recorded = consistent_prefix(read_steps(inbox.steps))
        inbox.steps.clear()
        async with self._box(descriptor, harness, execution) as box:
            if box is not None:
                # What was done in a box went with it: there is nothing that these steps could be gone on from.
                recorded = []
            models = RecordedModels(descriptor, execution, self._models, self._publisher, recorded)
            dialogue = Dialogue(descriptor, execution, models, self._prompt, inbox)
            try:
                timing, stop_reason, submission = await self._episode(descriptor, harness, models, dialogue, box, recorded)
            except BaseException:
                await models.flush()
                raise
            completed = _completed(descriptor, execution, harness, models, dialogue, timing, stop_reason, submission)
            await self._publisher.publish([*models.take_unpublished(), completed])

    def _box(
        self, descriptor: SessionReady, harness: Harness, execution: Execution
    ) -> AbstractAsyncContextManager[OpenBox | None]:
        """The agent's box, where it has one."""
        if self._boxes is not None:
            return self._boxes.of(descriptor, harness, execution)
        if placement_of(descriptor.placement, harness.capabilities.needs_sandbox) in PLACEMENTS_WITH_A_BOX:
            raise Refused("this worker holds no sandboxes for agents", stage="agent", kind="no_sandbox")
        return nullcontext()

    async def _episode(
        self,
        descriptor: SessionReady,
        harness: Harness,
        models: RecordedModels,
        dialogue: Dialogue,
        box: OpenBox | None,
        recorded: Sequence[AgentStepped],
    ) -> tuple[EpisodeTiming, StopReason, Submission]:
        """From the first observation to what is handed in."""
        started, started_at = time.monotonic(), now()
        spent_s = sum(step.call.duration_s for step in recorded)
        session = await harness.open(descriptor, models, None if box is None else box.box)
        desk = None if box is None else box.desk
        if desk is not None:
            desk.carry_out(partial(dialogue.act, told_elsewhere=True))
        try:
            stop_reason = await self._interact(session, descriptor, models, dialogue, spent_s, box)
            if desk is not None and desk.failure is not None:
                raise desk.failure
            if desk is not None and desk.ended is not None:
                stop_reason = "completed" if desk.ended.done else "truncated"
            if box is not None:
                await box.stop()
        except BaseException:
            await self._abandon(session)
            raise
        submission = await self._close(session)
        agent_s = time.monotonic() - started + spent_s
        if box is not None:
            submission = await box.take(submission)
        timing = EpisodeTiming(
            # Wall clocks of two hosts may disagree; a queue is never negative.
            queued_s=max(0.0, (started_at - descriptor.occurred_at).total_seconds()),
            agent_s=agent_s,
            environment_s=dialogue.environment_s,
            model_s=models.model_s,
        )
        return timing, stop_reason, submission

    async def _interact(
        self,
        session: AgentSession,
        descriptor: SessionReady,
        models: RecordedModels,
        dialogue: Dialogue,
        spent_s: float,
        box: OpenBox | None,
    ) -> StopReason:
        """Observe, act, until somebody ends it or a limit does."""
        limits = descriptor.limits
        agent_s, episode_s = (max(0.0, limit_s - spent_s) for limit_s in (limits.agent_timeout_s, limits.episode_timeout_s))
        try:
            async with asyncio.timeout(episode_s) as episode, asyncio.timeout(agent_s) as agent:
                dialogue.clock = Clock(agent)
                reason = await self._turns(session, descriptor, dialogue)
        except TimeoutError:
            if agent.expired():
                self._blame_model(max(models.waiting_s, 0.0 if box is None else box.waiting_s), limits.agent_timeout_s)
                reason = "agent_timeout"
            elif episode.expired():
                raise EpisodeTimeout(f"episode ran longer than {limits.episode_timeout_s:g} s", stage="agent") from None
            else:
                raise
        except LimitReached as error:
            reason = error.reason
        if reason in ("agent_timeout", "max_steps", "max_model_tokens") and len(models.messages) > len(dialogue.transcript):
            # The turn under way was broken off: what its calls said is known to the models alone.
            dialogue.transcript = models.messages
        if reason == "length" and models.budget_spent:
            reason = "max_model_tokens"
        return reason

    @staticmethod
    async def _turns(session: AgentSession, descriptor: SessionReady, dialogue: Dialogue) -> StopReason:
        observation: Sequence[ChatMessage] = descriptor.messages
        for _ in range(descriptor.limits.max_steps):
            turn = await session.activate(observation)
            dialogue.transcript += turn.messages
            if descriptor.interaction == "single_turn":
                return turn.stop_reason or "completed"
            seen: list[ChatMessage] = []
            actions = _actions(turn, descriptor)
            for action in actions:
                if isinstance(action, Mistake):
                    seen.append(action.reply)
                    dialogue.transcript.append(action.reply)
                    continue
                observed = await dialogue.act(action)
                seen += observed.messages
                if observed.done or observed.truncated:
                    return "completed" if observed.done else "truncated"
            if turn.stop_reason is not None or not actions:
                return turn.stop_reason or "completed"
            observation = seen
        return "max_steps"

    @staticmethod
    def _blame_model(waited_s: float, limit_s: float) -> None:
        """An agent that used up its time is scored; one that spent most of it waiting for one answer is not to blame.

        Raises:
            ModelFailure: the call under way had been waiting for at least half of the agent's time.
        """
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


def _actions(turn: Turn, descriptor: SessionReady) -> Sequence[ToolCall | Utterance | Mistake]:
    """What the agent does in a turn: where words are deeds, what it says."""
    if turn.actions or descriptor.interaction not in IN_WORDS or turn.stop_reason is not None or not turn.messages:
        return turn.actions
    return [Utterance(text=text_of(turn.messages[-1]))]


def _completed(
    descriptor: SessionReady,
    execution: Execution,
    harness: Harness,
    models: RecordedModels,
    dialogue: Dialogue,
    timing: EpisodeTiming,
    stop_reason: StopReason,
    submission: Submission,
) -> EpisodeCompleted:
    return EpisodeCompleted(
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
        messages=dialogue.transcript,
        tools=descriptor.tools,
        steps=models.step_ids,
        actions=dialogue.action_ids,
        calls=models.calls,
        timing=timing,
        limits=descriptor.limits,
        seeded_at=descriptor.occurred_at,
        submitted_at=descriptor.submitted_at,
        ticket=descriptor.ticket,
        receipt=dialogue.receipt,
    )
