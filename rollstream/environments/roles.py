"""The models that an environment asks to answer an action or to score: by role, as the run binds them, each call remembered."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal
from uuid import uuid4

import orjson

from rollstream.errors import EnvironmentFailure
from rollstream.models.openai import ModelPool
from rollstream.models.protocol import Completion
from schemas.action import ActionRequested, EnvironmentCalled
from schemas.envelope import now
from schemas.episode import EpisodeCompleted
from schemas.identities import event_id
from schemas.step import Execution
from schemas.values import ChatMessage, JsonObject, Sampling, text_of, truncate_text

MAX_CALLS = 1_000
"""For one action or one verdict: an environment that asks on and on is broken."""
MAX_PART_BYTES = 256 * 1024
"""Of the answer, and of the response, as they are kept; the environment gets them whole."""


class RecordedRoles:
    """`RoleModels` for one action, or for one verdict.

    Args:
        cause: what is being answered or scored.
        fence: under which that is done, by `worker`.
        max_output_bytes: longest text that the environment is given.
    """

    def __init__(
        self,
        pool: ModelPool,
        cause: ActionRequested | EpisodeCompleted,
        max_output_bytes: int,
        worker: str,
        fence: int,
    ) -> None:
        self._pool = pool
        self._cause = cause
        self._worker = worker
        self._fence = fence
        self._max_output_bytes = max_output_bytes
        self.calls: list[EnvironmentCalled] = []
        """Every call that was answered, in order; to be published whatever comes of the rest."""
        self._stage: Literal["agent", "verification"] = "agent" if isinstance(cause, ActionRequested) else "verification"

    @cached_property
    def execution(self) -> Execution:
        """The handling of the cause."""
        return Execution(id=str(uuid4()), fence=self._fence, worker=self._worker)

    async def complete(self, messages: Sequence[ChatMessage], role: str) -> Completion:
        models = self._cause.composition.models
        if role not in models:
            raise self._failure(f"asks a model of role {role!r}, and the run binds {', '.join(sorted(models))}", "role_unbound")
        if len(self.calls) >= MAX_CALLS:
            raise self._failure(f"asked models {MAX_CALLS} times without coming to an end", "too_many_calls")
        # The run's sampling is the policy's; a role's stands with its model in the settings.
        completion = await self._pool.get(models[role]).complete(messages, (), Sampling(), self._max_output_bytes)
        self.calls.append(self._called(role, completion))
        return completion

    def _called(self, role: str, completion: Completion) -> EnvironmentCalled:
        cause, index = self._cause, len(self.calls)
        message, response = _kept(completion.message), _bounded(completion.response)
        return EnvironmentCalled(
            event_id=event_id("EnvironmentCalled", cause.event_id, self.execution.id, index),
            occurred_at=now(),
            # A step's events have the action's own, so that repeated ones agree in it.
            caused_at=cause.caused_at if isinstance(cause, ActionRequested) else cause.occurred_at,
            **cause.ids(),
            stage=self._stage,
            cause=cause.event_id,
            execution=self.execution,
            index=index,
            role=role,
            call=completion.as_call(index),
            message=message,
            response=response,
            escaped=completion.escaped or message != completion.message or response != completion.response,
        )

    def _failure(self, what: str, kind: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"environment {self._cause.environment} {what}", stage=self._stage, kind=kind)


def _bounded(value: JsonObject) -> JsonObject:
    size = len(orjson.dumps(value))
    return value if size <= MAX_PART_BYTES else {"omitted_bytes": size}


def _kept(message: ChatMessage) -> ChatMessage:
    if len(orjson.dumps(message)) <= MAX_PART_BYTES:
        return message
    return {"role": "assistant", "content": truncate_text(text_of(message), MAX_PART_BYTES // 2)}
