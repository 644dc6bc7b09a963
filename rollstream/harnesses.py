"""Which harnesses there are and what each can play, for whoever composes a run.

The harnesses themselves live with the agent_worker, which the command line may not import; a test keeps the two in step. A
user's own harness is asked what it can play.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol, get_args

from rollstream.environments.protocol import Environment, Seeded, T, require_roles
from rollstream.errors import Refused
from rollstream.placements import check_placement, placement_of
from rollstream.plugins import HARNESS_ATTRIBUTES, HARNESS_ENTRY_POINTS, Plugins
from rollstream.settings import Settings
from schemas.session import Interaction
from schemas.values import Composition, tool_names


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an environment must offer for a harness to play it."""

    interactions: frozenset[Interaction]
    tools: bool = False
    needs_sandbox: bool = False
    """Works in a box, where its own commands run."""
    needs_tools: frozenset[str] = frozenset()
    """Names that must be among the environment's tools."""
    needs_reference: bool = False
    """Plays the environment's own solution, so there must be one."""


KNOWN_HARNESSES: dict[str, Capabilities] = {
    "bash_agent": Capabilities(interactions=frozenset({"tools"}), tools=True, needs_tools=frozenset({"bash"})),
    "chat": Capabilities(interactions=frozenset({"single_turn", "conversation", "gymnasium"})),
    "claude_code": Capabilities(
        interactions=frozenset({"single_turn", "agent_in_env", "conversation", "gymnasium", "tools"}),
        tools=True,
        needs_sandbox=True,
    ),
    "codex": Capabilities(
        interactions=frozenset({"single_turn", "agent_in_env", "conversation", "gymnasium", "tools"}),
        tools=True,
        needs_sandbox=True,
    ),
    "command": Capabilities(interactions=frozenset({"single_turn", "agent_in_env"}), needs_sandbox=True),
    "noop": Capabilities(interactions=frozenset(get_args(Interaction)), tools=True),
    "oracle": Capabilities(
        interactions=frozenset({"single_turn", "tools", "conversation", "gymnasium", "agent_in_env"}),
        tools=True,
        needs_reference=True,
    ),
    "tools": Capabilities(interactions=frozenset({"single_turn", "tools"}), tools=True),
}


class Claims(Protocol):
    """What a harness says of itself, as far as it is asked for here."""

    @property
    def interactions(self) -> frozenset[Interaction]: ...
    @property
    def tools(self) -> bool: ...
    @property
    def needs_sandbox(self) -> bool: ...


class _Harness(Protocol):
    @property
    def capabilities(self) -> Claims: ...


@dataclass(frozen=True, slots=True)
class _Shipped:
    """Stands for a harness that is shipped."""

    capabilities: Capabilities


_PLUGINS: Plugins[_Harness] = Plugins(
    ("harness", "harnesses"),
    HARNESS_ENTRY_POINTS,
    {name: partial(_Shipped, known) for name, known in KNOWN_HARNESSES.items()},
    HARNESS_ATTRIBUTES,
)


def declare(settings: Settings) -> None:
    """Make known what the settings of this process name. Called once, at its composition root.

    Raises:
        UsageError: a name is taken.
    """
    _PLUGINS.declare(settings.plugins.harnesses)


def names() -> list[str]:
    """Every harness that can be loaded here: shipped, declared and installed."""
    return _PLUGINS.names()


def capabilities(name: str) -> Capabilities:
    """What a harness can play.

    Raises:
        Refused: nobody provides it, or what provides it cannot be loaded.
    """
    found = _PLUGINS.load(name).capabilities
    if isinstance(found, Capabilities):
        return found
    return Capabilities(interactions=found.interactions, tools=found.tools, needs_sandbox=found.needs_sandbox)


def check_composition(composition: Composition, environment: Environment[T], task: T) -> Seeded:
    """Make sure that a harness and the run's models can play one task of an environment, as far as its descriptor tells.

    Returns:
        What the agent sees first.

    Raises:
        Refused: they cannot, or the environment does not accept the task.
    """
    seeded = environment.seed(task)
    check_seeded(composition, environment, task, seeded)
    return seeded


def check_seeded(composition: Composition, environment: Environment[T], task: T, seeded: Seeded) -> None:
    """As `check_composition`, for a task that was seeded already.

    Raises:
        Refused: it cannot be played so.
    """
    harness = composition.harness
    can = capabilities(harness)
    if seeded.interaction not in can.interactions:
        playable = ", ".join(sorted(can.interactions))
        raise Refused(f"harness {harness} plays {playable}, and environment {environment.name} asks for {seeded.interaction}")
    if seeded.tools and not can.tools:
        raise Refused(
            f"harness {harness} calls no tools, and environment {environment.name} offers {len(seeded.tools)} with this task"
        )
    if missing := can.needs_tools - tool_names(seeded.tools):
        raise Refused(
            f"harness {harness} works with a tool {', '.join(sorted(missing))}, and environment {environment.name} offers "
            f"{', '.join(sorted(tool_names(seeded.tools))) or 'none'}"
        )
    placement = placement_of(seeded.placement, can.needs_sandbox)
    check_placement(harness, can.needs_sandbox, placement, composition.sandbox, "admission")
    require_roles(environment, seeded, composition)
    if can.needs_reference and environment.reference(task) is None:
        raise Refused(f"harness {harness} plays the environment's own solution, and this task of {environment.name} has none")
