"""Models whose every call becomes an AgentStepped event.

Steps are made durable before the next call is sent, and the last ones together with the end of the episode: one round trip
to the broker less for an episode of one call.
"""

import asyncio
import time
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


class RecordedModels:
    """`Models` for one execution of one session."""

    def __init__(self, descriptor: SessionReady, execution: Execution, pool: ModelPool, publisher: Publisher) -> None:
        self._descriptor = descriptor
        self._execution = execution
        self._pool = pool
        self._publisher = publisher
        self._unpublished: list[AgentStepped] = []
        self._seen = len(descriptor.messages)
        self.calls: list[Call] = []
        self.step_ids: list[str] = []
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
        self._record(completion, role, list(messages[self._seen :]))
        self._seen = len(messages) + 1
        return completion

    async def _ask(self, model: ModelClient, messages: Sequence[ChatMessage], tools: Sequence[JsonObject]) -> Completion:
        while True:
            try:
                return await model.complete(messages, tools, self._sampling(), self._descriptor.limits.max_output_bytes)
            except CircuitOpen as error:
                # Before its first call an episode costs nothing and goes back to the log; later it waits here.
                if not self.calls:
                    raise
                await asyncio.sleep(error.retry_after_s or 1.0)

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
        call = Call(
            turn=index,
            model=completion.model,
            finish_reason=completion.finish_reason,
            usage=completion.usage,
            sampling=completion.sampling,
            started_at=completion.started_at,
            duration_s=completion.duration_s,
            attempts=completion.attempts,
        )
        step = AgentStepped(
            event_id=event_id("AgentStepped", self._descriptor.session, self._execution.id, "agent", index),
            occurred_at=now(),
            caused_at=self._descriptor.occurred_at,
            **self._descriptor.ids(),
            execution=self._execution,
            index=index,
            role=role,
            call=call,
            new_messages=new_messages,
            message=completion.message,
            response=completion.response,
            escaped=completion.escaped,
        )
        self.calls.append(call)
        self.step_ids.append(step.event_id)
        self.messages += [*new_messages, completion.message]
        self.model_s += completion.duration_s
        self._unpublished.append(step)
