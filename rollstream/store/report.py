"""The numbers of a run, from the published store.

An attempt that failed has no reward and is no failure of the agent: means and pass@k are over scored attempts, and `coverage`
says how many of the attempted those are. Attempted counts what the manifest promised, so attempts that are still out show too.
"""

from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches

import duckdb

from rollstream.errors import UsageError
from rollstream.store.reader import query

RECENT = 5
"""How many runs are offered when one is not found."""


@dataclass(frozen=True, slots=True)
class PassAt:
    """Unbiased pass@k, averaged over the tasks that have k scored attempts."""

    k: int
    estimate: float | None
    tasks: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Attempts that failed alike."""

    stage: str
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of scored attempts went: median and 95th percentile, in seconds."""

    part: str
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    """One environment of a run."""

    environment: str
    tasks: int
    attempted: int
    completed: int
    truncated: int
    errored: int
    cancelled: int
    scored: int
    succeeded: int
    mean_reward: float | None
    """Over scored attempts; null when there are none."""
    pass_at: tuple[PassAt, ...]
    failures: tuple[Failure, ...]
    model_calls: int
    """Of every try, also of those that do not count: what was paid for."""
    prompt_tokens: int
    completion_tokens: int
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


@dataclass(frozen=True, slots=True)
class Report:
    """One run, as far as it is published."""

    run: str
    dataset: str | None
    harness: str | None
    model: str | None
    published_at: datetime
    """When the store was; all times are UTC."""
    submitted_at: datetime | None
    ended_at: datetime | None
    wall_s: float | None
    """From the first task submitted to the last attempt ended."""
    environments: tuple[EnvironmentReport, ...]
    state: str = "active"
    """`active`, `paused` or `cancelled`."""
    paused_because: str | None = None
    retries_waiting: int = 0

    @property
    def attempted(self) -> int:
        return sum(each.attempted for each in self.environments)

    @property
    def ended(self) -> int:
        return sum(each.ended for each in self.environments)

    @property
    def complete(self) -> bool:
        """Whether every attempt has ended."""
        return self.ended >= self.attempted


def read_report(connection: duckdb.DuckDBPyConnection, run: str | None = None) -> Report:
    """The report of `run`, or of the run that was published last.

    Raises:
        UsageError: the store does not know the run; the sentence names others.
    """
    name = resolve_run(connection, run)
    row = query(connection, "SELECT * FROM runs WHERE run_id = $run", run=name)[0]
    submitted_at, ended_at = row["submitted_at"], row["ended_at"]
    return Report(
        run=name,
        dataset=row["dataset"],
        harness=row["harness"],
        model=row["model"],
        published_at=query(connection, "SELECT published_at FROM snapshot_info")[0]["published_at"],
        submitted_at=submitted_at,
        ended_at=ended_at,
        wall_s=(ended_at - submitted_at).total_seconds() if submitted_at and ended_at else None,
        environments=_environments(connection, name),
        state=row["state"],
        paused_because=row["paused_because"],
        retries_waiting=query(connection, _WAITING, run=name)[0]["waiting"],
    )


def resolve_run(connection: duckdb.DuckDBPyConnection, run: str | None) -> str:
    """`run` if the store knows it; without one, the latest.

    Raises:
        UsageError: it does not, and the sentence names others, or it knows none.
    """
    rows = query(connection, "SELECT run_id FROM runs ORDER BY coalesce(published_at, submitted_at) DESC NULLS LAST, run_id")
    runs: list[str] = [row["run_id"] for row in rows]
    if not runs:
        raise UsageError("the published store has no run yet: publish one with `rollstream publish` or `rollstream run`")
    if run is None:
        return runs[0]
    if run in runs:
        return run
    close = get_close_matches(run, runs, n=RECENT)
    others = f"close to it: {', '.join(close)}" if close else f"the latest: {', '.join(runs[:RECENT])}"
    raise UsageError(f"no run {run!r} in the published store; {others}")


_ENVIRONMENTS = """
WITH promised AS (
    SELECT told.key AS environment, told.value::BIGINT AS tasks, attempts
    FROM (SELECT * FROM run_published WHERE run_id = $run ORDER BY kafka_offset LIMIT 1), json_each(environments) AS told
), seen AS (
    SELECT environment, count(*) AS tasks, sum(size) AS attempted FROM groups WHERE run_id = $run GROUP BY environment
), ended AS (
    SELECT
        environment,
        count(*) FILTER (status = 'completed') AS completed,
        count(*) FILTER (status = 'truncated') AS truncated,
        count(*) FILTER (status = 'errored') AS errored,
        count(*) FILTER (status = 'cancelled') AS cancelled,
        count(reward) AS scored,
        count(*) FILTER (success) AS succeeded,
        avg(reward) AS mean_reward,
        quantile_cont(queued_s, [0.5, 0.95]) FILTER (reward IS NOT NULL) AS queued,
        quantile_cont(agent_s, [0.5, 0.95]) FILTER (reward IS NOT NULL) AS agent,
        quantile_cont(model_s, [0.5, 0.95]) FILTER (reward IS NOT NULL) AS model,
        quantile_cont(verify_s, [0.5, 0.95]) FILTER (reward IS NOT NULL) AS verification
    FROM rollouts WHERE run_id = $run GROUP BY environment
), paid AS (
    SELECT
        environment, sum(calls) AS model_calls, sum(prompt_tokens) AS prompt_tokens, sum(completion_tokens) AS completion_tokens
    FROM usage WHERE run_id = $run GROUP BY environment
)
SELECT
    environment,
    coalesce(promised.tasks, seen.tasks) AS tasks,
    coalesce(promised.tasks * promised.attempts, seen.attempted) AS attempted,
    ended.* EXCLUDE (environment),
    paid.* EXCLUDE (environment)
FROM promised FULL JOIN seen USING (environment) LEFT JOIN ended USING (environment) LEFT JOIN paid USING (environment)
ORDER BY environment
"""
_FAILURES = """
SELECT
    environment, coalesce(error_stage, '') AS stage, coalesce(error_kind, '') AS kind, count(*) AS count,
    coalesce(min(error_message), '') AS example
FROM failures WHERE run_id = $run GROUP BY ALL ORDER BY count DESC, stage, kind
"""
_WAITING = "SELECT count(*) AS waiting FROM retries WHERE run_id = $run AND waiting"
_PASS_AT_K = "SELECT environment, k, pass_at_k, groups_estimated FROM pass_at_k WHERE run_id = $run ORDER BY k"
_PARTS = ("queued", "agent", "model", "verification")
_COUNTS = ("completed", "truncated", "errored", "cancelled", "scored", "succeeded")
_PAID = ("model_calls", "prompt_tokens", "completion_tokens")


def _environments(connection: duckdb.DuckDBPyConnection, run: str) -> tuple[EnvironmentReport, ...]:
    failures = query(connection, _FAILURES, run=run)
    estimates = query(connection, _PASS_AT_K, run=run)
    return tuple(
        EnvironmentReport(
            environment=row["environment"],
            tasks=row["tasks"],
            attempted=int(row["attempted"]),
            **{name: row[name] or 0 for name in _COUNTS},
            mean_reward=row["mean_reward"],
            pass_at=tuple(
                PassAt(each["k"], each["pass_at_k"], each["groups_estimated"])
                for each in estimates
                if each["environment"] == row["environment"]
            ),
            failures=tuple(
                Failure(each["stage"], each["kind"], each["count"], each["example"])
                for each in failures
                if each["environment"] == row["environment"]
            ),
            **{name: int(row[name] or 0) for name in _PAID},
            time=tuple(Seconds(part, *row[part]) for part in _PARTS if row[part] and None not in row[part]),
        )
        for row in query(connection, _ENVIRONMENTS, run=run)
    )
