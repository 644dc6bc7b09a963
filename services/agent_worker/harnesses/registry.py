"""Harnesses by name."""

from rollstream.errors import Refused
from schemas.session import SessionReady
from services.agent_worker.harnesses.chat import ChatHarness
from services.agent_worker.harnesses.oracle import OracleHarness
from services.agent_worker.harnesses.protocol import Harness

HARNESSES: dict[str, type[Harness]] = {"chat": ChatHarness, "oracle": OracleHarness}


def load(name: str) -> Harness:
    """The harness called `name`.

    Raises:
        Refused: there is none.
    """
    if name not in HARNESSES:
        raise Refused(f"unknown harness {name!r}: known are {', '.join(sorted(HARNESSES))}", stage="agent")
    return HARNESSES[name]()


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
    if descriptor.placement != "none":
        raise Refused(
            f"harness {harness.name} works without a sandbox, but environment {descriptor.environment} "
            f"asks for placement {descriptor.placement}",
            stage="agent",
        )
