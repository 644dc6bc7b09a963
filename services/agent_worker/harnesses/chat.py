"""`chat`: one model call a turn, and its text is the answer, or what the agent says next."""

from collections.abc import Sequence
from typing import ClassVar

from rollstream.models.protocol import ContextOverflow
from schemas.episode import StopReason
from schemas.session import SessionReady, Submission
from schemas.values import ChatMessage, text_of
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models, Turn

_STOP: dict[str | None, StopReason] = {"length": "length", "content_filter": "content_filter"}


class ChatHarness:
    name: ClassVar[str] = "chat"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = Capabilities(interactions=frozenset({"single_turn", "conversation", "gymnasium"}))

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> "ChatSession":
        return ChatSession(models)


class ChatSession:
    def __init__(self, models: Models) -> None:
        self._models = models
        self._context: list[ChatMessage] = []
        self._answer = ""

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        self._context += observation
        try:
            completion = await self._models.complete(self._context)
        except ContextOverflow:
            return Turn([], "context_overflow")
        self._context.append(completion.message)
        self._answer = text_of(completion.message)
        return Turn([completion.message], _STOP.get(completion.finish_reason))

    async def close(self) -> Submission:
        return Submission(text=self._answer)
