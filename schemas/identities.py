"""Every id that is derived, in one table. The same inputs give the same id, in any process and after any restart.

    group_id    = uuid5(ROLLSTREAM, [run_id, environment, dataset, task_id, epoch])
    rollout_id  = uuid5(group_id, "INDEX")
    session_id  = uuid5(rollout_id, "ROUND/TRY")
    event_id    = uuid5(EVENT, [kind, part, ...])

where `[...]` is the compact JSON text of the list (UTF-8, no spaces), so that no two lists share a name.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import NAMESPACE_DNS, UUID, uuid5

import orjson

ROLLSTREAM = uuid5(NAMESPACE_DNS, "rollstream")
EVENT = uuid5(ROLLSTREAM, "event")


def _name(parts: tuple[str | int, ...]) -> str:
    return orjson.dumps(parts).decode()


def group_id(run_id: str, environment: str, dataset: str, task_id: str, epoch: int) -> str:
    return str(uuid5(ROLLSTREAM, _name((run_id, environment, dataset, task_id, epoch))))


def rollout_id(group_id: str, index: int) -> str:
    return str(uuid5(UUID(group_id), str(index)))


def session_id(rollout_id: str, round_: int, try_: int) -> str:
    return str(uuid5(UUID(rollout_id), f"{round_}/{try_}"))


def event_id(kind: str, *parts: str | int) -> str:
    return str(uuid5(EVENT, _name((kind, *parts))))


def task_id_of(row: Mapping[str, object]) -> str:
    """Content hash of a row that has no id of its own: 16 hex digits of SHA-256 over its sorted JSON."""
    return hashlib.sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def repeated(task_id: str, ordinal: int) -> str:
    """Id of the row that carries `task_id` for the `ordinal`-th time in one file (0 = the first, which keeps it)."""
    return task_id if ordinal == 0 else f"{task_id}#{ordinal}"


def adhoc_run_id(day: datetime) -> str:
    """Run of tasks that name none: one a UTC day, by the record's own time."""
    return f"adhoc-{day.astimezone(UTC):%Y-%m-%d}"
