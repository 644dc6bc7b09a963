"""Harnesses by name: shipped, declared in the settings of the process, or installed."""

from rollstream.errors import Refused
from rollstream.placements import check_placement, placement_of
from rollstream.plugins import HARNESS_ATTRIBUTES, HARNESS_ENTRY_POINTS, Plugins
from rollstream.settings import Settings
from schemas.session import SessionReady
from services.agent_worker.harnesses.bash_agent import BashAgentHarness
from services.agent_worker.harnesses.chat import ChatHarness
from services.agent_worker.harnesses.claude_code import ClaudeCodeHarness
from services.agent_worker.harnesses.codex import CodexHarness
from services.agent_worker.harnesses.command import CommandHarness
from services.agent_worker.harnesses.noop import NoopHarness
from services.agent_worker.harnesses.oracle import OracleHarness
from services.agent_worker.harnesses.protocol import Harness
from services.agent_worker.harnesses.tools import ToolsHarness

HARNESSES: dict[str, type[Harness]] = {
    "bash_agent": BashAgentHarness,
    "chat": ChatHarness,
    "claude_code": ClaudeCodeHarness,
    "codex": CodexHarness,
    "command": CommandHarness,
    "noop": NoopHarness,
    "oracle": OracleHarness,
    "tools": ToolsHarness,
}

_PLUGINS: Plugins[Harness] = Plugins(
    ("harness", "harnesses"), HARNESS_ENTRY_POINTS, HARNESSES, HARNESS_ATTRIBUTES, stage="agent"
)


def declare(settings: Settings) -> None:
    """Make known what the settings of this process name. Called once, at its composition root.

    Raises:
        UsageError: a name is taken.
    """
    _PLUGINS.declare(settings.plugins.harnesses)


def load(name: str) -> Harness:
    """The harness called `name`.

    Raises:
        Refused: nobody provides it, or what provides it cannot be loaded. The sentence lists the names there are.
    """
    return _PLUGINS.load(name)


def check(harness: Harness, descriptor: SessionReady) -> None:
    """Make sure that a harness can play a session.

    Raises:
        Refused: with the sentence why not.
    """
    can = harness.capabilities
    if descriptor.interaction not in can.interactions:
        raise Refused(
            f"harness {harness.name} plays {', '.join(sorted(can.interactions))}, "
            f"but environment {descriptor.environment} asks for {descriptor.interaction}",
            stage="agent",
        )
    if descriptor.tools and not can.tools:
        raise Refused(
            f"harness {harness.name} calls no tools, but environment {descriptor.environment} "
            f"offers {len(descriptor.tools)} with this task",
            stage="agent",
        )
    placement = placement_of(descriptor.placement, can.needs_sandbox)
    check_placement(harness.name, can.needs_sandbox, placement, descriptor.composition.sandbox, "agent")
