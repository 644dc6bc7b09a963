"""Which harnesses there are and what each can play, for whoever composes a run.

The harnesses themselves live with the agent_worker, which the command line may not import; a test keeps the two in step.
"""

from dataclasses import dataclass

from rollstream.environments.protocol import Environment, T
from rollstream.errors import Refused
from schemas.session import Interaction


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an environment must offer for a harness to play it."""

    interactions: frozenset[Interaction]
    needs_reference: bool = False
    """Plays the environment's own solution, so there must be one."""


KNOWN_HARNESSES: dict[str, Capabilities] = {
    "chat": Capabilities(interactions=frozenset({"single_turn"})),
    "oracle": Capabilities(interactions=frozenset({"single_turn"}), needs_reference=True),
}


def check_composition(harness: str, environment: Environment[T], task: T) -> None:
    """Make sure that a known harness can play one task of an environment, as far as its descriptor tells.

    Raises:
        Refused: it cannot, or the environment does not accept the task.
    """
    can = KNOWN_HARNESSES[harness]
    seeded = environment.seed(task)
    if seeded.interaction not in can.interactions:
        playable = ", ".join(sorted(can.interactions))
        raise Refused(f"harness {harness} plays {playable}, and environment {environment.name} asks for {seeded.interaction}")
    if seeded.placement != "none":
        raise Refused(
            f"harness {harness} works without a sandbox, and environment {environment.name} asks for "
            f"placement {seeded.placement}"
        )
    if can.needs_reference and environment.reference(task) is None:
        raise Refused(f"harness {harness} plays the environment's own solution, and this task of {environment} has none")
