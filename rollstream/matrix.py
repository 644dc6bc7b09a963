"""Which harness plays which environment on which sandbox backend, and why not: what `publish` checks, for every combination.

Told by one task of each environment, because what an environment asks for is its answer to a task.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollstream import harnesses
from rollstream.backends import Backends
from rollstream.datasets import BadLine, read_rows
from rollstream.environments import registry
from rollstream.environments.intake import normalise_row
from rollstream.environments.protocol import Environment, Seeded, ShowsExample, Task
from rollstream.errors import BoundaryFailure, Refused
from rollstream.placements import placement_of, with_backend
from rollstream.settings import Defaults
from schemas.session import Placement
from schemas.values import Composition

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    environment: str
    harness: str
    sandbox: str
    """The backend; whether it is used is for `placement` to say."""
    runs: bool
    placement: Placement | None = None
    why_not: str = ""
    roles: tuple[str, ...] = ()
    """Beside the policy, that the run must bind models to."""


def example_of(environment: Environment[Any]) -> Row | None:
    """The task that an environment shows, if it shows one."""
    return environment.example if isinstance(environment, ShowsExample) else None


def first_rows(file: Path, environment: str | None, defaults: Defaults) -> dict[str, Row]:
    """The first row of each environment in a task file.

    Raises:
        UsageError: it cannot be read.
        Refused: a row is none, or names no environment.
    """
    found: dict[str, Row] = {}
    for row in read_rows(file):
        if isinstance(row, BadLine):
            raise Refused(f"line {row.line} of {file}: {row.reason}")
        normal = normalise_row(row.content, environment=environment, fields={}, defaults=defaults)
        found.setdefault(normal.environment, normal.row)
    return found


def walk(
    environments: Sequence[str], players: Sequence[str], sandboxes: Sequence[str], backends: Backends, rows: Mapping[str, Row]
) -> Iterator[Cell]:
    """Every combination in turn.

    Args:
        players: harnesses.
        rows: tasks to tell by, in place of those that environments show.
    """
    for name in environments:
        found = _seeded(name, rows)
        for harness in players:
            for sandbox in sandboxes:
                yield _cell(name, found, harness, sandbox, replace(backends, default=sandbox))


def _seeded(name: str, rows: Mapping[str, Row]) -> "_Seeded | str":
    """A task of an environment and its answer to it, or why there is none."""
    try:
        environment = registry.load(name)
        row = rows.get(name) or example_of(environment)
        if row is None:
            return f"environment {name} shows no example task: give a file with one"
        task = registry.admit(environment, row)
        return _Seeded(environment, task, environment.seed(task))
    except BoundaryFailure as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class _Seeded:
    environment: Environment[Any]
    task: Task
    seeded: Seeded


def _cell(name: str, found: "_Seeded | str", harness: str, sandbox: str, backends: Backends) -> Cell:
    if isinstance(found, str):
        return Cell(name, harness, sandbox, runs=False, why_not=found)
    seeded = found.seeded
    models = dict.fromkeys(("policy", *seeded.roles), "default")
    try:
        placement = placement_of(seeded.placement, harnesses.capabilities(harness).needs_sandbox)
        composition = with_backend(Composition(harness=harness, models=models), placement, sandbox)
        harnesses.check_seeded(composition, found.environment, found.task, seeded)
        if composition.sandbox is not None:
            backends.check_boxes(name, placement, seeded, composition.sandbox)
    except Refused as error:
        return Cell(name, harness, sandbox, runs=False, why_not=str(error))
    return Cell(name, harness, sandbox, True, placement, roles=tuple(sorted(seeded.roles)))
