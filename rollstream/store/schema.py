"""The DDL of both store files, made from `tables`, and the views over them, from `views.sql`.

A change of the tables raises `SCHEMA_VERSION`; an older store is then set aside and built anew from the log, which has
everything. That is the only migration there is.
"""

from importlib import resources

import pyarrow as pa

from rollstream.store.columns import Scalar, SqlType
from rollstream.store.decoding import Row
from rollstream.store.tables import EVENT_TABLES, PRIVATE_TABLES, RECORD_TABLES

SCHEMA_VERSION = 3

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

_DDL: dict[SqlType, str] = {
    "JSON": "VARCHAR",
    "PAYLOAD": "VARCHAR USING COMPRESSION zstd",
    "BLOB": "BLOB USING COMPRESSION zstd",
}
_ARROW: dict[SqlType, pa.DataType] = {
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "PAYLOAD": pa.large_string(),
    "BLOB": pa.large_binary(),
    "BIGINT": pa.int64(),
    "INTEGER": pa.int32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us"),
    "UUID": pa.uuid(),
}

_BOOKKEEPING = """
CREATE TABLE {database}.schema_version (version INTEGER NOT NULL);
INSERT INTO {database}.schema_version VALUES ({version});
"""
_PUBLIC_BOOKKEEPING = """
CREATE TABLE {database}.projector_offsets ({offsets}, PRIMARY KEY (topic, kafka_partition));
CREATE TABLE {database}.snapshot_info (published_at TIMESTAMP, rollstream_version VARCHAR, offsets VARCHAR);
"""


def public_ddl(database: str) -> str:
    """The tables of the file that is published, in an attached `database`."""
    bookkeeping = _PUBLIC_BOOKKEEPING.format(database=database, offsets=_columns(OFFSETS))
    return _tables(database, PUBLIC) + _BOOKKEEPING.format(database=database, version=SCHEMA_VERSION) + bookkeeping


def private_ddl(database: str) -> str:
    return _tables(database, PRIVATE) + _BOOKKEEPING.format(database=database, version=SCHEMA_VERSION)


def views_sql() -> str:
    return resources.files("rollstream.store").joinpath("views.sql").read_text()


def arrow_table(rows: list[Row], schema: Schema) -> pa.Table:
    """`rows`, column by column, as DuckDB can read them without copying."""
    arrays = [_arrow_array(values, _ARROW[type_]) for values, (_, type_) in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.Table.from_arrays(arrays, names=[name for name, _ in schema])


def _arrow_array(values: tuple[Scalar, ...], type_: pa.DataType) -> pa.Array:
    if type_ == pa.uuid():
        return pa.ExtensionArray.from_storage(type_, pa.array(values, pa.binary(16)))
    return pa.array(values, type_)


def _tables(database: str, schemas: dict[str, Schema]) -> str:
    # No keys and no indexes: an index on ids makes inserts slower with every row.
    return "".join(f"CREATE TABLE {database}.{name} ({_columns(schema)});\n" for name, schema in schemas.items())


def _columns(schema: Schema) -> str:
    return ", ".join(f'"{name}" {_DDL.get(type_, type_)}' for name, type_ in schema)
