"""A run held against a benchmark: refused with every difference, or measured by the benchmark's own metric."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import duckdb

from rollstream.benchmarks import Benchmark, Metric, NotThisBenchmark
from rollstream.store.reader import query
from rollstream.store.report.attempts import Attempts, GroupFacts
from rollstream.store.report.report import clustered, mean_reward, pass_over, with_zeros
from rollstream.store.report.runs import read_manifest, resolve_run
from rollstream.store.report.statistics import Estimate, pass_at_k, pass_hat_k


@dataclass(frozen=True, slots=True)
class Result:
    """What a run got in a benchmark."""

    metric: str
    estimate: Estimate
    scored: int
    attempted: int
    missing_as_zero: bool

    @property
    def whole(self) -> bool:
        """Whether every attempt was scored: only then the number is what the benchmark asks for."""
        return self.scored == self.attempted


def measure(
    connection: duckdb.DuckDBPyConnection, run: str | None, benchmark: Benchmark, *, missing_as_zero: bool = False
) -> Result:
    """The benchmark's metric of a run.

    Raises:
        NotThisBenchmark: the run is another experiment; the lines name every difference.
        UsageError: the store does not know the run.
    """
    name = resolve_run(connection, run)
    manifest = read_manifest(connection, name)
    if manifest is None:
        raise NotThisBenchmark(benchmark.name, f"run {name}", ["manifest: expected one, found none: its tasks came one by one"])
    attempts = Attempts.of(connection, name, ("environment",))
    versions: dict[str, frozenset[str | None]] = {}
    for row in attempts.revisions():
        versions[row["environment"]] = versions.get(row["environment"], frozenset()) | {row["environment_version"]}
    splits = frozenset(row["split"] for row in query(connection, _SPLITS, run=name))
    if found := [*benchmark.differences(manifest), *benchmark.differences_of_results(splits, versions)]:
        raise NotThisBenchmark(benchmark.name, f"run {name}", found)
    groups = [
        # Tasks of two environments are two tasks, whatever they are called.
        replace(group, task=f"{labels[0]}/{group.task}")
        for labels, of_environment in attempts.groups().items()
        for group in of_environment
    ]
    return Result(
        metric=benchmark.metric,
        estimate=_estimate(benchmark.measured, [with_zeros(group) for group in groups] if missing_as_zero else groups),
        scored=sum(group.scored for group in groups),
        attempted=sum(group.attempted for group in groups),
        missing_as_zero=missing_as_zero,
    )


_SPLITS = "SELECT DISTINCT split FROM tasks WHERE run_id = $run"


def _estimate(metric: Metric, groups: Iterable[GroupFacts]) -> Estimate:
    match metric.kind:
        case "mean_reward":
            return mean_reward(groups)
        case "success_rate":
            return clustered(((group.task, group.succeeded, group.scored) for group in groups), bounded=True)
        case "pass@":
            return pass_over(groups, metric.k, pass_at_k).estimate
        case "pass^":
            return pass_over(groups, metric.k, pass_hat_k).estimate
