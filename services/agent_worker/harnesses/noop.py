"""`noop`: does nothing and hands in nothing, so that an environment can be checked. Calls no model."""

from collections.abc import Sequence
from typing import ClassVar, get_args

from schemas.session import Interaction, SessionReady, Submission
from schemas.values import ChatMessage
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models, Turn


class NoopHarness:
    name: ClassVar[str] = "noop"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = Capabilities(interactions=frozenset(get_args(Interaction)), tools=True)

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> "NoopSession":
        return NoopSession()


class NoopSession:
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        return Turn([{"role": "assistant", "content": ""}], "completed")

    async def close(self) -> Submission:
        return Submission()
