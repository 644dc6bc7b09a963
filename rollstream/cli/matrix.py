"""`rollstream matrix`: which harness plays which environment on which sandbox backend, and why not."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from rollstream import harnesses
from rollstream.backends import Backends
from rollstream.cli.common import Config, DataDir, out, read_settings, table
from rollstream.cli.own import given_by_path
from rollstream.environments import registry
from rollstream.environments.intake import Unreadable
from rollstream.errors import Refused, UsageError
from rollstream.matrix import Cell, first_rows, walk
from rollstream.sandboxes import registry as sandboxes

File = Annotated[
    Path | None,
    typer.Argument(
        help="Tasks to tell by: the first of each environment. Default: the one that each environment shows.",
        metavar="FILE",
        show_default=False,
    ),
]


def matrix(
    file: File = None,
    environment: Annotated[
        list[str] | None,
        typer.Option("--environment", "-e", help="Only this one: a name, or path.py:Class. Repeatable.", show_default=False),
    ] = None,
    harness: Annotated[
        list[str] | None,
        typer.Option("--harness", help="Only this one: a name, or path.py:Class. Repeatable.", show_default=False),
    ] = None,
    sandbox: Annotated[
        list[str] | None, typer.Option("--sandbox", help="Only this backend. Repeatable.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, an entry for each combination.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Say of every harness, environment and sandbox backend whether they run together, or why not.

    Asks no engine: what a backend cannot hold on this machine, `rollstream doctor` tells.

    Example: rollstream matrix --harness oracle
    """
    own, chosen, players = given_by_path(read_settings(data_dir, config), environment or [], harness or [])
    rows = {}
    if file is not None:
        try:
            rows = first_rows(file, chosen[0] if len(chosen) == 1 else None, own.settings.defaults)
        except (Refused, Unreadable) as error:
            raise UsageError(str(error)) from None
    cells = list(
        walk(
            _known(chosen, registry.names(), "environments") or list(rows) or registry.names(),
            _known(players, harnesses.names(), "harnesses") or harnesses.names(),
            _known(sandbox or [], sandboxes.names(), "sandbox providers") or sandboxes.names(),
            Backends.of(own.settings),
            rows,
        )
    )
    if as_json:
        print(json.dumps([asdict(cell) for cell in cells], indent=2))
        return
    shown = table("environment", "harness", "sandbox", "placement", "why not")
    for row in _told(cells):
        shown.add_row(*row)
    out.print(shown)
    out.print(f"{sum(cell.runs for cell in cells)} of {len(cells)} combinations run")


def _known(named: Sequence[str | None], known: Sequence[str], noun: str) -> list[str]:
    """
    Raises:
        UsageError: a name is none of those there are.
    """
    names = [name for name in named if name is not None]
    for name in names:
        if name not in known:
            raise UsageError(f"expected one of the {noun} {', '.join(known)}, found {name!r}")
    return names


def _told(cells: Sequence[Cell]) -> Iterator[tuple[str, ...]]:
    """A line for each answer: backends of which the same is true stand together."""
    for (environment, harness), group in groupby(cells, key=lambda cell: (cell.environment, cell.harness)):
        answers: dict[tuple[str, str], list[str]] = {}
        backends = 0
        for cell in group:
            backends += 1
            roles = f"; --role {' --role '.join(f'{role}=MODEL' for role in cell.roles)}" if cell.roles else ""
            answers.setdefault((f"{cell.placement}{roles}" if cell.runs else "", cell.why_not), []).append(cell.sandbox)
        for (placement, why_not), names in answers.items():
            yield environment, harness, "any" if len(names) == backends else ", ".join(names), placement, why_not
