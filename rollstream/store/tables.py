"""The tables of the store: one for each kind of event (events about runs share one), and what they leave out.

Hot columns are picked for the questions people ask; the whole event stands beside them, compressed. What could give a grading
away is `withheld` from that payload before it is written: the file that is published never holds it, not even in free blocks.
"""

from dataclasses import dataclass, field

from rollstream.store.columns import (
    Column,
    Convert,
    Scalar,
    SqlType,
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
from schemas.values import JsonObject

POSITION: tuple[tuple[str, SqlType], ...] = (
    ("kafka_partition", "INTEGER"),
    ("kafka_offset", "BIGINT"),
    ("recorded_at", "TIMESTAMP"),
)
"""Where the record stands in its topic, and the broker's time for it. Ends every event table."""
HEAD: tuple[tuple[str, SqlType], ...] = (
    ("event_id", "UUID"),
    ("schema_version", "INTEGER"),
    ("occurred_at", "TIMESTAMP"),
    ("caused_at", "TIMESTAMP"),
    ("escaped", "BOOLEAN"),
)
"""Begins every event table."""


@dataclass(frozen=True, slots=True)
class EventTable:
    """Where the events of one kind go."""

    kind: str
    name: str
    columns: tuple[Column, ...]
    withheld: frozenset[str] = frozenset()
    """Top-level fields that never reach the published payload."""
    repeats_are_copies: bool = False
    """True where an event's id names one execution: then a repeated record is byte for byte the first, `caused_at` included,
    and no duplicate needs to be looked for before it. Other ids can be reached again much later, by another cause."""

    _parents: tuple[tuple[str, ...], ...] = field(init=False)
    _picks: tuple[tuple[int, str, Convert], ...] = field(init=False)
    _required: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        # An event's objects are looked up once, not once for each of their fields.
        parents = tuple(dict.fromkeys(column.path[:-1] for column in self.columns))
        picks = tuple((parents.index(column.path[:-1]), column.path[-1], column.convert) for column in self.columns)
        object.__setattr__(self, "_parents", parents)
        object.__setattr__(self, "_picks", picks)
        object.__setattr__(self, "_required", tuple(n for n, column in enumerate(self.columns) if column.required))

    def schema(self) -> tuple[tuple[str, SqlType], ...]:
        """All columns in order, with their types."""
        own = tuple((column.name, column.type) for column in self.columns)
        return (*HEAD, *own, ("payload", "PAYLOAD"), *POSITION)

    def pick(self, body: JsonObject) -> list[Scalar]:
        """The values of `columns` in one event."""
        objects = [_object_at(body, path) for path in self._parents]
        return [convert(objects[parent].get(name)) for parent, name, convert in self._picks]

    def missing(self, picked: list[Scalar]) -> str:
        """The first required column without a value, or nothing."""
        return next((self.columns[number].name for number in self._required if picked[number] is None), "")


def _object_at(body: JsonObject, path: tuple[str, ...]) -> JsonObject:
    found = body
    for name in path:
        value = found.get(name)
        if not isinstance(value, dict):
            return {}
        found = value
    return found


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
_TIMING = tuple(number(name, "timing", name) for name in ("queued_s", "agent_s", "model_s", "verify_s"))


def _usage(*path: str) -> tuple[Column, ...]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    return tuple(integer(name, *path, name) for name in names)


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
    withheld=frozenset({"ticket", "reference"}),
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
        text("model", "call", "model"),
        text("finish_reason", "call", "finish_reason"),
        *_usage("call", "usage"),
        moment("started_at", "call", "started_at"),
        number("duration_s", "call", "duration_s"),
        integer("attempts", "call", "attempts"),
        text("policy_version", "call", "policy_version"),
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
        length("calls", "calls"),
        *_TIMING[:3],
        moment("submitted_at", "submitted_at"),
        moment("seeded_at", "seeded_at"),
    ),
    withheld=frozenset({"ticket"}),
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

EVENT_TABLES: tuple[EventTable, ...] = (
    RUN_PUBLISHED,
    *(_run_event(kind) for kind in ("RunPaused", "RunResumed", "RunCancelled")),
    TASK_SUBMITTED,
    SESSION_READY,
    AGENT_STEPPED,
    EPISODE_COMPLETED,
    VERDICT_REACHED,
    ROLLOUT_SCORED,
    RETRY_SCHEDULED,
    DEAD_LETTERED,
    DEAD_LETTER_SETTLED,
)
BY_KIND: dict[str, EventTable] = {table.kind: table for table in EVENT_TABLES}

LONG_PAYLOADS = "long_payloads"
RECORD_TABLES: dict[str, tuple[tuple[str, SqlType], ...]] = {
    LONG_PAYLOADS: (
        ("event_id", "UUID"),
        ("kind", "VARCHAR"),
        ("part", "INTEGER"),
        ("text", "PAYLOAD"),
    ),
    "unknown_events": (
        ("topic", "VARCHAR"),
        ("kind", "VARCHAR"),
        ("schema_version", "BIGINT"),
        ("bytes", "BIGINT"),
        ("run_id", "VARCHAR"),
        ("rollout_id", "VARCHAR"),
        *POSITION,
    ),
    "dead_rows": (
        ("topic", "VARCHAR"),
        ("reason", "VARCHAR"),
        ("bytes", "BIGINT"),
        ("run_id", "VARCHAR"),
        ("rollout_id", "VARCHAR"),
        *POSITION,
    ),
}
"""Payloads that are too long for one value, in parts; and what the store could not read, without its content: events of another
version or kind, and records that are no events."""

PRIVATE_TABLES: dict[str, tuple[tuple[str, SqlType], ...]] = {
    "task_rows": (
        ("topic", "VARCHAR"),
        ("run_id", "VARCHAR"),
        ("group_id", "VARCHAR"),
        ("escaped", "BOOLEAN"),
        ("part", "INTEGER"),
        ("payload", "PAYLOAD"),
        *POSITION,
    ),
    "raw_records": (
        ("topic", "VARCHAR"),
        ("why", "VARCHAR"),
        ("key", "BLOB"),
        ("value", "BLOB"),
        *POSITION,
    ),
}
"""Content that is never published: tasks with their grading data, and the first bytes of what could not be read."""
