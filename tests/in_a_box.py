"""A harness for tests that says it works in a box."""

from typing import ClassVar

from services.agent_worker.harnesses.chat import ChatHarness
from services.agent_worker.harnesses.protocol import Capabilities


class InABox(ChatHarness):
    name: ClassVar[str] = "in_a_box"
    capabilities: ClassVar[Capabilities] = Capabilities(interactions=frozenset({"single_turn"}), needs_sandbox=True)
