"""The numbers of a run, from the published store.

An attempt that failed has no reward and is no failure of the agent: means and pass@k are over scored attempts, and `coverage`
says how many of the attempted those are. Attempted counts what the manifest promised, so attempts that are still out show too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import duckdb

from rollstream.environments.protocol import ScoredVerdict
from rollstream.store.reader import query
from rollstream.store.report.attempts import Attempts, Dimension, GroupFacts, Labels
from rollstream.store.report.prices import Price, Usage, sum_of_known, usage_of
from rollstream.store.report.runs import read_manifest, resolve_run
from rollstream.store.report.statistics import Cluster, Estimate, estimate, pass_at_k, pass_hat_k

Aggregate = Callable[[str, Iterable[ScoredVerdict]], Mapping[str, float]]
"""Environment and its verdicts -> metrics of its own."""


@dataclass(frozen=True, slots=True)
class PassAt:
    """An estimate for k attempts at each task, over the groups that have k scored attempts."""

    k: int
    estimate: Estimate
    groups: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Attempts that ended without a reward for the same reason."""

    stage: str
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of scored attempts went: median, 95th percentile and sum, in seconds. Parts do not overlap."""

    part: str
    p50: float
    p95: float
    total: float


@dataclass(frozen=True, slots=True)
class StepReward:
    """What the environment gave for one step, over the attempts that came so far."""

    index: int
    mean: float
    attempts: int


@dataclass(frozen=True, slots=True)
class Revision:
    """Attempts whose counting verdict is of the same revision, by the same version of its environment."""

    environment: str
    environment_version: str | None
    revision: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Slice:
    """One part of a run: an environment, or whatever the report was asked to distinguish."""

    labels: Labels
    tasks: int
    groups: int
    attempted: int
    completed: int
    truncated: int
    errored: int
    cancelled: int
    scored: int
    succeeded: int
    mean_reward: Estimate
    """Over scored attempts."""
    success_rate: Estimate
    """Over scored attempts."""
    pass_at: tuple[PassAt, ...]
    """At least one of k succeeds; k = 1 is the average of all attempts at a task, averaged over tasks."""
    pass_hat: tuple[PassAt, ...]
    """All of k succeed, for k > 1."""
    metrics: tuple[tuple[str, float], ...]
    """The environment's own."""
    failures: tuple[Failure, ...]
    steps_mean: float | None
    """Model calls of a scored attempt."""
    steps_most: int | None
    step_rewards: tuple[StepReward, ...]
    usage: tuple[Usage, ...]
    """Of every try, also of those that do not count: what was paid for."""
    time: tuple[Seconds, ...]

    @property
    def ended(self) -> int:
        return self.completed + self.truncated + self.errored + self.cancelled

    @property
    def unfinished(self) -> int:
        return max(0, self.attempted - self.ended)

    @property
    def coverage(self) -> float:
        """Scored of attempted."""
        return self.scored / self.attempted if self.attempted else 0.0

    @property
    def cost(self) -> float | None:
        """Of all calls whose model has a price; None when none has."""
        return sum_of_known(usage.cost for usage in self.usage)

    @property
    def cost_usd(self) -> float | None:
        """Told by calls whose model has no price; None when none told. The least that was paid where some told nothing."""
        return sum_of_known(usage.cost_usd for usage in self.usage)


@dataclass(frozen=True, slots=True)
class Report:
    """One run, as far as it is published."""

    run: str
    dataset: str | None
    harness: str | None
    model: str | None
    benchmark: str | None
    """Which benchmark it was published as, if it was."""
    published_at: datetime
    """When the store was; all times are UTC."""
    submitted_at: datetime | None
    ended_at: datetime | None
    wall_s: float | None
    """From the first task submitted to the last attempt ended."""
    by: tuple[Dimension, ...]
    missing_as_zero: bool
    """Whether attempts without a reward were counted as zeros, because somebody asked for it."""
    slices: tuple[Slice, ...]
    revisions: tuple[Revision, ...]
    prices: Mapping[str, Price]
    """Those that were used."""
    state: str = "active"
    """`active`, `paused` or `cancelled`."""
    paused_because: str | None = None
    retries_waiting: int = 0
    regrades_waiting: int = 0

    @property
    def attempted(self) -> int:
        return sum(each.attempted for each in self.slices)

    @property
    def ended(self) -> int:
        return sum(each.ended for each in self.slices)

    @property
    def complete(self) -> bool:
        """Whether every attempt has ended."""
        return self.ended >= self.attempted


def read_report(
    connection: duckdb.DuckDBPyConnection,
    run: str | None = None,
    *,
    by: Sequence[Dimension] = ("environment",),
    missing_as_zero: bool = False,
    prices: Mapping[str, Price] | None = None,
    aggregate: Aggregate | None = None,
) -> Report:
    """The report of `run`, or of the run that was published last.

    Args:
        by: what its parts are to be distinguished by.
        missing_as_zero: count every attempt that was promised, and those without a reward as 0.
        prices: of models, by name.
        aggregate: is asked for the environments' own metrics, where parts are told apart by environment.

    Raises:
        UsageError: the store does not know the run; the sentence names others.
    """
    name = resolve_run(connection, run)
    row = query(connection, "SELECT * FROM runs WHERE run_id = $run", run=name)[0]
    manifest = read_manifest(connection, name)
    attempts = Attempts.of(connection, name, by)
    slices = _slices(attempts, manifest.composition.models if manifest else {}, prices or {}, missing_as_zero)
    if aggregate is not None and "environment" in by:
        place = by.index("environment")
        metrics = {labels: aggregate(labels[place] or "", verdicts) for labels, verdicts in attempts.verdicts()}
        slices = tuple(replace(part, metrics=tuple(metrics.get(part.labels, {}).items())) for part in slices)
    # What is verified once more, later, makes a run no longer.
    submitted_at, ended_at = row["submitted_at"], query(connection, _ENDED, run=name)[0]["ended_at"]
    used = {usage.model for part in slices for usage in part.usage if usage.cost is not None}
    return Report(
        run=name,
        dataset=row["dataset"],
        harness=row["harness"],
        model=row["model"],
        benchmark=manifest.benchmark if manifest else None,
        published_at=query(connection, "SELECT published_at FROM snapshot_info")[0]["published_at"],
        submitted_at=submitted_at,
        ended_at=ended_at,
        wall_s=(ended_at - submitted_at).total_seconds() if submitted_at and ended_at else None,
        by=tuple(by),
        missing_as_zero=missing_as_zero,
        slices=slices,
        revisions=tuple(Revision(**each) for each in attempts.revisions()),
        prices={model: price for model, price in (prices or {}).items() if model in used},
        state=row["state"],
        paused_because=row["paused_because"],
        retries_waiting=_count(connection, "retries WHERE waiting AND run_id = $run", name),
        regrades_waiting=_count(connection, "regrades WHERE waiting AND run_id = $run", name),
    )


_ENDED = "SELECT max(occurred_at) AS ended_at FROM rollout_scored WHERE run_id = $run AND revision = 0"


def _count(connection: duckdb.DuckDBPyConnection, what: str, run: str) -> int:
    found: int = query(connection, f"SELECT count(*) AS count FROM {what}", run=run)[0]["count"]
    return found


def _slices(
    attempts: Attempts, models: Mapping[str, str], prices: Mapping[str, Price], missing_as_zero: bool
) -> tuple[Slice, ...]:
    statuses, failures, times, steps = attempts.statuses(), attempts.failures(), attempts.times(), attempts.steps()
    usage, step_rewards = attempts.usage(), attempts.step_rewards()
    return tuple(
        _slice(
            labels,
            groups,
            missing_as_zero,
            **{status: statuses.get(labels, {}).get(status, 0) for status in _STATUSES},
            metrics=(),
            failures=tuple(Failure(**row) for row in failures.get(labels, ())),
            steps_mean=next((row["mean"] for row in steps.get(labels, ())), None),
            steps_most=next((row["most"] for row in steps.get(labels, ())), None),
            step_rewards=tuple(StepReward(**row) for row in step_rewards.get(labels, ())),
            usage=usage_of(usage.get(labels, ()), models, prices),
            time=tuple(Seconds(**row) for row in times.get(labels, ())),
        )
        for labels, groups in attempts.groups().items()
    )


_STATUSES = ("completed", "truncated", "errored", "cancelled")


def _slice(labels: Labels, groups: Sequence[GroupFacts], missing_as_zero: bool, **told: Any) -> Slice:
    counted = [with_zeros(group) for group in groups] if missing_as_zero else groups
    ks = ks_of(max(group.attempted for group in groups))
    return Slice(
        labels=labels,
        tasks=len({group.task for group in groups}),
        groups=len(groups),
        attempted=sum(group.attempted for group in groups),
        scored=sum(group.scored for group in groups),
        succeeded=sum(group.succeeded for group in groups),
        mean_reward=mean_reward(counted),
        success_rate=clustered(((group.task, group.succeeded, group.scored) for group in counted), bounded=True),
        pass_at=tuple(pass_over(counted, k, pass_at_k) for k in ks),
        pass_hat=tuple(pass_over(counted, k, pass_hat_k) for k in ks if k > 1),
        **told,
    )


def with_zeros(group: GroupFacts) -> GroupFacts:
    """The group as if every attempt without a reward had got 0."""
    return replace(group, scored=group.attempted)


def ks_of(attempts: int) -> list[int]:
    """1, 2, 4, … and the number of attempts itself, as in the view `pass_at_k`."""
    return sorted({attempts, *(2**power for power in range(8) if 2**power <= attempts)})


def clustered(values: Iterable[tuple[str, float, float]], *, bounded: bool) -> Estimate:
    """A mean over (task, sum, count), a cluster a task; counts of 0 say nothing."""
    sums: dict[str, list[float]] = {}
    for task, total, weight in values:
        if weight:
            cluster = sums.setdefault(task, [0.0, 0.0])
            cluster[0] += total
            cluster[1] += weight
    return estimate([Cluster(total, weight) for total, weight in sums.values()], bounded=bounded)


def mean_reward(groups: Iterable[GroupFacts]) -> Estimate:
    return clustered(((group.task, group.reward_sum, group.scored) for group in groups), bounded=False)


def pass_over(groups: Iterable[GroupFacts], k: int, estimator: Callable[[int, int, int], float | None]) -> PassAt:
    """The average of an estimator over groups, a cluster a task; groups with fewer than k scored attempts are left out."""
    found = [(group.task, estimator(group.scored, group.succeeded, k)) for group in groups]
    known = [(task, value, 1.0) for task, value in found if value is not None]
    return PassAt(k, clustered(known, bounded=True), len(known))
