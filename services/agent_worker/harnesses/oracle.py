"""`oracle`: hands in the environment's own solution, so that an environment can be checked. Calls no model."""

from collections.abc import Sequence
from typing import ClassVar

from rollstream.errors import Refused
from schemas.session import SessionReady, Submission
from schemas.values import ChatMessage
from services.agent_worker.harnesses.protocol import Capabilities, Models, Turn


class OracleHarness:
    name: ClassVar[str] = "oracle"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = Capabilities(interactions=frozenset({"single_turn"}), tools=True)

    async def open(self, descriptor: SessionReady, models: Models) -> "OracleSession":
        if descriptor.reference is None:
            raise Refused("harness oracle: expected a reference solution in the descriptor, found none", stage="agent")
        return OracleSession(descriptor.reference)


class OracleSession:
    def __init__(self, reference: Submission) -> None:
        self._reference = reference

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        return Turn([{"role": "assistant", "content": self._reference.text}], "completed")

    async def close(self) -> Submission:
        return self._reference
