"""What a command line gives beside the settings: code of one's own as `path.py:Class` where a name can stand, and the
permission to run without a sandbox.

The command that starts workers tells them what it was given; workers that run already know only what they were started with.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from rollstream import harnesses
from rollstream.environments import registry
from rollstream.plugins import ENVIRONMENT_ATTRIBUTES, HARNESS_ATTRIBUTES, is_path, named_by_path
from rollstream.settings import Settings

UnsafeLocal = Annotated[
    bool,
    typer.Option(
        "--unsafe-local", help="Allow --sandbox local: commands of agents run with your own rights, isolated from nothing."
    ),
]


@dataclass(frozen=True, slots=True)
class Own:
    """What a command line gave that workers cannot know by themselves."""

    settings: Settings
    """Those that were read, with what was given."""
    environments: dict[str, str] = field(default_factory=dict)
    harnesses: dict[str, str] = field(default_factory=dict)
    unsafe_local: bool = False

    def variables(self) -> dict[str, str]:
        """What workers that this command starts must be told."""
        plugins = self.settings.plugins
        told = {}
        if self.environments:
            told["ROLLSTREAM_PLUGINS__ENVIRONMENTS"] = json.dumps(plugins.environments)
        if self.harnesses:
            told["ROLLSTREAM_PLUGINS__HARNESSES"] = json.dumps(plugins.harnesses)
        if self.unsafe_local:
            told["ROLLSTREAM_SANDBOXES__UNSAFE_LOCAL"] = "true"
        return told

    def caveat(self) -> str:
        """What must hold of workers that run already; empty when nothing was given."""
        given = [("environments", name, where) for name, where in self.environments.items()]
        given += [("harnesses", name, where) for name, where in self.harnesses.items()]
        tables = "; ".join(f'[plugins.{table}] {name} = "{where}"' for table, name, where in given)
        if self.unsafe_local:
            tables += f"{'; ' if tables else ''}[sandboxes] unsafe_local = true"
        if not tables:
            return ""
        return f"workers that run already must have been started with the same option, or with these settings: {tables}"


def given_by_path(
    settings: Settings, environments: Sequence[str | None], harness: Sequence[str | None], *, unsafe_local: bool = False
) -> tuple[Own, list[str | None], list[str | None]]:
    """Load what is given by path, and declare it beside what the settings declare.

    Returns:
        What was given, and every option with a name in place of its path.

    Raises:
        UsageError: a class cannot be had, or its name is taken.
    """
    own_environments, environment_names = _named(environments, ENVIRONMENT_ATTRIBUTES)
    own_harnesses, harness_names = _named(harness, HARNESS_ATTRIBUTES)
    plugins = settings.plugins.model_copy(
        update={
            "environments": {**settings.plugins.environments, **own_environments},
            "harnesses": {**settings.plugins.harnesses, **own_harnesses},
        }
    )
    allowed = settings.sandboxes.unsafe_local or unsafe_local
    sandboxes = settings.sandboxes.model_copy(update={"unsafe_local": allowed})
    settings = settings.model_copy(update={"plugins": plugins, "sandboxes": sandboxes})
    own = Own(settings, own_environments, own_harnesses, unsafe_local)
    registry.declare(own.settings)
    harnesses.declare(own.settings)
    return own, environment_names, harness_names


def _named(options: Sequence[str | None], required: Sequence[str]) -> tuple[dict[str, str], list[str | None]]:
    locations: dict[str, str] = {}
    names: list[str | None] = []
    for option in options:
        if option is None or not is_path(option):
            names.append(option)
            continue
        name, location = named_by_path(option, required)
        locations[name] = location
        names.append(name)
    return locations, names
