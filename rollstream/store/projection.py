"""The store's one writer: batches of records in, rows and offsets out, exactly once.

Rows and the offsets they came from commit in one transaction, so wherever a crash falls, the log goes on from the first record
that is not in the store. Two files, because what is withheld must never enter the one that is copied; DuckDB commits to one
file at a time, so the private rows go first and are told apart by their position in the log.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import orjson

import rollstream
from rollstream.eventlog.reading import Record
from rollstream.settings import StoreSettings
from rollstream.store import schema, snapshot
from rollstream.store.columns import Scalar, utc_of_ms
from rollstream.store.database import Database, StoreFiles
from rollstream.store.decoding import Row, Rows, decode
from rollstream.store.lock import WriterLock
from rollstream.store.tables import EVENT_TABLES, LONG_PAYLOADS, EventTable

Position = tuple[str, int]
"""Topic (without prefix) and partition."""

_EVENTS: dict[str, EventTable] = {table.name: table for table in EVENT_TABLES}


class Store:
    """The writer's view of a store. Not thread-safe: one thread calls everything. Create it with `Store.open`."""

    def __init__(self, files: StoreFiles, database: Database, lock: WriterLock) -> None:
        self._files = files
        self._database = database
        self._lock = lock
        self._offsets = _stored_offsets(database)

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
            return cls(files, Database.open(files, settings), lock)
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
        moved = _moved(fresh, ends or {})
        try:
            self._commit(rows, moved)
        except duckdb.OutOfMemoryException:
            with self._database.more_memory():
                self._commit(rows, moved)
        self._offsets = offsets
        self._database.checkpoint_if_due()
        return len(fresh)

    def publish(self) -> None:
        """Replace the published copy by the store as it is now.

        Raises:
            UsageError: long trajectories need more memory than the setting allows.
        """
        offsets = {f"{topic}/{partition}": offset for (topic, partition), offset in sorted(self._offsets.items())}
        info = (_now(), rollstream.__version__, orjson.dumps(offsets).decode())
        with self._database.transaction():
            self._database.connection.execute("DELETE FROM snapshot_info")
            self._database.connection.execute("INSERT INTO snapshot_info VALUES (?, ?, ?)", info)
        self._database.checkpoint()
        snapshot.publish(self._files.public, self._files.published)

    def remove_leftovers(self) -> None:
        """Remove what a crashed reader left beside the published copy."""
        snapshot.remove_leftover(self._files.published)

    def close(self) -> None:
        self._database.close()
        self._lock.release()

    def _commit(self, rows: Rows, moved: list[Row]) -> None:
        database = self._database
        if rows.private:
            # Before the offsets: a crash between the two repeats this insert, and the rows' positions make that harmless.
            with database.transaction():
                for name, private in rows.private.items():
                    database.insert(private, schema.PRIVATE[name], _INSERT_PRIVATE.format(table=name))
        with database.transaction():
            for name, public in rows.public.items():
                database.insert(public, schema.PUBLIC[name], _insert_public(name), *_since(name, public))
            database.insert(moved, schema.OFFSETS, "INSERT OR REPLACE INTO projector_offsets FROM batch")


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


_INSERT_LONG = f"""
INSERT INTO {LONG_PAYLOADS} FROM batch
WHERE NOT EXISTS (
    SELECT 1 FROM {LONG_PAYLOADS} AS stored WHERE stored.event_id = batch.event_id AND stored.kind = batch.kind
)
"""


def _insert_public(name: str) -> str:
    if name == LONG_PAYLOADS:
        return _INSERT_LONG
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


def _stored_offsets(database: Database) -> dict[Position, int]:
    rows = database.connection.execute("SELECT topic, kafka_partition, next_offset FROM projector_offsets").fetchall()
    return {(topic, partition): offset for topic, partition, offset in rows}
