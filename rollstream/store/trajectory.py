"""One attempt as people read it: who, what was said, what it earned or why it failed.

A failed attempt's terminal record has no messages; what its session's steps recorded until then is shown instead.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import duckdb

from rollstream.errors import UsageError
from rollstream.store.reader import query
from rollstream.store.report import resolve_run
from schemas.values import JsonObject

Choice = Literal["latest", "failed", "worst", "best"]

_CHOICES: dict[Choice, str] = {
    "latest": "WHERE run_id = $run ORDER BY scored_at DESC, rollout_id LIMIT $count",
    "failed": "WHERE run_id = $run AND status = 'errored' ORDER BY scored_at DESC, rollout_id LIMIT $count",
    "worst": "WHERE run_id = $run AND reward IS NOT NULL ORDER BY reward, scored_at DESC, rollout_id LIMIT $count",
    "best": "WHERE run_id = $run AND reward IS NOT NULL ORDER BY reward DESC, scored_at DESC, rollout_id LIMIT $count",
}
_FOUND_AT_MOST = 6
_ASKED = "SELECT payload -> '$.messages' AS said FROM events WHERE kind = 'SessionReady' AND session_id = $id"
_WHY = """
SELECT payload -> '$.diagnostics' AS why FROM events WHERE kind = 'VerdictReached' AND event_id = TRY_CAST($id AS UUID)
"""
_SAID = """
SELECT event_id::VARCHAR AS id, payload ->> '$.previous' AS previous, (payload ->> '$.execution.fence')::BIGINT AS fence,
    (payload ->> '$.index')::BIGINT AS step, payload -> '$.new_messages' AS heard, payload -> '$.message' AS said
FROM events
WHERE kind = 'AgentStepped' AND session_id = $id
"""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt that has ended."""

    run: str
    environment: str
    task: str | None
    group: str
    group_index: int
    group_size: int
    rollout: str
    session: str
    round: int
    try_: int
    status: str
    stop_reason: str
    reward: float | None
    success: bool | None
    components: JsonObject
    error: str | None
    """`stage/kind: message`."""
    harness: str | None
    model: str | None
    calls: int
    prompt_tokens: int
    completion_tokens: int
    queued_s: float | None
    agent_s: float | None
    """Of which `environment_s` and `model_s` are part."""
    environment_s: float | None
    model_s: float | None
    verify_s: float | None
    scored_at: datetime
    messages: list[JsonObject]
    recorded_only: bool
    """Whether the messages are what was recorded before a failure, and no finished transcript."""
    diagnostics: JsonObject
    """The verdict's."""


def find_rollout(connection: duckdb.DuckDBPyConnection, wanted: str) -> Trajectory:
    """The attempt whose rollout or session id begins with `wanted`.

    Raises:
        UsageError: there is none, or more than one.
    """
    found = query(
        connection,
        "SELECT DISTINCT rollout_id FROM rollout_scored WHERE starts_with(rollout_id, $id) OR starts_with(session_id, $id) "
        f"ORDER BY rollout_id LIMIT {_FOUND_AT_MOST}",
        id=wanted,
    )
    if not found:
        raise UsageError(
            f"no ended rollout or session has an id that begins with {wanted!r} in the published store; "
            "`rollstream show --run RUN` shows the latest of a run"
        )
    if len(found) > 1:
        ids = ", ".join(row["rollout_id"] for row in found)
        raise UsageError(f"several rollouts have an id that begins with {wanted!r}: {ids}")
    return _read(connection, found[0]["rollout_id"])


def choose_rollouts(connection: duckdb.DuckDBPyConnection, run: str | None, choice: Choice, count: int) -> list[Trajectory]:
    """Up to `count` attempts of `run` (by default the latest run).

    Raises:
        UsageError: the run is unknown, or none of its attempts is what was asked for.
    """
    name = resolve_run(connection, run)
    found = query(connection, f"SELECT rollout_id FROM rollouts {_CHOICES[choice]}", run=name, count=count)
    if not found:
        what = {"failed": "failed", "latest": "ended"}.get(choice, "scored")
        raise UsageError(f"no attempt of run {name!r} has {what}, as far as the published store knows")
    return [_read(connection, row["rollout_id"]) for row in found]


def _read(connection: duckdb.DuckDBPyConnection, rollout: str) -> Trajectory:
    row = query(connection, "SELECT * FROM trajectories WHERE rollout_id = $id", id=rollout)[0]
    messages = _loads(row["messages"], [])
    recorded = [] if messages else _recorded(connection, row["session_id"])
    error = f"{row['error_stage']}/{row['error_kind']}: {row['error_message']}" if row["error_kind"] else None
    same = ("round", "status", "stop_reason", "reward", "success", "harness", "model", "calls", "queued_s", "agent_s")
    return Trajectory(
        run=row["run_id"],
        environment=row["environment"],
        task=row["task_id"],
        group=row["group_id"],
        group_index=row["group_index"] or 0,
        group_size=row["group_size"] or 1,
        rollout=row["rollout_id"],
        session=row["session_id"],
        try_=row["try"],
        components=_loads(row["reward_components"], {}),
        error=error,
        prompt_tokens=row["prompt_tokens"] or 0,
        completion_tokens=row["completion_tokens"] or 0,
        environment_s=row["environment_s"],
        model_s=row["model_s"],
        verify_s=row["verify_s"],
        scored_at=row["scored_at"],
        messages=messages or recorded,
        recorded_only=bool(recorded),
        diagnostics=_diagnostics(connection, row["verdict_id"]),
        **{name: row[name] for name in same},
    )


def _recorded(connection: duckdb.DuckDBPyConnection, session: str) -> list[JsonObject]:
    """What the session said, after what it was asked: the steps that its last one leads back to, whoever made them."""
    asked = query(connection, _ASKED, id=session)
    steps = {step["id"]: step for step in query(connection, _SAID, id=session)}
    last = max(steps.values(), key=lambda step: (step["fence"], step["step"]), default=None)
    chain = []
    while last is not None:
        chain.append(last)
        last = steps.pop(last["previous"], None)
    messages = [message for row in asked for message in _loads(row["said"], [])]
    for step in reversed(chain):
        messages += _loads(step["heard"], [])
        messages.append(_loads(step["said"], {}))
    return messages


def _diagnostics(connection: duckdb.DuckDBPyConnection, verdict: str | None) -> JsonObject:
    found = query(connection, _WHY, id=verdict)
    return _loads(found[0]["why"], {}) if found else {}


def _loads(text: str | None, otherwise: Any) -> Any:
    parsed = json.loads(text) if text else None
    return parsed if isinstance(parsed, type(otherwise)) else otherwise
