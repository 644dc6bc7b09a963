"""Where agent and world run: what the environment asks for, with what the harness needs. Pure."""

from rollstream.errors import Refused, Stage
from schemas.sandbox import SandboxSpec
from schemas.session import PLACEMENTS_WITH_A_BOX, Placement
from schemas.values import Composition

_WITH_A_HARNESS_IN_A_BOX: dict[Placement, Placement] = {"none": "agent_sandboxed", "env_sandboxed": "separate"}


def placement_of(asked: Placement, needs_sandbox: bool) -> Placement:
    """The placement of a session.

    Args:
        asked: by the environment; one that was already placed stays as it is.
        needs_sandbox: whether the harness works in a box.
    """
    return _WITH_A_HARNESS_IN_A_BOX.get(asked, asked) if needs_sandbox else asked


def with_backend(composition: Composition, placement: Placement, default: str) -> Composition:
    """What runs together in a placement: with a backend where it takes one, and as it was where it names one or takes none."""
    if placement == "none" or composition.sandbox is not None:
        return composition
    return composition.model_copy(update={"sandbox": default})


def agent_box(placement: Placement, described: SandboxSpec | None, own: SandboxSpec) -> SandboxSpec | None:
    """The box that a session describes: the agent's, or the world's where the agent has none.

    Args:
        described: by the environment.
        own: the settings', for a harness that brings its box to an environment that has none for it.
    """
    return own if placement in ("agent_sandboxed", "separate") else described


def check_placement(harness: str, needs_sandbox: bool, placement: Placement, sandbox: str | None, stage: Stage) -> None:
    """Make sure that a session can be placed.

    Args:
        sandbox: the run's backend.

    Raises:
        Refused: with the sentence why not.
    """
    if needs_sandbox and placement not in PLACEMENTS_WITH_A_BOX:
        raise Refused(f"harness {harness} works in a sandbox, and placement {placement} gives the agent none", stage=stage)
    if placement != "none" and sandbox is None:
        raise Refused(
            f"harness {harness} in placement {placement} takes a sandbox, and the run names no backend; "
            "add --sandbox docker or --sandbox bubblewrap",
            stage=stage,
            kind="no_sandbox",
        )
