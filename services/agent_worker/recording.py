"""Models whose every call becomes an AgentStepped event.

Steps are made durable before the next call is sent, and the last ones together with what follows from them (an action, the end
of the episode): one round trip to the broker less. What an execution before this one recorded is answered from the record.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from rollstream.errors import CircuitOpen
from rollstream.eventlog.producer import Publisher
from rollstream.models.openai import ModelPool
from rollstream.models.protocol import Completion, ModelClient
from schemas.envelope import now
from schemas.identities import event_id
from schemas.session import SessionReady
from schemas.step import AgentStepped, Call, Execution
from schemas.values import ChatMessage, JsonObject, Sampling
from services.agent_worker.harnesses.protocol import LimitReached
from services.agent_worker.replay import completion_of

log = logging.getLogger(__name__)


class RecordedModels:
    """`Models` for one execution of one session."""

    def __init__(
        self,
        descriptor: SessionReady,
        execution: Execution,
        pool: ModelPool,
        publisher: Publisher,
        recorded: Sequence[AgentStepped] = (),
    ) -> None:
        self._descriptor = descriptor
        self._execution = execution
        self._pool = pool
        self._publisher = publisher
        self._unpublished: list[AgentStepped] = []
        self._recorded = deque(recorded)
        self._seen = len(descriptor.messages)
        self.calls: list[Call] = []
        self.step_ids: list[str] = []
        self.last_step: AgentStepped | None = None
        """The step that the agent has made last, whichever execution recorded it."""
        self.messages: list[ChatMessage] = list(descriptor.messages)
        """The transcript as the models saw it, for when a harness did not live to tell."""
        self.model_s = 0.0
        self._asked_at: float | None = None

    @property
    def waiting_s(self) -> float:
        """How long the call under way has been waiting for its answer; 0 when none is."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def budget_spent(self) -> bool:
        """Whether the episode's `max_model_tokens` are used up."""
        budget = self._descriptor.limits.max_model_tokens
        return budget is not None and self._sampled_tokens >= budget

    @property
    def _sampled_tokens(self) -> int:
        return sum(call.usage.completion_tokens for call in self.calls)

    async def complete(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = (), role: str = "policy"
    ) -> Completion:
        self._require_room()
        new_messages = list(messages[self._seen :])
        replayed = self._replay(role, new_messages)
        if replayed is not None:
            self._seen = len(messages) + 1
            return replayed
        await self.flush()
        model = self._pool.get(self._descriptor.composition.models.get(role, "default"))
        self._asked_at = time.monotonic()
        try:
            completion = await self._ask(model, messages, tools)
        except Exception:
            self._asked_at = None
            raise
        # Not in a `finally`: whoever cancelled the call wants to know what it was waiting for.
        self._asked_at = None
        self._record(completion, role, new_messages)
        self._seen = len(messages) + 1
        return completion

    def _require_room(self) -> None:
        """Make sure that the agent may make another call.

        Raises:
            LimitReached: it may not.
        """
        if len(self.calls) >= self._descriptor.limits.max_steps:
            raise LimitReached("max_steps")
        if self.calls and self.budget_spent:
            raise LimitReached("max_model_tokens")

    def _replay(self, role: str, new_messages: list[ChatMessage]) -> Completion | None:
        """The recorded answer to what is asked now; None when there is none, or when something else was asked then."""
        if not self._recorded:
            return None
        step = self._recorded.popleft()
        if step.role != role or step.new_messages != new_messages:
            log.warning("session %s goes another way than recorded at step %d", step.session, step.index)
            self._recorded.clear()
            return None
        self._take(step)
        return completion_of(step)

    async def _ask(self, model: ModelClient, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> Completion:
        while True:
            try:
                return await model.complete(messages, tools, self._sampling(), self._descriptor.limits.max_output_bytes)
            except CircuitOpen as error:
                # Before its first call an episode costs nothing and goes back to the log; later it waits here.
                if not self.calls:
                    raise
                await asyncio.sleep(error.retry_after_s or 1.0)

    async def record(self, completion: Completion, new_messages: Sequence[ChatMessage] = (), role: str = "policy") -> None:
        self._require_room()
        self._record(completion, role, list(new_messages))
        await self.flush()

    async def flush(self) -> None:
        """Make all steps so far durable."""
        if self._unpublished:
            await self._publisher.publish(self.take_unpublished())

    def take_unpublished(self) -> list[AgentStepped]:
        """Steps that the caller is going to publish itself."""
        taken, self._unpublished = self._unpublished, []
        return taken

    def _sampling(self) -> Sampling:
        """The run's sampling, with what is left of the episode's token budget as the limit of this call."""
        sampling = self._descriptor.composition.sampling
        budget = self._descriptor.limits.max_model_tokens
        if budget is None:
            return sampling
        left = max(1, budget - self._sampled_tokens)
        limit = left if sampling.max_tokens is None else min(left, sampling.max_tokens)
        return sampling.model_copy(update={"max_tokens": limit})

    def _record(self, completion: Completion, role: str, new_messages: list[ChatMessage]) -> None:
        index = len(self.calls)
        call = completion.as_call(index)
        step = AgentStepped(
            event_id=event_id("AgentStepped", self._descriptor.session, self._execution.id, "agent", index),
            occurred_at=now(),
            caused_at=self._descriptor.occurred_at,
            **self._descriptor.ids(),
            execution=self._execution,
            index=index,
            previous=None if self.last_step is None else self.last_step.event_id,
            role=role,
            call=call,
            new_messages=new_messages,
            message=completion.message,
            response=completion.response,
            escaped=completion.escaped,
        )
        self._take(step)
        self._unpublished.append(step)

    def _take(self, step: AgentStepped) -> None:
        self.calls.append(step.call)
        self.step_ids.append(step.event_id)
        self.last_step = step
        self.messages += [*step.new_messages, step.message]
        self.model_s += step.call.duration_s
