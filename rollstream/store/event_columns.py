"""One table for each kind of event (events about runs share one): which columns it has, and what it leaves out.

Hot columns are picked for the questions people ask; the whole event stands beside them, compressed. What could give a grading
away is `withheld` from that payload before it is written: the file that is published never holds it, not even in free blocks.
"""

from rollstream.store.columns import (
    Column,
    flag,
    integer,
    json,
    length,
    long_text,
    moment,
    number,
    ordinal,
    text,
)
from rollstream.store.event_table import EventTable

_TASK = (
    text("dataset", "task", "dataset"),
    text("split", "task", "split"),
    text("task_id", "task", "id"),
    integer("task_index", "task", "index"),
    integer("epoch", "task", "epoch"),
)
_SESSION = (
    text("run_id", "run", required=True),
    text("environment", "environment", required=True),
    *_TASK,
    text("group_id", "group", "id", required=True),
    integer("group_size", "group", "size"),
    integer("group_index", "group", "index"),
    text("rollout_id", "rollout", required=True),
    text("session_id", "session", required=True),
    ordinal("round", "round"),
    ordinal("try", "try"),
)
_COMPOSITION = (
    text("harness", "composition", "harness"),
    text("model", "composition", "models", "policy"),
)
_EXECUTION = (text("execution_id", "execution", "id"), text("worker", "execution", "worker"))
_TIMING = tuple(number(name, "timing", name) for name in ("queued_s", "agent_s", "environment_s", "model_s", "verify_s"))


def _usage(*path: str) -> tuple[Column, ...]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    return tuple(integer(name, *path, name) for name in names)


_CALL = (
    text("model", "call", "model"),
    text("finish_reason", "call", "finish_reason"),
    *_usage("call", "usage"),
    moment("started_at", "call", "started_at"),
    number("duration_s", "call", "duration_s"),
    integer("attempts", "call", "attempts"),
)

RUN_PUBLISHED = EventTable(
    "RunPublished",
    "run_published",
    (
        text("run_id", "run", required=True),
        text("dataset", "dataset", "name"),
        text("dataset_sha256", "dataset", "sha256"),
        integer("dataset_rows", "dataset", "rows"),
        integer("groups", "groups"),
        integer("attempts", "attempts"),
        json("environments", "environments"),
        *_COMPOSITION,
    ),
)
TASK_SUBMITTED = EventTable(
    "TaskSubmitted",
    "task_submitted",
    (
        text("run_id", "run", required=True),
        text("environment", "environment", required=True),
        *_TASK,
        text("group_id", "group", required=True),
        integer("attempts", "attempts"),
        *_COMPOSITION,
    ),
    withheld=frozenset({"row"}),
)
SESSION_READY = EventTable(
    "SessionReady",
    "session_ready",
    (
        *_SESSION,
        text("environment_version", "environment_version"),
        *_COMPOSITION,
        text("interaction", "interaction"),
        text("placement", "placement"),
        moment("submitted_at", "submitted_at"),
    ),
    withheld=frozenset({"ticket", "reference", "reference_actions"}),
)
AGENT_STEPPED = EventTable(
    "AgentStepped",
    "agent_stepped",
    (
        *_SESSION,
        *_EXECUTION,
        text("source", "source"),
        integer("step_index", "index"),
        text("role", "role"),
        integer("turn", "call", "turn"),
        *_CALL,
        text("policy_version", "call", "policy_version"),
        number("cost_usd", "call", "cost_usd"),
    ),
    repeats_are_copies=True,
)
EPISODE_COMPLETED = EventTable(
    "EpisodeCompleted",
    "episode_completed",
    (
        *_SESSION,
        *_EXECUTION,
        *_COMPOSITION,
        text("environment_version", "environment_version"),
        text("harness_version", "harness_version"),
        text("stop_reason", "stop_reason"),
        json("steps", "steps"),
        json("actions", "actions"),
        length("calls", "calls"),
        *_TIMING[:-1],
        moment("submitted_at", "submitted_at"),
        moment("seeded_at", "seeded_at"),
    ),
    withheld=frozenset({"ticket", "receipt"}),
)
VERDICT_REACHED = EventTable(
    "VerdictReached",
    "verdict_reached",
    (
        *_SESSION,
        *_EXECUTION,
        ordinal("revision", "revision"),
        text("episode_id", "episode"),
        text("environment_version", "environment_version"),
        number("reward", "reward"),
        flag("success", "success"),
        json("components", "components"),
        flag("hermetic", "hermetic"),
        number("duration_s", "duration_s"),
    ),
    repeats_are_copies=True,
)
ROLLOUT_SCORED = EventTable(
    "RolloutScored",
    "rollout_scored",
    (
        *_SESSION,
        ordinal("revision", "revision"),
        text("verdict_id", "verdict"),
        text("status", "status"),
        text("stop_reason", "stop_reason"),
        text("error_kind", "error", "kind"),
        text("error_stage", "error", "stage"),
        long_text("error_message", "error", "message"),
        flag("error_retryable", "error", "retryable"),
        number("reward", "reward"),
        flag("success", "success"),
        json("reward_components", "reward_components"),
        flag("mask_loss", "mask", "loss"),
        flag("mask_baseline", "mask", "baseline"),
        long_text("submission_text", "submission", "text"),
        long_text("submission_artifact", "submission", "artifact"),
        length("calls", "calls"),
        *_usage("usage"),
        *_COMPOSITION,
        text("harness_version", "versions", "harness_version"),
        text("served_model", "versions", "model"),
        text("environment_version", "versions", "environment"),
        *_TIMING,
        moment("submitted_at", "submitted_at"),
        moment("seeded_at", "seeded_at"),
    ),
)
RETRY_SCHEDULED = EventTable(
    "RetryScheduled",
    "retry_scheduled",
    (
        *_SESSION,
        text("stage", "stage"),
        ordinal("failures", "failures"),
        ordinal("next_round", "next_round"),
        ordinal("next_try", "next_try"),
        moment("not_before", "not_before"),
        text("cause_kind", "cause", "kind"),
        text("cause_stage", "cause", "stage"),
        long_text("cause_message", "cause", "message"),
        *_COMPOSITION,
        text("worker", "worker"),
        moment("submitted_at", "submitted_at"),
    ),
    # The episode stands in its own table, and holds a ticket as well.
    withheld=frozenset({"ticket", "episode"}),
)


def _run_event(kind: str) -> EventTable:
    """What is said of a run while it goes on; all kinds share one table, because the last one by offset holds."""
    columns = (
        text("run_id", "run", required=True),
        text("kind", "kind"),
        long_text("reason", "reason"),
        text("cause", "cause"),
        text("by", "by"),
    )
    return EventTable(kind, "run_events", columns)


RUN_EVENTS = tuple(_run_event(kind) for kind in ("RunPaused", "RunResumed", "RunCancelled"))

DEAD_LETTERED = EventTable(
    "DeadLettered",
    "dead_lettered",
    (
        text("boundary", "boundary"),
        long_text("reason", "reason"),
        text("original_topic", "topic"),
        integer("original_partition", "partition"),
        integer("original_offset", "offset"),
        text("run_id", "run"),
        text("rollout_id", "rollout"),
    ),
    # A traceback quotes values, and the original bytes may be a task with its answer.
    withheld=frozenset({"original_key", "original_value", "original_headers", "traceback"}),
)

DEAD_LETTER_SETTLED = EventTable(
    "DeadLetterSettled",
    "dead_letter_settled",
    (text("letter", "letter", required=True), text("how", "how"), text("run_id", "run")),
)

ACTION_REQUESTED = EventTable(
    "ActionRequested",
    "action_requested",
    (
        *_SESSION,
        *_EXECUTION,
        text("source", "source"),
        integer("action_index", "index"),
        text("step_id", "step"),
        text("type", "action", "type"),
        text("tool", "action", "name"),
        text("call_id", "action", "id"),
        long_text("text", "action", "text"),
    ),
    withheld=frozenset({"ticket", "receipt"}),
    repeats_are_copies=True,
)
OBSERVATION_RETURNED = EventTable(
    "ObservationReturned",
    "observation_returned",
    (
        *_SESSION,
        *_EXECUTION[:1],
        text("action_id", "action"),
        integer("action_index", "index"),
        flag("done", "done"),
        flag("truncated", "truncated"),
        text("failure_kind", "failure", "kind"),
        long_text("failure_message", "failure", "message"),
        number("duration_s", "duration_s"),
        text("worker", "worker"),
    ),
    withheld=frozenset({"receipt"}),
    repeats_are_copies=True,
)
STEP_REWARDED = EventTable(
    "StepRewarded",
    "step_rewarded",
    (
        *_SESSION,
        *_EXECUTION[:1],
        text("action_id", "action"),
        integer("action_index", "index"),
        number("reward", "reward"),
        json("components", "components"),
    ),
    repeats_are_copies=True,
)
ENVIRONMENT_CALLED = EventTable(
    "EnvironmentCalled",
    "environment_called",
    (
        *_SESSION,
        *_EXECUTION,
        text("stage", "stage"),
        text("cause_id", "cause"),
        integer("call_index", "index"),
        text("role", "role"),
        *_CALL,
        number("cost_usd", "call", "cost_usd"),
    ),
    # A simulated user knows its private goal, and a judge what a good answer is.
    withheld=frozenset({"message", "response"}),
    repeats_are_copies=True,
)

_HOLDER = (
    text("worker", "holder", "worker"),
    text("run_id", "holder", "run"),
    text("session_id", "holder", "session"),
    integer("fence", "holder", "fence"),
)
SANDBOX_LEASED = EventTable(
    "SandboxLeased",
    "sandbox_leased",
    (
        text("sandbox_id", "sandbox", required=True),
        text("provider", "provider"),
        text("installation", "installation"),
        text("host", "host"),
        *_HOLDER,
        ordinal("renewal", "renewal"),
        moment("expires_at", "expires_at"),
        text("image", "spec", "image"),
        text("network", "spec", "network"),
        number("cpus", "spec", "cpus"),
        integer("memory_mib", "spec", "memory_mib"),
    ),
)
SANDBOX_RELEASED = EventTable(
    "SandboxReleased",
    "sandbox_released",
    (
        text("sandbox_id", "sandbox", required=True),
        text("how", "how"),
        text("by", "by"),
        text("run_id", "run"),
        text("session_id", "session"),
    ),
)
