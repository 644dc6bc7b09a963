"""A task file held against its environments, in this process: what is refused, and what solutions and doing nothing score.

Whoever can score without doing anything would be trained to do nothing, and a solution that fails says that nobody can succeed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollstream.blobs import BlobStore
from rollstream.datasets import BadLine, Row
from rollstream.environments import registry
from rollstream.environments.intake import Unreadable, normalise_row
from rollstream.environments.protocol import Environment, LocalisesRows, Services, Task
from rollstream.errors import BoundaryFailure, Refused
from rollstream.settings import Defaults
from rollstream.testing.playing import ActedAfterTheEnd, BrokenPromise, Played, play, play_oracle, succeeds

Finding = Literal["good", "unsolved", "refused", "wrong"]
"""`unsolved`: nothing is wrong, but nothing was proved either: no reference solution, or one that takes models."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of one row."""

    line: int
    task: str
    environment: str
    finding: Finding
    reason: str = ""
    oracle: float | None = None
    noop: float | None = None


async def check_rows(
    rows: Iterable[Row | BadLine],
    environment: str | None,
    defaults: Defaults,
    services: Services,
    folder: Path,
    blobs: BlobStore,
) -> AsyncIterator[Checked]:
    """Check every row in turn.

    Args:
        services: for verification, with what boxes the check may start.
        folder: what rows name files in.
        blobs: keeps what they name there, for the time of the check.
    """
    for row in rows:
        if isinstance(row, BadLine):
            yield Checked(row.line, "", environment or "", "refused", row.reason)
            continue
        name, task_id = environment or "", ""
        try:
            normal = normalise_row(row.content, environment=environment, fields={}, defaults=defaults)
            name, task_id = normal.environment, normal.task_id or ""
            loaded = registry.load(name)
            row_here = normal.row
            if isinstance(loaded, LocalisesRows):
                row_here = await asyncio.to_thread(loaded.localise, normal.row, folder, blobs.keep)
            task = registry.admit(loaded, row_here)
            seeded = registry.seed(loaded, task)
        except (Refused, Unreadable, BoundaryFailure) as error:
            yield Checked(row.line, task_id, name, "refused", str(error))
            continue
        yield await _checked(row.line, task_id, loaded, task, sorted(seeded.roles), services)


async def _checked(
    line: int, task_id: str, environment: Environment[Any], task: Task, roles: list[str], services: Services
) -> Checked:
    oracle: Played | None = None
    noop: Played | None = None
    try:
        graders, sandboxes, blobs = services.graders, services.sandboxes, services.blobs
        noop = await play(environment, task, graders=graders, sandboxes=sandboxes, blobs=blobs)
        if not roles:
            oracle = await play_oracle(environment, task, graders=graders, sandboxes=sandboxes, blobs=blobs)
        wrong = _wrong(environment, oracle, noop)
    except (BrokenPromise, ActedAfterTheEnd, BoundaryFailure) as error:
        wrong = str(error)
    except Exception as error:
        wrong = f"environment {environment.name} raised {type(error).__name__}: {error}"
    scores = (oracle.verdict.reward if oracle else None, noop.verdict.reward if noop else None)
    if wrong:
        return Checked(line, task_id, environment.name, "wrong", wrong, *scores)
    if oracle is None:
        why = f"needs a model in the role {', '.join(roles)}" if roles else "has no reference solution"
        return Checked(line, task_id, environment.name, "unsolved", why, *scores)
    return Checked(line, task_id, environment.name, "good", "", *scores)


def _wrong(environment: Environment[Any], oracle: Played | None, noop: Played) -> str:
    if oracle is not None and not succeeds(environment, oracle.verdict):
        return f"the reference solution scores {oracle.verdict.reward}, expected at least {environment.success_threshold:g}"
    if succeeds(environment, noop.verdict):
        return f"doing nothing scores {noop.verdict.reward}, which counts as success"
    return ""
