"""Removing old rows from the store. The log keeps them, and the store keeps in mind what was removed.

A pruning takes what the store had read when it was made, and nothing that comes later: a run that was pruned and is resumed
has rows again, of what happened since. So it is a list of positions, and as true of a store that is built anew from the log.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from rollstream.store.columns import ARROW_TYPES, Row
from rollstream.store.schema import PRUNINGS_SCHEMA
from rollstream.store.tables import EVENT_TABLES, TOPIC_OF

if TYPE_CHECKING:
    from rollstream.store.database import DatabaseFile

PRUNINGS = "prunings"

PRUNED = f"""EXISTS (
    SELECT 1 FROM {PRUNINGS} AS pruning
    WHERE pruning.topic = {{topic}} AND pruning.kafka_partition = {{row}}.kafka_partition
        AND {{row}}.kafka_offset < pruning.next_offset
        AND ({{row}}.recorded_at < pruning.before OR {{row}}.run_id = pruning.run_id)
)"""

_READ = f"SELECT {', '.join(name for name, _ in PRUNINGS_SCHEMA)} FROM {PRUNINGS}"


def read(connection: duckdb.DuckDBPyConnection) -> list[Row]:
    """What was pruned from a store, of any schema version."""
    try:
        return connection.execute(_READ).fetchall()
    except duckdb.CatalogException:
        return []


def add(file: "DatabaseFile", pruned: list[Row]) -> None:
    """Keep in mind that something is pruned. Nothing is removed yet."""
    file.insert(_arrow(pruned), f"INSERT INTO {PRUNINGS} FROM batch")


def remove(file: "DatabaseFile", tables: Iterable[str], pruned: list[Row], first: int = 0) -> int:
    """Delete what is pruned, of records from offset `first` on; returns how many rows that were."""
    rows = _arrow(pruned)
    condition = PRUNED.replace(f"{PRUNINGS} AS", "batch AS")
    removed = 0
    for table in tables:
        is_pruned = condition.format(topic=topic_in(table, table), row=table)
        removed += file.insert(rows, f"DELETE FROM {table} WHERE kafka_offset >= {first} AND {is_pruned}")
    return removed


def _arrow(pruned: list[Row]) -> pa.Table:
    columns = zip(*pruned, strict=True)
    arrays = [pa.array(values, ARROW_TYPES[type_]) for values, (_, type_) in zip(columns, PRUNINGS_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, names=[name for name, _ in PRUNINGS_SCHEMA])


def topic_in(table: str, row: str = "") -> str:
    """The topic of a row, as SQL: an event table holds those of one topic, the others say it in a column."""
    if table in {event.name for event in EVENT_TABLES}:
        return f"'{TOPIC_OF[table]}'"
    return f"{row}.topic" if row else "topic"
