"""The tables of the store: those of events, and those of what is no event, is too long for a value, or is never published.

With the event tables, `RECORD_TABLES` account for every offset that was read, each once.
"""

from rollstream.store.columns import SqlType
from rollstream.store.event_columns import (
    ACTION_REQUESTED,
    AGENT_STEPPED,
    DEAD_LETTER_SETTLED,
    DEAD_LETTERED,
    ENVIRONMENT_CALLED,
    EPISODE_COMPLETED,
    OBSERVATION_RETURNED,
    RETRY_SCHEDULED,
    ROLLOUT_SCORED,
    RUN_EVENTS,
    RUN_PUBLISHED,
    SANDBOX_LEASED,
    SANDBOX_RELEASED,
    SESSION_READY,
    STEP_REWARDED,
    TASK_SUBMITTED,
    VERDICT_REACHED,
)
from rollstream.store.event_table import POSITION, EventTable
from topics.catalogue import CATALOGUE

EVENT_TABLES: tuple[EventTable, ...] = (
    RUN_PUBLISHED,
    *RUN_EVENTS,
    TASK_SUBMITTED,
    SESSION_READY,
    AGENT_STEPPED,
    EPISODE_COMPLETED,
    VERDICT_REACHED,
    ROLLOUT_SCORED,
    RETRY_SCHEDULED,
    DEAD_LETTERED,
    DEAD_LETTER_SETTLED,
    ACTION_REQUESTED,
    OBSERVATION_RETURNED,
    STEP_REWARDED,
    ENVIRONMENT_CALLED,
    SANDBOX_LEASED,
    SANDBOX_RELEASED,
)
BY_KIND: dict[str, EventTable] = {table.kind: table for table in EVENT_TABLES}
TOPIC_OF: dict[str, str] = {
    BY_KIND[event.__name__].name: topic.name for topic in CATALOGUE for event in topic.events if event.__name__ in BY_KIND
}
"""Event table -> the topic whose events it holds."""

LONG_PAYLOADS = "long_payloads"
DUPLICATES = "duplicate_records"
GRADING_TEXTS = "grading_texts"
RECORD_TABLES: dict[str, tuple[tuple[str, SqlType], ...]] = {
    LONG_PAYLOADS: (
        ("event_id", "UUID"),
        ("topic", "VARCHAR"),
        ("kind", "VARCHAR"),
        ("run_id", "VARCHAR"),
        ("part", "INTEGER"),
        ("text", "PAYLOAD"),
        *POSITION,
    ),
    DUPLICATES: (
        ("topic", "VARCHAR"),
        ("event_id", "UUID"),
        ("run_id", "VARCHAR"),
        *POSITION,
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
"""Payloads that are too long for one value, in parts; records whose event was stored before; and what the store could not read,
without its content: events of another version or kind, and records that are no events."""

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
    GRADING_TEXTS: (
        ("topic", "VARCHAR"),
        ("run_id", "VARCHAR"),
        ("group_id", "VARCHAR"),
        ("field", "VARCHAR"),
        ("in_task", "BOOLEAN"),
        ("text", "PAYLOAD"),
        *POSITION,
    ),
    "raw_records": (
        ("topic", "VARCHAR"),
        ("why", "VARCHAR"),
        ("run_id", "VARCHAR"),
        ("key", "BLOB"),
        ("value", "BLOB"),
        *POSITION,
    ),
}
"""Content that is never published: tasks, those of their grading texts that are looked for in prompts, and the first bytes of
what could not be read."""
