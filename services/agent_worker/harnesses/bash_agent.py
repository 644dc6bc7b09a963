"""`bash_agent`: an agent at a shell of the environment's. The loop is that of `tools`; what is added is how to go about it.

Its commands are actions of the environment's, so this harness has no box of its own and works wherever the environment offers a
tool called `bash`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rollstream.errors import Refused
from schemas.session import SessionReady, Submission
from schemas.values import ChatMessage, tool_names
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models, Turn
from services.agent_worker.harnesses.tools import ToolsSession

SHELL = "bash"
SUBMIT = "submit"
INSTRUCTIONS = """\
You work in a sandbox through tools, above all `bash`. Go step by step: look at what is there, make one change at a time, and
run what shows whether it was right before you go on. Nobody can answer questions. Every command has a shell of its own, so
change directory and set variables in the command that needs them; what you write to files stays.
"""
DONE_BY_SUBMITTING = "When the work is done, call `submit`."
DONE_BY_SAYING = "When the work is done, say so in a message without calling any tool."


class BashAgentHarness:
    name: ClassVar[str] = "bash_agent"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = Capabilities(interactions=frozenset({"tools"}), tools=True)

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> "BashAgentSession":
        names = tool_names(descriptor.tools)
        if SHELL not in names:
            offered = ", ".join(sorted(names)) or "none"
            raise Refused(
                f"harness bash_agent works with a tool {SHELL}, and environment {descriptor.environment} offers {offered}",
                stage="agent",
                kind="no_shell",
            )
        return BashAgentSession(ToolsSession(models, descriptor.tools), instructions(descriptor.messages, names))


def instructions(messages: Sequence[ChatMessage], tools: frozenset[str]) -> list[ChatMessage]:
    """What is said to the agent beside the environment's messages: nothing where these tell it how to work already."""
    if any(message["role"] in ("system", "developer") for message in messages):
        return []
    text = INSTRUCTIONS + (DONE_BY_SUBMITTING if SUBMIT in tools else DONE_BY_SAYING)
    # Behind the environment's, not before: what the agent adds to a transcript follows what it was shown.
    return [{"role": "user", "content": text}]


class BashAgentSession:
    def __init__(self, loop: ToolsSession, instructions: Sequence[ChatMessage]) -> None:
        self._loop = loop
        self._instructions = list(instructions)

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        said, self._instructions = self._instructions, []
        turn = await self._loop.activate([*observation, *said])
        return replace(turn, messages=[*said, *turn.messages])

    async def close(self) -> Submission:
        return await self._loop.close()
