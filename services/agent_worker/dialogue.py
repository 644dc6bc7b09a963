"""One session's talk with its environment, through the log: act, wait for what comes of it, keep the receipt unopened."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rollstream.errors import EnvironmentFailure, ModelFailure, NoRoom
from rollstream.eventlog.producer import Publisher
from schemas.action import ActionRequested, ObservationReturned, ToolCall, Utterance, action_id, observation_id
from schemas.envelope import now
from schemas.events import UndecodableEvent, decode
from schemas.failure import ErrorInfo
from schemas.session import SessionReady
from schemas.step import Execution
from schemas.values import ChatMessage
from services.agent_worker.recording import RecordedModels


class Observations(Protocol):
    """Where answers to actions come in, by the ids of their events."""

    def peek(self, observation: str) -> bytes | None:
        """The first one of an id that is there, or None."""
        ...

    async def wait(self, observation: str) -> bytes:
        """The first one of an id, once it is there."""
        ...


class Clock:
    """The agent's own time: it stands still while the environment is at work."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self._deadline = deadline

    @contextmanager
    def stopped(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        when = self._deadline.when()
        left = None if when is None else when - loop.time()
        self._deadline.reschedule(None)
        try:
            yield
        finally:
            if left is not None and not self._deadline.expired():
                self._deadline.reschedule(loop.time() + left)


class Dialogue:
    """Acts for one execution of one session, and keeps the transcript."""

    def __init__(
        self,
        descriptor: SessionReady,
        execution: Execution,
        models: RecordedModels,
        publisher: Publisher,
        observations: Observations,
    ) -> None:
        self._descriptor = descriptor
        self._execution = execution
        self._models = models
        self._publisher = publisher
        self._observations = observations
        self.clock: Clock | None = None
        self.transcript: list[ChatMessage] = list(descriptor.messages)
        self.action_ids: list[str] = []
        self.receipt: str | None = None
        self.environment_s = 0.0

    async def act(self, action: ToolCall | Utterance, *, told_elsewhere: bool = False) -> ObservationReturned:
        """Do one thing, and see what comes of it. What the log tells already is not done again.

        Args:
            told_elsewhere: the agent made the call by itself, and its own steps have what came of it.

        Raises:
            BoundaryFailure: the environment could not carry it out.
        """
        request = self._request(action)
        name = observation_id(request.event_id)
        raw = self._observations.peek(name)
        if raw is None:
            await self._publisher.publish([*self._models.take_unpublished(), request])
            raw = await self._answer(name)
        self.action_ids.append(request.event_id)
        try:
            observed = decode(raw, ObservationReturned)
        except UndecodableEvent as error:
            message = f"the answer to action {request.index} cannot be read: {error}"
            raise EnvironmentFailure(message, stage="agent", kind="undecodable_observation", retryable=True) from None
        if observed.failure is not None:
            raise _raised(observed.failure)
        self.receipt = observed.receipt
        if not told_elsewhere:
            self.transcript += observed.messages
        return observed

    async def _answer(self, name: str) -> bytes:
        started = time.monotonic()
        try:
            if self.clock is None:
                return await self._observations.wait(name)
            with self.clock.stopped():
                return await self._observations.wait(name)
        finally:
            self.environment_s += time.monotonic() - started

    def _request(self, action: ToolCall | Utterance) -> ActionRequested:
        descriptor, index = self._descriptor, len(self.action_ids)
        # Named after the execution that asked the model: one that takes over asks for the same thing under the same id.
        asked_by = self._models.last_step.execution.id if self._models.last_step is not None else self._execution.id
        return ActionRequested(
            event_id=action_id(descriptor.session, asked_by, "agent", index),
            occurred_at=now(),
            caused_at=descriptor.occurred_at,
            **descriptor.ids(),
            execution=self._execution,
            index=index,
            step=None if self._models.last_step is None else self._models.last_step.event_id,
            action=action,
            composition=descriptor.composition,
            max_output_bytes=descriptor.limits.max_output_bytes,
            ticket=descriptor.ticket,
            receipt=self.receipt,
        )


def _raised(failure: ErrorInfo) -> EnvironmentFailure | ModelFailure:
    """An environment's failure, as what it would have been here."""
    if failure.kind.startswith("model_"):
        return ModelFailure(failure.message, kind=failure.kind, retryable=failure.retryable, stage=failure.stage)
    if failure.kind == NoRoom.KIND:
        return NoRoom(failure.message)
    return EnvironmentFailure(failure.message, stage=failure.stage, kind=failure.kind, retryable=failure.retryable)
