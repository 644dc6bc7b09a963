"""The store's one writer: batches of records in, rows and offsets out, exactly once.

Rows and the offsets they came from commit in one transaction, so wherever a crash falls, the log goes on from the first record
that is not in the store. Two files, because what is withheld must never enter the one that is copied; DuckDB commits to one
file at a time, so the private rows go first and are told apart by their position in the log.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import orjson
import pyarrow as pa

import rollstream
from rollstream.errors import UsageError
from rollstream.eventlog.reading import Record
from rollstream.settings import StoreSettings
from rollstream.store import schema, snapshot
from rollstream.store.columns import Scalar, utc_of_ms
from rollstream.store.decoding import Row, decode
from rollstream.store.lock import WriterLock
from rollstream.store.tables import EVENT_TABLES, EventTable

log = logging.getLogger(__name__)

Position = tuple[str, int]
"""Topic (without prefix) and partition."""

_EVENTS: dict[str, EventTable] = {table.name: table for table in EVENT_TABLES}
# Small row groups and an early checkpoint keep the cost of a batch flat as the file grows; neither is remembered in the file.
_ATTACH = "ATTACH '{path}' AS {name} (ROW_GROUP_SIZE 12288, STORAGE_VERSION 'v1.5.0')"
_CHECKPOINT_THRESHOLD = "64MB"
# The log comes in one batch after another: a second thread costs memory and CPU time, and saves nothing.
_THREADS = 1


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """Where a data directory keeps its store."""

    data_dir: Path

    @property
    def folder(self) -> Path:
        return self.data_dir / "store"

    @property
    def public(self) -> Path:
        """Written by the store_worker, and copied."""
        return self.folder / "store.duckdb"

    @property
    def private(self) -> Path:
        return self.folder / "private.duckdb"

    @property
    def published(self) -> Path:
        return self.data_dir / snapshot.PUBLISHED


class Store:
    """The writer's view of a store. Not thread-safe: one thread calls everything. Create it with `Store.open`."""

    def __init__(self, files: StoreFiles, connection: duckdb.DuckDBPyConnection, lock: WriterLock) -> None:
        self._files = files
        self._connection = connection
        self._lock = lock
        self._offsets = _stored_offsets(connection)

    @classmethod
    def open(cls, data_dir: Path, settings: StoreSettings) -> "Store":
        """Become the writer of the store in `data_dir`, which is made if there is none.

        Raises:
            UsageError: another process writes it, or it was made by a newer rollstream.
        """
        files = StoreFiles(data_dir)
        files.folder.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(files.folder / "writer.lock")
        lock.acquire()
        try:
            connection = _connect(files, settings)
            _open_files(connection, files)
            return cls(files, connection, lock)
        except BaseException:
            lock.release()
            raise

    def offsets(self) -> dict[Position, int]:
        """The next offset to read, by topic and partition. Partitions that nothing was stored of are absent."""
        return dict(self._offsets)

    def apply(self, batch: Sequence[Record], ends: Mapping[Position, int] | None = None) -> int:
        """Store a batch: every record becomes a row, or is known to be there already.

        Args:
            batch: the records of each partition in offset order; those below the stored offset are skipped.
            ends: where the log ends as far as the reader knows, for the view `lag`.

        Returns:
            How many records were new.
        """
        offsets = dict(self._offsets)
        fresh = []
        for record in batch:
            position = (record.topic, record.partition)
            if record.offset >= offsets.get(position, 0):
                offsets[position] = record.offset + 1
                fresh.append(record)
        if not fresh:
            return 0
        rows = decode(fresh)
        if rows.private:
            # Before the offsets: a crash between the two repeats this insert, and the rows' positions make that harmless.
            with self._transaction():
                for name, private in rows.private.items():
                    self._insert(private, schema.PRIVATE[name], _INSERT_PRIVATE.format(table=name))
        with self._transaction():
            for name, public in rows.public.items():
                self._insert(public, schema.PUBLIC[name], _insert_public(name), *_since(name, public))
            self._insert(_moved(fresh, ends or {}), schema.OFFSETS, "INSERT OR REPLACE INTO projector_offsets FROM batch")
        self._offsets = offsets
        return len(fresh)

    def publish(self) -> None:
        """Replace the published copy by the store as it is now."""
        offsets = {f"{topic}/{partition}": offset for (topic, partition), offset in sorted(self._offsets.items())}
        info = [_now(), rollstream.__version__, orjson.dumps(offsets).decode()]
        with self._transaction():
            self._connection.execute("DELETE FROM snapshot_info")
            self._connection.execute("INSERT INTO snapshot_info VALUES (?, ?, ?)", info)
        self._connection.execute("CHECKPOINT store")
        snapshot.publish(self._files.public, self._files.published)

    def remove_leftovers(self) -> None:
        """Remove what a crashed reader left beside the published copy."""
        snapshot.remove_leftover(self._files.published)

    def close(self) -> None:
        self._connection.close()
        self._lock.release()

    def _insert(self, rows: list[Row], columns: schema.Schema, statement: str, *parameters: object) -> None:
        self._connection.register("batch", schema.arrow_table(rows, columns))
        self._connection.execute(statement, parameters)
        self._connection.unregister("batch")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.begin()
        try:
            yield
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.commit()


_INSERT_PRIVATE = """
INSERT INTO private.{table} FROM batch
WHERE NOT EXISTS (
    SELECT 1 FROM private.{table} AS stored
    WHERE stored.kafka_offset = batch.kafka_offset AND stored.kafka_partition = batch.kafka_partition
        AND stored.topic = batch.topic
)
"""
_INSERT_EVENTS = """
INSERT INTO {table} FROM batch
WHERE NOT EXISTS (SELECT 1 FROM {table} AS stored WHERE stored.event_id = batch.event_id {bound})
"""


def _insert_public(name: str) -> str:
    table = _EVENTS.get(name)
    if table is None:
        return f"INSERT INTO {name} FROM batch"
    return _INSERT_EVENTS.format(table=name, bound="AND stored.caused_at >= ?" if table.repeats_are_copies else "")


def _since(name: str, rows: list[Row]) -> list[Scalar]:
    """The constant bound of the look-up for duplicates, where there is one: it lets DuckDB skip all older row groups."""
    table = _EVENTS.get(name)
    if table is None or not table.repeats_are_copies:
        return []
    column = next(number for number, (column, _) in enumerate(table.schema()) if column == "caused_at")
    return [min(row[column] for row in rows)]  # type: ignore[type-var]


def _moved(records: Sequence[Record], ends: Mapping[Position, int]) -> list[Row]:
    """Rows of `projector_offsets` for the partitions that `records`, in offset order, belong to."""
    now = _now()
    last = {(record.topic, record.partition): record for record in records}
    return [
        (topic, partition, record.offset + 1, ends.get((topic, partition)), utc_of_ms(record.timestamp_ms), now)
        for (topic, partition), record in last.items()
    ]


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


def _connect(files: StoreFiles, settings: StoreSettings) -> duckdb.DuckDBPyConnection:
    # Arrow's own allocator keeps what a large batch took; the system's gives it back.
    pa.set_memory_pool(pa.system_memory_pool())
    spill = files.folder / "spill"
    connection = duckdb.connect(
        config={"memory_limit": f"{settings.memory_limit_mib}MiB", "threads": _THREADS, "temp_directory": str(spill)}
    )
    connection.execute(f"SET checkpoint_threshold = '{_CHECKPOINT_THRESHOLD}'")
    return connection


def _open_files(connection: duckdb.DuckDBPyConnection, files: StoreFiles) -> None:
    """Attach both files, made anew if they are missing or of an older schema.

    Raises:
        UsageError: a newer rollstream made them.
    """
    versions = _attach(connection, files)
    if max(version or 0 for version in versions) > schema.SCHEMA_VERSION:
        raise UsageError(f"the store in {files.folder} was made by a newer rollstream; upgrade, or use another data directory")
    if versions != [schema.SCHEMA_VERSION] * 2:
        if any(versions):
            log.warning("the store in %s is of an older schema: set aside, and built anew from the log", files.folder)
            _set_aside(connection, files)
            _attach(connection, files)
        for database, ddl in (("private", schema.private_ddl("private")), ("store", schema.public_ddl("store"))):
            connection.execute(f"USE {database}; BEGIN; {ddl}; COMMIT")
    connection.execute(f"USE store; BEGIN; {schema.views_sql()}; COMMIT")


def _attach(connection: duckdb.DuckDBPyConnection, files: StoreFiles) -> list[int | None]:
    """Attach the files; returns the schema version of each, or None of one that was just made."""
    versions: list[int | None] = []
    for name, path in (("store", files.public), ("private", files.private)):
        quoted = str(path).replace("'", "''")
        connection.execute(_ATTACH.format(path=quoted, name=name))
        tables = connection.execute(
            "SELECT count(*) FROM duckdb_tables() WHERE database_name = ? AND table_name = 'schema_version'", [name]
        ).fetchall()
        made = tables[0][0] == 0
        versions.append(None if made else connection.execute(f"SELECT version FROM {name}.schema_version").fetchall()[0][0])
    return versions


def _set_aside(connection: duckdb.DuckDBPyConnection, files: StoreFiles) -> None:
    for name, path in (("store", files.public), ("private", files.private)):
        connection.execute(f"DETACH {name}")
        os.replace(path, path.with_suffix(".old.duckdb"))


def _stored_offsets(connection: duckdb.DuckDBPyConnection) -> dict[Position, int]:
    rows = connection.execute("SELECT topic, kafka_partition, next_offset FROM projector_offsets").fetchall()
    return {(topic, partition): offset for topic, partition, offset in rows}
