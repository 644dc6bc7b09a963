"""Every attempt of a run as a row, ended or not, and the questions that a report asks of them.

The rows are a temporary table of the reader's own connection: the views are evaluated once, and a run of a million attempts
is grouped by DuckDB and not here. Attempts that the manifest promised and nobody has seen are rows as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, get_args

import duckdb
import orjson

from rollstream.environments.protocol import ScoredVerdict
from rollstream.store.reader import query

Dimension = Literal[
    "environment", "dataset", "split", "harness", "model", "served_model", "policy_version", "environment_version"
]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
Labels = tuple[str | None, ...]
"""What distinguishes one part of a report, in the order of its dimensions; None where an attempt does not tell."""

_PAGE = 5_000
"""Rows fetched at once."""

_ATTEMPTS = """
CREATE OR REPLACE TEMP TABLE report_attempts AS
WITH manifest AS (
    SELECT * FROM run_published WHERE run_id = $run ORDER BY kafka_partition, kafka_offset LIMIT 1
), seen AS (
    SELECT environment, dataset, split, harness, model, task_id, group_id, unnest(range(size)) AS group_index
    FROM groups WHERE run_id = $run
), counted AS (
    SELECT environment, count(DISTINCT group_id) AS groups FROM seen GROUP BY environment
), unseen AS (
    SELECT told.key AS environment, unnest(range(greatest(told.value::BIGINT - coalesce(counted.groups, 0), 0))) AS number
    FROM manifest, json_each(manifest.environments) AS told LEFT JOIN counted ON counted.environment = told.key
), published AS (
    FROM seen
    UNION ALL
    SELECT
        unseen.environment, dataset, NULL, harness, model, NULL, format('unseen/{}/{}', unseen.environment, number),
        unnest(range(attempts))
    FROM unseen, manifest
), versions AS (
    SELECT group_id, group_index, string_agg(DISTINCT policy_version, '+' ORDER BY policy_version) AS policy_version
    FROM agent_stepped
    WHERE run_id = $run AND role = 'policy' AND policy_version IS NOT NULL
        AND session_id IN (SELECT session_id FROM rollouts WHERE run_id = $run)
    GROUP BY group_id, group_index
)
SELECT
    published.*, served_model, policy_version, environment_version, rollout_id, revision, verdict_id, status, reward, success,
    error_stage, error_kind, error_message, calls, queued_s,
    greatest(agent_s - coalesce(environment_s, 0) - model_s, 0) AS agent_s, environment_s, model_s, verify_s, reward_components
FROM published
LEFT JOIN (FROM rollouts WHERE run_id = $run) AS ended USING (group_id, group_index)
LEFT JOIN versions USING (group_id, group_index)
"""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What one group contributes to one part of a report."""

    task: str
    """Of the same task, all groups are one cluster, whatever their epoch."""
    attempted: int
    scored: int
    succeeded: int
    reward_sum: float


class Attempts:
    """The attempts of one run, by some dimensions. Create it with `Attempts.of`; one at a time on a connection."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, run: str, by: Sequence[Dimension]) -> None:
        self._connection = connection
        self._run = run
        self._by = tuple(by)
        # The names come from a literal list of ours.
        self._labels = ", ".join(f"attempt.{name}" for name in self._by)

    @classmethod
    def of(cls, connection: duckdb.DuckDBPyConnection, run: str, by: Sequence[Dimension]) -> "Attempts":
        connection.execute(_ATTEMPTS, {"run": run})
        return cls(connection, run, by)

    def groups(self) -> dict[Labels, list[GroupFacts]]:
        """Every group, in a stable order."""
        found: dict[Labels, list[GroupFacts]] = {}
        for labels, row in self._ask(
            """
            SELECT {labels},
                coalesce(dataset || '/' || task_id, group_id) AS task,
                count(*) AS attempted, count(reward) AS scored, count(*) FILTER (reward IS NOT NULL AND success) AS succeeded,
                coalesce(sum(reward), 0) AS reward_sum
            FROM report_attempts AS attempt GROUP BY {labels}, dataset, task_id, group_id ORDER BY {labels}, task, group_id
            """
        ):
            found.setdefault(labels, []).append(GroupFacts(**row))
        return found

    def statuses(self) -> dict[Labels, dict[str, int]]:
        """How many attempts ended how; those that have not ended are left out."""
        found: dict[Labels, dict[str, int]] = {}
        for labels, row in self._ask(
            "SELECT {labels}, status, count(*) AS count FROM report_attempts AS attempt WHERE status IS NOT NULL GROUP BY ALL"
        ):
            found.setdefault(labels, {})[row["status"]] = row["count"]
        return found

    def failures(self) -> dict[Labels, list[dict[str, Any]]]:
        """Attempts that ended without a reward, the most frequent kind first."""
        return self._by_labels(
            """
            SELECT {labels},
                coalesce(error_stage, CASE status WHEN 'cancelled' THEN 'cancelled' ELSE 'verification' END) AS stage,
                coalesce(error_kind, CASE status WHEN 'cancelled' THEN 'cancelled' ELSE 'no reward' END) AS kind,
                count(*) AS count, coalesce(min(error_message), '') AS example
            FROM report_attempts AS attempt WHERE status IS NOT NULL AND reward IS NULL
            GROUP BY ALL ORDER BY count DESC, stage, kind
            """
        )

    def times(self) -> dict[Labels, list[dict[str, Any]]]:
        """One row a part of the time of scored attempts."""
        return self._by_labels(
            """
            SELECT {labels}, part,
                quantile_cont(seconds, 0.5) AS p50, quantile_cont(seconds, 0.95) AS p95, sum(seconds) AS total
            FROM (
                SELECT *, unnest(['queued', 'agent', 'environment', 'model', 'verification']) AS part,
                    unnest([queued_s, agent_s, environment_s, model_s, verify_s]) AS seconds,
                    unnest([1, 2, 3, 4, 5]) AS number
                FROM report_attempts WHERE reward IS NOT NULL
            ) AS attempt
            WHERE seconds IS NOT NULL GROUP BY {labels}, part, number ORDER BY number
            """
        )

    def usage(self) -> dict[Labels, list[dict[str, Any]]]:
        """Recorded calls of every try, also of environments, by role and model: what was paid for."""
        return self._by_labels(
            """
            SELECT {labels}, role, attempt.model AS policy, step.model AS served, count(*) AS calls,
                coalesce(sum(exact_tokens(prompt_tokens)), 0)::BIGINT AS prompt_tokens,
                coalesce(sum(exact_tokens(completion_tokens)), 0)::BIGINT AS completion_tokens,
                coalesce(sum(exact_tokens(cached_tokens)), 0)::BIGINT AS cached_tokens,
                sum(exact_usd(cost_usd))::DOUBLE AS cost_usd, count(exact_usd(cost_usd)) AS costs_told
            FROM report_attempts AS attempt JOIN (
                SELECT group_id, group_index, role, model, prompt_tokens, completion_tokens, cached_tokens, cost_usd
                FROM agent_stepped WHERE run_id = $run
                UNION ALL
                SELECT group_id, group_index, role, model, prompt_tokens, completion_tokens, cached_tokens, cost_usd
                FROM environment_called WHERE run_id = $run
            ) AS step USING (group_id, group_index)
            GROUP BY ALL ORDER BY role, policy, served
            """,
            run=self._run,
        )

    def steps(self) -> dict[Labels, list[dict[str, Any]]]:
        """How many model calls scored attempts took."""
        return self._by_labels(
            "SELECT {labels}, avg(calls) AS mean, max(calls) AS most FROM report_attempts AS attempt "
            "WHERE reward IS NOT NULL GROUP BY ALL"
        )

    def step_rewards(self) -> dict[Labels, list[dict[str, Any]]]:
        """Mean reward of each step that was rewarded, by its index."""
        return self._by_labels(
            """
            SELECT {labels}, step.index AS index, avg(step.reward) AS mean, count(step.reward) AS attempts
            FROM report_attempts AS attempt JOIN (
                SELECT group_id, group_index, unnest(from_json(
                    whole_payload('RolloutScored', event_id, payload) -> '$.steps',
                    '[{{"index": "BIGINT", "reward": "DOUBLE"}}]'
                )) AS step
                FROM counting_records
                WHERE run_id = $run
            ) USING (group_id, group_index)
            WHERE step.reward IS NOT NULL GROUP BY ALL ORDER BY index
            """,
            run=self._run,
        )

    def revisions(self) -> list[dict[str, Any]]:
        """Which revision of which environment's verdicts counts, and for how many attempts."""
        return query(
            self._connection,
            "SELECT environment, environment_version, revision, count(*) AS attempts FROM report_attempts "
            "WHERE reward IS NOT NULL OR revision > 0 GROUP BY ALL ORDER BY ALL",
        )

    def verdicts(self) -> Iterator[tuple[Labels, Iterator[ScoredVerdict]]]:
        """What the environment said of every scored attempt, part by part; each can be gone through once, before the next."""
        rows = self._ask(
            """
            SELECT {labels}, attempt.task_id AS task, attempt.group_index AS index, attempt.reward AS reward,
                attempt.success AS success, reward_components::VARCHAR AS components,
                (whole_payload('VerdictReached', verdict.event_id, payload) -> '$.diagnostics')::VARCHAR AS diagnostics
            FROM report_attempts AS attempt
            LEFT JOIN (FROM verdict_reached WHERE run_id = $run) AS verdict ON verdict.event_id = TRY_CAST(verdict_id AS UUID)
            WHERE attempt.reward IS NOT NULL ORDER BY {labels}, task, index
            """,
            run=self._run,
        )
        for labels, found in groupby(rows, key=itemgetter(0)):
            yield labels, (_verdict(row) for _, row in found)

    def _by_labels(self, statement: str, **parameters: object) -> dict[Labels, list[dict[str, Any]]]:
        found: dict[Labels, list[dict[str, Any]]] = {}
        for labels, row in self._ask(statement, **parameters):
            found.setdefault(labels, []).append(row)
        return found

    def _ask(self, statement: str, **parameters: object) -> Iterator[tuple[Labels, dict[str, Any]]]:
        cursor = self._connection.execute(statement.format(labels=self._labels), parameters)
        names = [column[0] for column in cursor.description or ()][len(self._by) :]
        while rows := cursor.fetchmany(_PAGE):
            for row in rows:
                yield row[: len(self._by)], dict(zip(names, row[len(self._by) :], strict=True))


def _verdict(row: dict[str, Any]) -> ScoredVerdict:
    parsed = {name: orjson.loads(row[name]) if row[name] else {} for name in ("components", "diagnostics")}
    return ScoredVerdict(**{**row, **parsed})
