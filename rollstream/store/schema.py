"""The DDL of both store files, made from `tables`, and the views over them, from `views.sql`.

A change of the tables raises `SCHEMA_VERSION`; an older store is then set aside and built anew from the log, which has
everything. That is the only migration there is.
"""

from importlib import resources

import pyarrow as pa

from rollstream.store.columns import Row, SqlType, arrow_array
from rollstream.store.tables import EVENT_TABLES, PRIVATE_TABLES, RECORD_TABLES

SCHEMA_VERSION = 6

Schema = tuple[tuple[str, SqlType], ...]

PUBLIC: dict[str, Schema] = {table.name: table.schema() for table in EVENT_TABLES} | RECORD_TABLES
"""Tables of the file that is published."""
PRIVATE: dict[str, Schema] = PRIVATE_TABLES
"""Tables of the file that is not."""

OFFSETS: Schema = (
    ("topic", "VARCHAR"),
    ("kafka_partition", "INTEGER"),
    ("next_offset", "BIGINT"),
    ("end_offset", "BIGINT"),
    ("last_recorded_at", "TIMESTAMP"),
    ("updated_at", "TIMESTAMP"),
)
"""How far the store has read, by topic and partition; in the same transaction as the rows."""

PRUNINGS_SCHEMA: Schema = (
    ("pruned_at", "TIMESTAMP"),
    ("before", "TIMESTAMP"),
    ("run_id", "VARCHAR"),
    ("topic", "VARCHAR"),
    ("kafka_partition", "INTEGER"),
    ("next_offset", "BIGINT"),
)
"""What was removed: of each partition, records below `next_offset` that are older than `before`, or of the run."""

_DDL: dict[SqlType, str] = {
    "JSON": "VARCHAR",
    "PAYLOAD": "VARCHAR USING COMPRESSION zstd",
    "BLOB": "BLOB USING COMPRESSION zstd",
}
_BOOKKEEPING = """
CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO schema_version VALUES ({version});
"""
_PUBLIC_BOOKKEEPING = """
CREATE TABLE projector_offsets ({offsets}, PRIMARY KEY (topic, kafka_partition));
CREATE TABLE prunings ({prunings});
CREATE TABLE contaminated (
    run_id VARCHAR, group_id VARCHAR, rollout_id VARCHAR, session_id VARCHAR, field VARCHAR, in_task BOOLEAN,
    PRIMARY KEY (session_id, field)
);
CREATE TABLE snapshot_info (published_at TIMESTAMP, rollstream_version VARCHAR, offsets VARCHAR);
"""


def public_ddl() -> str:
    """The tables of the file that is published."""
    bookkeeping = _PUBLIC_BOOKKEEPING.format(offsets=_columns(OFFSETS), prunings=_columns(PRUNINGS_SCHEMA))
    return _tables(PUBLIC) + _BOOKKEEPING.format(version=SCHEMA_VERSION) + bookkeeping


def private_ddl() -> str:
    return _tables(PRIVATE) + _BOOKKEEPING.format(version=SCHEMA_VERSION)


def views_sql() -> str:
    return resources.files("rollstream.store").joinpath("views.sql").read_text()


def arrow_table(rows: list[Row], schema: Schema) -> pa.Table:
    """`rows`, column by column, as DuckDB can read them without copying."""
    arrays = [arrow_array(values, type_) for values, (_, type_) in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.Table.from_arrays(arrays, names=[name for name, _ in schema])


def _tables(schemas: dict[str, Schema]) -> str:
    # No keys and no indexes: an index on ids makes inserts slower with every row.
    return "".join(f"CREATE TABLE {name} ({_columns(schema)});\n" for name, schema in schemas.items())


def _columns(schema: Schema) -> str:
    return ", ".join(f'"{name}" {_DDL.get(type_, type_)}' for name, type_ in schema)
