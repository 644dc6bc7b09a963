"""`oracle`: does what the environment's own solution does and hands it in, so that an environment can be checked.

Calls no model.
"""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import orjson

from rollstream.errors import EnvironmentFailure, Refused
from schemas.action import ToolCall, Utterance
from schemas.session import SessionReady, Submission
from schemas.values import ChatMessage
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models, Turn

APPLY_TIMEOUT_S = 120.0


class OracleHarness:
    name: ClassVar[str] = "oracle"
    version: ClassVar[str] = "3"
    capabilities: ClassVar[Capabilities] = Capabilities(
        interactions=frozenset({"single_turn", "tools", "conversation", "gymnasium", "agent_in_env"}), tools=True
    )

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> "OracleSession":
        if descriptor.reference is None:
            raise Refused("harness oracle: expected a reference solution in the descriptor, found none", stage="agent")
        return OracleSession(descriptor.reference, descriptor.reference_actions, box)


class OracleSession:
    """One action a turn, then the solution; what of it belongs into a box is put there, and taken out as any agent's."""

    def __init__(self, reference: Submission, actions: Sequence[ToolCall | Utterance], box: AgentBox | None) -> None:
        self._reference = reference
        self._left = deque(actions)
        self._box = box

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        if not self._left:
            if self._box is not None:
                await self._work(self._box)
            return Turn([{"role": "assistant", "content": self._reference.text}], "completed")
        action = self._left.popleft()
        return Turn([_said(action)], None, [action])

    async def _work(self, box: AgentBox) -> None:
        """Do in a box what the solution does.

        Raises:
            EnvironmentFailure: it cannot be done there.
        """
        for path, text in self._reference.files.items():
            await box.sandbox.write(path, text.encode())
        if not self._reference.artifact:
            return
        argv = ["git", "apply", "--whitespace=nowarn", "-"]
        done = await box.sandbox.exec(argv, stdin=self._reference.artifact.encode(), timeout_s=APPLY_TIMEOUT_S)
        if not done.ok:
            said = (done.stderr.text.strip().splitlines() or [f"exit code {done.exit_code}"])[0]
            message = f"the environment's own solution cannot be applied in the box: {said:.300}"
            raise EnvironmentFailure(message, stage="agent", kind="reference_broken")

    async def close(self) -> Submission:
        if self._box is not None:
            return Submission(text=self._reference.text)
        return self._reference


def _said(action: ToolCall | Utterance) -> ChatMessage:
    """The message in which a model would have acted so."""
    if isinstance(action, Utterance):
        return {"role": "assistant", "content": action.text}
    function = {"name": action.name, "arguments": orjson.dumps(action.arguments).decode()}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": action.id, "type": "function", "function": function}]}
