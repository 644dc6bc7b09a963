"""Which attempts an export is made of, and reading them one group after another.

Groups come in the order in which the log has their first record, so that what is read together stands together in the file: a
store of any size is read once, in pages of bounded size, and rebuilding the store changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import duckdb
from pydantic import ValidationError

from rollstream.errors import NothingToExport, StoreUnavailable, UsageError
from rollstream.store.columns import MAX_VALUE_BYTES
from rollstream.store.exports.request import ExportRequest
from rollstream.store.reader import first_line, query
from schemas.rollout import RolloutScored

PAGE_BYTES = 64 * 1024 * 1024
"""Of payloads read at once; a larger group is a page of its own."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt, with its terminal record."""

    task: str
    """Its task's id; of a record that does not tell, its group's."""
    dataset: str | None
    record: RolloutScored


@dataclass(frozen=True, slots=True)
class Group:
    """The chosen attempts at one task, by index."""

    id: str
    task: str
    attempts: tuple[Attempt, ...]
    unreadable: int = 0
    """Chosen attempts whose records are none of ours, and cannot be read."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen."""

    groups: int
    attempts: int
    pages: int


_LEARNABLE = "reward IS NOT NULL AND mask_loss IS NOT TRUE AND status IN ('completed', 'truncated')"
_CONDITIONS = {
    "sft": f"{_LEARNABLE} AND CASE WHEN $min_reward IS NULL THEN success ELSE reward >= $min_reward END",
    "dpo": f"""{_LEARNABLE}
        WINDOW peers AS (PARTITION BY group_id)
        QUALIFY max(reward) OVER peers > min(reward) OVER peers
            AND max(reward) OVER peers - min(reward) OVER peers >= $margin
            AND ($min_reward IS NULL OR max(reward) OVER peers >= $min_reward)
            AND (row_number() OVER (PARTITION BY group_id ORDER BY reward DESC, group_index, record) = 1
                OR row_number() OVER (PARTITION BY group_id ORDER BY reward, group_index, record) = 1)""",
    "grpo": """true QUALIFY count(*) OVER (PARTITION BY group_id) >= group_size""",
    "atif": "$min_reward IS NULL OR reward >= $min_reward",
}
"""What each format takes of the attempts that match the request."""

_MATCHING = """
CREATE OR REPLACE TEMP TABLE matching AS
SELECT
    record, group_id, group_index, coalesce(group_size, 1) AS group_size, coalesce(task_id, group_id) AS task_id, dataset,
    kafka_partition, kafka_offset, event_id, status, reward, success, mask_loss
FROM counting_records
WHERE list_contains($runs, run_id) AND rollout_id IN (
    SELECT rollout_id FROM rollouts WHERE list_contains($runs, run_id) AND (
{where}
    )
)
"""
_CHOSEN = """
CREATE OR REPLACE TEMP TABLE chosen AS
WITH taken AS (
    SELECT * FROM matching WHERE {condition}
), sized AS (
    SELECT taken.*, coalesce(parts, 1) AS parts
    FROM taken LEFT JOIN (
        SELECT event_id, count(*) AS parts FROM long_payloads WHERE kind = 'RolloutScored' GROUP BY event_id
    ) USING (event_id)
), ordered AS (
    SELECT
        group_id,
        row_number() OVER first_in_log AS place,
        sum(parts) OVER (first_in_log ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS parts_before
    FROM (
        SELECT group_id, min(kafka_offset) AS first, min(kafka_partition) AS partition, sum(parts) AS parts
        FROM sized GROUP BY group_id
    )
    WINDOW first_in_log AS (ORDER BY first, partition, group_id)
)
SELECT
    record, group_id, group_index, task_id, dataset, place,
    dense_rank() OVER (ORDER BY coalesce(parts_before, 0) * {value_bytes} // {page_bytes}) - 1 AS page
FROM sized JOIN ordered USING (group_id)
"""
_COUNTS = "SELECT count(DISTINCT group_id) AS groups, count(*) AS attempts, coalesce(max(page), -1) + 1 AS pages FROM chosen"
_PAGE = """
SELECT
    chosen.group_id, chosen.task_id, chosen.dataset,
    whole_payload('RolloutScored', scored.event_id, scored.payload) AS payload
FROM chosen JOIN rollout_scored AS scored ON scored.rowid = chosen.record
WHERE chosen.page = $page
ORDER BY chosen.place, chosen.group_index, chosen.record
"""


def select(connection: duckdb.DuckDBPyConnection, request: ExportRequest, page_bytes: int = PAGE_BYTES) -> Selection:
    """Choose the attempts of `request`, into temporary tables of this connection.

    Raises:
        UsageError: `where` is no condition over `rollouts`.
        NothingToExport: nothing is left, and why.
        StoreUnavailable: the published copy is an older rollstream's.
    """
    _match(connection, request)
    condition = _CONDITIONS[request.format]
    bounds = {name: getattr(request, name) for name in ("min_reward", "margin") if f"${name}" in condition}
    connection.execute(_CHOSEN.format(condition=condition, value_bytes=MAX_VALUE_BYTES, page_bytes=page_bytes), bounds)
    selection = Selection(**query(connection, _COUNTS)[0])
    if not selection.attempts:
        raise NothingToExport(_why_nothing(connection, request))
    return selection


def groups(connection: duckdb.DuckDBPyConnection, selection: Selection) -> Iterator[Group]:
    """What `select` has just chosen, group by group."""
    for page in range(selection.pages):
        rows = connection.execute(_PAGE, {"page": page}).fetchall()
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or rows[end][0] != rows[start][0]:
                yield _group(rows[start:end])
                start = end


def _group(rows: list[tuple[str, str, str | None, str]]) -> Group:
    read = [Attempt(task, dataset, record) for _, task, dataset, payload in rows if (record := _record(payload)) is not None]
    return Group(id=rows[0][0], task=rows[0][1], attempts=tuple(read), unreadable=len(rows) - len(read))


def _record(payload: str) -> RolloutScored | None:
    try:
        return RolloutScored.model_validate_json(payload)
    except ValidationError:
        return None


def _match(connection: duckdb.DuckDBPyConnection, request: ExportRequest) -> None:
    _check_views(connection)
    where = request.where or "true"
    try:
        if len(connection.extract_statements(f"SELECT 1 FROM rollouts WHERE (\n{where}\n)")) != 1:
            raise UsageError(f"--where expects one condition over `rollouts`, found {where!r}")
        connection.execute(_MATCHING.format(where=where), {"runs": list(request.runs)})
    except duckdb.Error as error:
        if request.where is None:
            raise
        raise UsageError(f"--where: {first_line(error)}") from None


def _check_views(connection: duckdb.DuckDBPyConnection) -> None:
    """See that the views are this version's: they are made by whoever published the copy."""
    try:
        connection.execute("SELECT record, kafka_offset FROM counting_records LIMIT 0")
    except duckdb.Error:
        raise StoreUnavailable(
            "the published store was made by an older rollstream: start the store_worker, which publishes it anew"
        ) from None


_FACTS = f"""
SELECT
    (SELECT count(*) FROM rollouts WHERE list_contains($runs, run_id)) AS ended,
    count(*) AS matching,
    count(DISTINCT group_id) AS groups,
    count(reward) AS scored,
    count(*) FILTER ({_LEARNABLE}) AS learnable,
    max(reward) FILTER ({_LEARNABLE}) AS best
FROM matching
"""
_SPREAD = f"""
SELECT max(spread) FROM (SELECT max(reward) - min(reward) AS spread FROM matching WHERE {_LEARNABLE} GROUP BY group_id)
"""


def _why_nothing(connection: duckdb.DuckDBPyConnection, request: ExportRequest) -> str:
    """One sentence: what was there, and what it lacked."""
    facts = query(connection, _FACTS, runs=list(request.runs))[0]
    scored = f"{facts['scored']} scored"
    if not facts["ended"]:
        return f"no attempt of {', '.join(request.runs)} has ended yet, as far as the published store knows"
    if not facts["matching"]:
        return f"no attempt matches --where {request.where!r}: {facts['ended']} ended"
    if request.format == "grpo":
        return f"no group is complete with attempts that match: {facts['matching']} attempts of {facts['groups']} groups do"
    if not facts["scored"]:
        return f"no scored attempts: {facts['matching']} ended, every one without a reward"
    if not facts["learnable"]:
        return f"no attempts to learn from: {scored}, every one of them masked"
    best = f"{scored}, best {facts['best']:g}"
    if request.min_reward is not None and facts["best"] < request.min_reward:
        return f"no scored attempts with reward >= {request.min_reward}: {best}"
    if request.format == "dpo":
        spread = connection.execute(_SPREAD).fetchall()[0][0]
        asked = f"by {request.margin:g} or more" if request.margin else "at all"
        return (
            f"no group has rewards that differ {asked}: {scored} in {facts['groups']} groups, the largest difference {spread:g}"
        )
    return f"no attempt succeeded: {best}; --min-reward takes others"
