"""The store's one writer: batches of records in, rows and offsets out, exactly once.

Rows and the offsets they came from commit in one transaction, so wherever a crash falls, the log goes on from the first record
that is not in the store. Two files, because what is withheld must never enter the one that is copied; DuckDB commits to one
file at a time, so the private rows go first and are told apart by their position in the log.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import duckdb
import orjson
import pyarrow as pa
import pyarrow.compute as pc

import rollstream
from rollstream.eventlog.reading import Record
from rollstream.settings import StoreSettings
from rollstream.store import pruning, schema, snapshot
from rollstream.store.batch import Batch, EventBatch, Position, arrow, plan, utc_now
from rollstream.store.columns import Row
from rollstream.store.database import Database, DatabaseFile, StoreDamaged, StoreFiles, set_aside, storage
from rollstream.store.flagging import FORGET_PRUNED_SESSIONS, flag_contamination
from rollstream.store.lock import WriterLock
from rollstream.store.tables import DUPLICATES, LONG_PAYLOADS

log = logging.getLogger(__name__)

_COPIED_ROWS = 2_048


class Store:
    """The writer's view of a store. Not thread-safe: one thread calls everything. Create it with `Store.open`."""

    def __init__(self, files: StoreFiles, settings: StoreSettings, database: Database, lock: WriterLock) -> None:
        self._files = files
        self._settings = settings
        self._database = database
        self.lock = lock
        self._offsets = _stored_offsets(database)
        self._pruned = pruning.read(database.public.connection)
        self._is_damaged = False

    @classmethod
    def open(cls, data_dir: Path, settings: StoreSettings) -> "Store":
        """Become the writer of the store in `data_dir`, which is made if there is none.

        Raises:
            UsageError: another process writes it, or it was made by a newer rollstream.
            StoreLost: the disk is full, or the files may not be written.
        """
        lock = WriterLock.of(data_dir)
        try:
            files = StoreFiles(data_dir)
            return cls(files, settings, Database.open(files, settings), lock)
        except BaseException:
            lock.release()
            raise

    def offsets(self) -> dict[Position, int]:
        """The next offset to read, by topic and partition. Partitions that nothing was stored of are absent."""
        return dict(self._offsets)

    @property
    def public(self) -> DatabaseFile:
        """The file that may be read by anybody, for questions on cursors of their own."""
        return self._database.public

    def apply(self, records: Sequence[Record], ends: Mapping[Position, int] | None = None) -> int:
        """Store a batch: every record becomes a row, or is known to be there already.

        Args:
            records: those of each partition in offset order; the ones below the stored offset are skipped.
            ends: where the log ends as far as the reader knows, for the view `lag`.

        Returns:
            How many records were new.
        """
        return self.commit(plan(records, self._offsets, ends or {}))

    def commit(self, batch: Batch) -> int:
        """Store a batch that was planned on top of the offsets that are stored; returns how many records were new.

        Raises:
            StoreLost: the disk is full, or somebody did something to the files; `reopen` before the next call.
        """
        if not batch.records:
            return 0
        self._database.check()
        with self._storage():
            try:
                self._commit(batch)
            except duckdb.OutOfMemoryException:
                with self._database.public.more_memory(), self._database.private.more_memory():
                    self._commit(batch)
            self._offsets = batch.offsets
            self._database.inserted(batch.nbytes())
            self._database.checkpoint_if_due()
        return batch.records

    def reopen(self) -> None:
        """Open the files again, after they were lost or could not be written. What is stored then, `offsets` says.

        Raises:
            StoreLost: it still cannot be.
        """
        with suppress(duckdb.Error):
            self._database.close()
        if self._is_damaged:
            log.warning("the store in %s is damaged: set aside, and built anew from the log", self._files.folder)
            set_aside(self._files)
            self._is_damaged = False
        self._database = Database.open(self._files, self._settings)
        self._offsets = _stored_offsets(self._database)
        self._pruned = pruning.read(self._database.public.connection)

    def prune(self, before: datetime | None, run: str | None) -> int:
        """Remove what the store has of records before a time, or of a run; returns how many rows that were.

        The log has them still. They stay out of this store, whatever is read again, until it is rebuilt.
        """
        now = utc_now()
        pruned: list[Row] = [(now, before, run, *position, offset) for position, offset in self._offsets.items()]
        self.keep_out(pruned)
        with self._database.private.transaction():
            pruning.remove(self._database.private, schema.PRIVATE, pruned)
        with self._database.public.transaction():
            removed = pruning.remove(self._database.public, schema.PUBLIC, pruned)
            self._database.public.connection.execute(FORGET_PRUNED_SESSIONS)
        return removed

    def keep_out(self, pruned: list[Row]) -> None:
        """Keep out what is pruned from now on."""
        if pruned:
            pruning.add(self._database.public, pruned)
            self._pruned += pruned

    def copy_to(self, other: "Store") -> None:
        """Write everything into an empty store, without the room that removed rows have left."""
        bookkeeping = ("projector_offsets", pruning.PRUNINGS, "contaminated")
        pairs = (
            (self._database.private, other._database.private, list(schema.PRIVATE)),
            (self._database.public, other._database.public, [*schema.PUBLIC, *bookkeeping]),
        )
        for source, target, tables in pairs:
            for table in tables:
                for rows in source.connection.sql(f"FROM {table}").to_arrow_reader(_COPIED_ROWS):
                    target.insert(pa.Table.from_batches([rows]), f"INSERT INTO {table} FROM batch")
                    other._database.inserted(rows.nbytes)
                    other._database.checkpoint_if_due()
        other._offsets = self.offsets()

    def publish(self) -> None:
        """Replace the published copy by the store as it is now.

        Raises:
            UsageError: long trajectories need more memory than the setting allows.
            StoreLost: the disk is full, or somebody did something to the files. The copy that there is stays.
        """
        self._database.check()
        with self._storage():
            self.finish()
            snapshot.publish(self._files.public, self._files.published)

    def finish(self) -> None:
        """Bring the file up to date, as it is to be copied."""
        offsets = {f"{topic}/{partition}": offset for (topic, partition), offset in sorted(self._offsets.items())}
        info = (utc_now(), rollstream.__version__, orjson.dumps(offsets).decode())
        with self._database.public.transaction():
            self._database.public.connection.execute("DELETE FROM snapshot_info")
            self._database.public.connection.execute("INSERT INTO snapshot_info VALUES (?, ?, ?)", info)
        self._database.checkpoint()

    def remove_leftovers(self) -> None:
        """Remove what a crashed reader left beside the published copy."""
        snapshot.remove_leftover(self._files.published)

    def close(self) -> None:
        try:
            self.close_files()
        finally:
            self.lock.release()

    def close_files(self) -> None:
        """Close the files, and stay the only one who may write them."""
        self._database.close()

    @contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            with storage(self._files.folder):
                yield
        except StoreDamaged:
            self._is_damaged = True
            raise

    def _commit(self, batch: Batch) -> None:
        public, private = self._database.public, self._database.private
        if batch.private:
            # Before the offsets: a crash between the two repeats this insert, and the rows' positions make that harmless.
            with private.transaction():
                for name, rows in batch.private.items():
                    private.insert(arrow(name, rows), _INSERT_PRIVATE.format(table=name))
                if pruned := self._pruned_ahead():
                    pruning.remove(private, batch.private, pruned, batch.first_offset)
        with public.transaction():
            repeated = {position for events in batch.events for position in _insert_events(public, events)}
            for name, rows in batch.public.items():
                if name == LONG_PAYLOADS and repeated:
                    rows = [row for row in rows if row[-3:-1] not in repeated]
                if rows:
                    public.insert(arrow(name, rows), f"INSERT INTO {name} FROM batch")
            flag_contamination(public, private, batch)
            if pruned := self._pruned_ahead():
                pruning.remove(public, schema.PUBLIC, pruned, batch.first_offset)
            moved = schema.arrow_table(batch.moved, schema.OFFSETS)
            public.insert(moved, "INSERT OR REPLACE INTO projector_offsets FROM batch")

    def _pruned_ahead(self) -> list[Row]:
        """The prunings that the store has not passed yet: some, when a store that was pruned is built anew."""
        return [row for row in self._pruned if self._offsets.get((str(row[3]), int(str(row[4]))), 0) < int(str(row[5]))]


_INSERT_PRIVATE = """
INSERT INTO {table} FROM batch
WHERE NOT EXISTS (
    SELECT 1 FROM {table} AS stored
    WHERE stored.kafka_offset = batch.kafka_offset AND stored.kafka_partition = batch.kafka_partition
        AND stored.topic = batch.topic
)
"""
_INSERT_EVENTS = """
INSERT INTO {table} FROM batch
WHERE NOT EXISTS (SELECT 1 FROM {table} AS stored WHERE stored.event_id = batch.event_id {bound})
"""
_REPEATED = """
SELECT kafka_partition, kafka_offset FROM batch
WHERE NOT EXISTS (
    SELECT 1 FROM {table} AS stored
    WHERE stored.kafka_offset >= ? AND stored.kafka_offset = batch.kafka_offset
        AND stored.kafka_partition = batch.kafka_partition
)
"""


def _insert_events(public: DatabaseFile, batch: EventBatch) -> list[tuple[object, ...]]:
    """Insert what is new; returns the positions of the others, which become rows that say that they repeat an event."""
    name = batch.table.name
    if batch.table.repeats_are_copies:
        # A constant bound lets DuckDB skip all older row groups.
        since = [pc.min(batch.rows["caused_at"]).as_py()]
        inserted = public.insert(batch.rows, _INSERT_EVENTS.format(table=name, bound="AND stored.caused_at >= ?"), *since)
    else:
        inserted = public.insert(batch.rows, _INSERT_EVENTS.format(table=name, bound=""))
    if inserted == batch.rows.num_rows:
        return []
    first = pc.min(batch.rows["kafka_offset"]).as_py()
    repeated = public.select(batch.rows, _REPEATED.format(table=name), first)
    public.insert(batch.rows, _insert_repeated(name), batch.topic, first)
    return repeated


def _insert_repeated(table: str) -> str:
    columns = "?, event_id, run_id, kafka_partition, kafka_offset, recorded_at"
    return f"INSERT INTO {DUPLICATES} SELECT {columns} {_REPEATED[_REPEATED.index('FROM') :].format(table=table)}"


def _stored_offsets(database: Database) -> dict[Position, int]:
    rows = database.public.connection.execute("SELECT topic, kafka_partition, next_offset FROM projector_offsets").fetchall()
    return {(topic, partition): offset for topic, partition, offset in rows}
