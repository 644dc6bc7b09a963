"""Environments by name, and the door every row passes.

Shipped ones stand in a literal dict; a user's own come through the entry point group `rollstream.environments`, or are declared
in the settings of the process: as a path, or as the address of a server.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from rollstream.environments.protocol import Environment, Seeded, SteppedEnvironment, Task, World, is_stepped
from rollstream.errors import EnvironmentFailure, Refused
from rollstream.plugins import ENVIRONMENT_ATTRIBUTES, ENVIRONMENT_ENTRY_POINTS, Plugins
from rollstream.settings import HttpEnvironmentSettings, Settings
from schemas.events import describe
from schemas.session import Interaction
from schemas.values import JsonObject

R = TypeVar("R")

ALWAYS_PUBLIC = frozenset({"messages", "tools"})
WORLDLESS: frozenset[Interaction] = frozenset({"single_turn", "agent_in_env"})
"""Interactions in which the environment does not act between seed and verdict."""


def _shipped(module: str, name: str, *arguments: object) -> Callable[[], Environment[Any]]:
    """A class that is imported when somebody asks for it: most processes use few of them, and every import takes its time."""

    def make() -> Environment[Any]:
        found = getattr(import_module(f"rollstream.environments.{module}"), name)
        return cast("Environment[Any]", found(*arguments))

    return make


ENVIRONMENTS: dict[str, Callable[[], Environment[Any]]] = {
    "math": _shipped("math", "MathEnvironment"),
    "multiple_choice": _shipped("multiple_choice", "MultipleChoiceEnvironment"),
    "gymnasium": _shipped("gymnasium.environment", "GymnasiumEnvironment"),
    "conversation": _shipped("conversation.environment", "ConversationEnvironment"),
    "self_play": _shipped("self_play", "SelfPlayEnvironment"),
    "workplace": _shipped("workplace.environment", "WorkplaceEnvironment"),
    "counter": _shipped("counter", "CounterEnvironment"),
    "weather_tools": _shipped("weather_tools", "WeatherToolsEnvironment"),
    "code_repair": _shipped("code.code_repair", "CodeRepairEnvironment"),
    "code_repair_tools": _shipped("code.code_repair_tools", "CodeRepairToolsEnvironment"),
    "swe_bench": _shipped("code.swe_bench", "SweBenchEnvironment"),
}


_PLUGINS: Plugins[Environment[Any]] = Plugins(
    ("environment", "environments"), ENVIRONMENT_ENTRY_POINTS, ENVIRONMENTS, ENVIRONMENT_ATTRIBUTES
)


@dataclass(frozen=True, slots=True)
class _Server:
    """Where an environment on a server comes from."""

    settings: HttpEnvironmentSettings

    def __str__(self) -> str:
        return self.settings.url


def declare(settings: Settings) -> None:
    """Make known what the settings of this process name. Called once, at its composition root.

    Raises:
        UsageError: a name is taken.
    """
    # What an environment calls itself is a class's in general, and a server's own here.
    servers: dict[str, tuple[object, Callable[[], Environment[Any]]]] = {
        name: (_Server(server), _shipped("http.environment", "HttpEnvironment", name, server))
        for name, server in settings.environments.http.items()
    }
    _PLUGINS.declare(settings.plugins.environments, servers)
    ENVIRONMENTS["swe_bench"] = _shipped("code.swe_bench", "SweBenchEnvironment", settings.environments.swe_bench)


def names() -> list[str]:
    """Every environment that can be loaded here: shipped, declared and installed."""
    return _PLUGINS.names()


def origin(name: str) -> str:
    """Where an environment comes from, for people."""
    return _PLUGINS.origin(name)


def load(name: str) -> Environment[Any]:
    """The environment called `name`; one instance a process, because instances are stateless.

    Raises:
        Refused: nobody provides it, or what provides it cannot be loaded. The sentence lists the names there are.
    """
    return _PLUGINS.load(name)


def find(name: str) -> Environment[Any] | None:
    """The environment called `name`, or None where it cannot be loaded."""
    try:
        return load(name)
    except Refused:
        return None


def admit(environment: Environment[Any], row: Mapping[str, object]) -> Task:
    """Validate a row against the environment's own schema.

    Raises:
        Refused: with the first field that does not fit.
    """
    try:
        task: Task = environment.task_type.model_validate(row)
    except ValidationError as error:
        message = f"expected a task of environment {environment.name}, found {describe(error)}"
        raise Refused(message, stage="admission", kind="invalid_task") from None
    return task


def seed(environment: Environment[Any], task: Task) -> Seeded:
    """The environment's answer to a task, made sure to hold together.

    Raises:
        Refused: the environment does not accept the task.
        EnvironmentFailure: it asks for an interaction that it has no world or no `step` for.
    """
    seeded = environment.seed(task)
    if seeded.interaction in WORLDLESS:
        return seeded
    if not is_stepped(environment) or not isinstance(seeded.world, environment.world_type):
        found = type(seeded.world).__name__ if is_stepped(environment) else "no step"
        raise EnvironmentFailure(
            f"environment {environment.name}: expected a world and a step for {seeded.interaction}, found {found}",
            stage="seed",
            kind="environment_broken",
        )
    return seeded


async def apart(environment: Environment[Any], function: Callable[..., R], *arguments: Any) -> R:
    """Call a function that seeds: in a thread where that waits for somebody else, such as a server."""
    if getattr(environment, "seed_blocks", False):
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)


def first_world(environment: SteppedEnvironment[Any, Any], task: Task) -> World:
    """Where the world of a task begins."""
    world = seed(environment, task).world
    if world is None:
        raise Refused(f"this task of environment {environment.name} has no world to act in", stage="agent", kind="no_actions")
    return world


def world_of(environment: SteppedEnvironment[Any, Any], written: str) -> World:
    """A world that was written down.

    Raises:
        EnvironmentFailure: it is none of this environment's, perhaps of another version of it.
    """
    try:
        world: World = environment.world_type.model_validate_json(written)
    except ValidationError as error:
        message = f"environment {environment.name}: a world cannot be read back, found {describe(error)}"
        raise EnvironmentFailure(message, stage="agent", kind="bad_world") from None
    return world


def public_view(environment: Environment[Any], row: Mapping[str, object]) -> JsonObject:
    """The fields of a row that the agent side may see; everything else grades."""
    public = environment.public_fields | ALWAYS_PUBLIC
    return {name: value for name, value in row.items() if name in public}
