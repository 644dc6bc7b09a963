"""Two runs, task by task: what got better, what got worse, and what cannot be said.

The same task in both runs makes a pair, and the difference is taken within pairs: how hard a task is cancels out. Tasks that
only one run has, or has scored, are counted and named, never dropped in silence.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import duckdb

from rollstream.errors import UsageError
from rollstream.store.report.attempts import Attempts, GroupFacts
from rollstream.store.report.report import with_zeros
from rollstream.store.report.runs import read_manifest, resolve_run
from rollstream.store.report.statistics import Estimate, mean
from schemas.run import RunPublished

SOLVED = 0.5
"""A task is solved when at least this share of its scored attempts succeeded; one attempt a task is the ordinary case."""


@dataclass(frozen=True, slots=True)
class TaskScore:
    """What one run got of one task."""

    scored: int
    succeeded: int
    mean_reward: float

    @property
    def success_rate(self) -> float:
        return self.succeeded / self.scored

    @property
    def solved(self) -> bool:
        return self.success_rate >= SOLVED


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that one run solves and the other does not."""

    task: str
    base: TaskScore
    other: TaskScore


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of both runs over the paired tasks, and the other run minus the base."""

    metric: str
    base: float | None
    other: float | None
    difference: Estimate


@dataclass(frozen=True, slots=True)
class EnvironmentComparison:
    """The tasks of one environment in both runs."""

    environment: str
    paired: int
    """Tasks that both runs have scored; all numbers are over them."""
    differences: tuple[Difference, ...]
    gained: tuple[Flip, ...]
    """Solved by the other run alone."""
    lost: tuple[Flip, ...]
    """Solved by the base alone."""
    both_solved: int
    neither_solved: int
    only_base: tuple[str, ...]
    only_other: tuple[str, ...]
    unscored: tuple[str, ...]
    """Tasks of both runs that one of them, or both, has no score of."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run against a base."""

    base: str
    other: str
    missing_as_zero: bool
    setup: tuple[str, ...]
    """What else distinguishes the two runs, a line each; then the difference may be due to that."""
    environments: tuple[EnvironmentComparison, ...]


def read_comparison(
    connection: duckdb.DuckDBPyConnection, base: str, other: str, *, missing_as_zero: bool = False
) -> Comparison:
    """Compare `other` with `base`, both in the published store.

    Raises:
        UsageError: the store does not know one of them, or they have no task in common.
    """
    base, other = resolve_run(connection, base), resolve_run(connection, other)
    if base == other:
        raise UsageError(f"expected another run to compare {base} with, found the same one")
    groups = [Attempts.of(connection, run, ("environment",)).groups() for run in (base, other)]
    setup = _setup(read_manifest(connection, base), read_manifest(connection, other))
    compared = tuple(
        compare(labels[0] or "unknown", *(_of_tasks(run.get(labels, ()), missing_as_zero) for run in groups))
        for labels in sorted({*groups[0], *groups[1]}, key=str)
    )
    if not any(each.paired or each.unscored for each in compared):
        raise UsageError(f"runs {base} and {other} have no task in common: tasks are paired by environment, dataset and id")
    return Comparison(base, other, missing_as_zero, tuple(setup), compared)


def _setup(base: RunPublished | None, other: RunPublished | None) -> Iterator[str]:
    """What distinguishes two runs but for their tasks' results, a line each."""
    if base is None or other is None:
        yield "that one of them has no manifest, so nobody can say what else"
        return
    # Ids of groups hold the name of their run.
    yield from (line for line in base.difference(other) if not line.startswith("groups_sha256:"))
    if None not in (base.prompts_sha256, other.prompts_sha256) and base.prompts_sha256 != other.prompts_sha256:
        yield f"prompts_sha256: {base.prompts_sha256} -> {other.prompts_sha256}"
    for name in sorted({*base.versions, *other.versions} - {"python"}):
        before, after = base.versions.get(name, "none"), other.versions.get(name, "none")
        if before != after:
            yield f"versions.{name}: {before} -> {after}"


def _of_tasks(groups: Iterable[GroupFacts], missing_as_zero: bool) -> dict[str, GroupFacts]:
    """Every task with its groups, of whatever epoch, added up."""
    found: dict[str, GroupFacts] = {}
    for group in (with_zeros(group) if missing_as_zero else group for group in groups):
        known = found.get(group.task, replace(group, attempted=0, scored=0, succeeded=0, reward_sum=0.0))
        found[group.task] = GroupFacts(
            group.task,
            known.attempted + group.attempted,
            known.scored + group.scored,
            known.succeeded + group.succeeded,
            known.reward_sum + group.reward_sum,
        )
    return found


def compare(environment: str, base: Mapping[str, GroupFacts], other: Mapping[str, GroupFacts]) -> EnvironmentComparison:
    """Pair the tasks of two runs. Pure."""
    common = sorted(base.keys() & other.keys())
    paired = [task for task in common if base[task].scored and other[task].scored]
    pairs = {task: (_score(base[task]), _score(other[task])) for task in paired}
    flips = [Flip(task, before, after) for task, (before, after) in pairs.items() if before.solved != after.solved]
    return EnvironmentComparison(
        environment=environment,
        paired=len(paired),
        differences=(
            _difference("pass@1", [(before.success_rate, after.success_rate) for before, after in pairs.values()]),
            _difference("mean reward", [(before.mean_reward, after.mean_reward) for before, after in pairs.values()]),
        ),
        gained=tuple(flip for flip in flips if flip.other.solved),
        lost=tuple(flip for flip in flips if flip.base.solved),
        both_solved=sum(before.solved and after.solved for before, after in pairs.values()),
        neither_solved=sum(not before.solved and not after.solved for before, after in pairs.values()),
        only_base=tuple(sorted(base.keys() - other.keys())),
        only_other=tuple(sorted(other.keys() - base.keys())),
        unscored=tuple(task for task in common if task not in pairs),
    )


def _score(group: GroupFacts) -> TaskScore:
    return TaskScore(group.scored, group.succeeded, group.reward_sum / group.scored)


def _difference(metric: str, pairs: list[tuple[float, float]]) -> Difference:
    count = len(pairs)
    return Difference(
        metric,
        sum(before for before, _ in pairs) / count if count else None,
        sum(after for _, after in pairs) / count if count else None,
        mean(after - before for before, after in pairs),
    )
