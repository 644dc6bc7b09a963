"""The two files of a store, open for writing, within a bound of memory.

Each file is in a DuckDB of its own, so that no statement about the public one can reach the private one. DuckDB works through a
column 2,048 values at a time, so a checkpoint may have to hold as many at once; everything else does with little. So the limit
is low, and raised to the setting's for a checkpoint; and checkpoints are made here and nowhere else, because one that DuckDB
makes by itself, and that runs out of memory, invalidates the database.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from rollstream.errors import RollstreamError, UsageError
from rollstream.settings import StoreSettings
from rollstream.store import pruning, schema, snapshot
from rollstream.store.columns import Row
from rollstream.store.schema import Schema

log = logging.getLogger(__name__)

WORKING_MEMORY_MIB = 128
"""All that inserts and look-ups need."""
KEPT_MEMORY_MIB = 32
"""What may stay in memory after a checkpoint. DuckDB would keep all that it read, up to the limit; a writer hardly uses it."""
CHECKPOINT_BYTES = 32 * 1024 * 1024
"""How much may be inserted until it is compressed: more takes memory, and time after a crash; less is compressed twice."""
# The log comes in one batch after another: a second thread costs memory and CPU time, and saves nothing.
_THREADS = 1
_NEVER = "1TB"
# A checkpoint compresses the last row group again, so small ones keep its cost flat. Neither option is remembered in the file.
_ATTACH = "ATTACH '{path}' AS store (ROW_GROUP_SIZE 2048, STORAGE_VERSION 'v1.5.0'{more})"
_WITHOUT_WAL = ", RECOVERY_MODE no_wal_writes"

_COLUMNS = """
SELECT table_name, column_name FROM duckdb_columns()
WHERE database_name = 'store' AND table_name IN (SELECT table_name FROM duckdb_tables() WHERE database_name = 'store')
ORDER BY table_name, column_index
"""


class StoreLost(RollstreamError):
    """The store cannot be written as it is: the disk is full, or somebody removed or cut a file. Opening it again may help."""


class StoreDamaged(StoreLost):
    """What a file holds cannot be read back."""


STORAGE_ERRORS = (
    duckdb.IOException,
    duckdb.FatalException,
    duckdb.InternalException,
    duckdb.SerializationException,
    duckdb.TransactionException,
    OSError,
)
"""What comes of the disk, or of what was done to the files, and not of what was to be stored."""


@contextmanager
def storage(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one sentence.

    Raises:
        StoreLost: there was one.
    """
    try:
        yield
    except STORAGE_ERRORS as error:
        reason = " ".join(str(error).split())[:300]
        kind = StoreDamaged if any(words in reason.lower() for words in _DAMAGE) else StoreLost
        raise kind(f"the store in {folder} cannot be written: {reason}") from error


_DAMAGE = ("could not read enough bytes", "checksum", "corrupt", "deserializ")


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """Where a data directory keeps its store."""

    data_dir: Path
    folder_name: str = "store"

    @property
    def folder(self) -> Path:
        return self.data_dir / self.folder_name

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


class DatabaseFile:
    """One file, open for writing. Its tables are in the schema `store`, which is the default one."""

    def __init__(self, path: Path, most_mib: int, *, is_copy: bool = False) -> None:
        """Open a file.

        Args:
            is_copy: it takes another one's place when it is complete, so what a crash leaves of it is of no use.
        """
        self.path = path
        self.connection = duckdb.connect(config={"threads": _THREADS, "temp_directory": str(path.parent / "spill")})
        self.undisturbed = threading.Lock()
        """Held for a checkpoint, and by whoever reads on a cursor of the connection: the two must not meet."""
        self._most_mib = most_mib
        self._working_mib = most_mib if is_copy else min(WORKING_MEMORY_MIB, most_mib)
        attach = _ATTACH.format(path=str(path).replace("'", "''"), more=_WITHOUT_WAL if is_copy else "")
        self._identity = (0, 0)
        self._bytes = 0
        try:
            self.connection.execute(f"SET checkpoint_threshold = '{_NEVER}'")
            with self.more_memory():
                self.connection.execute(f"{attach}; USE store")
            self._remember()
        except BaseException:
            self.connection.close()
            raise

    def version(self, expected: dict[str, Schema]) -> int | None:
        """Of its schema: None of a file that was just made, 0 if it says ours and its tables are not the `expected` ones."""
        found: dict[str, list[str]] = {}
        for table, column in self.connection.execute(_COLUMNS).fetchall():
            found.setdefault(table, []).append(column)
        if not found:
            return None
        if "schema_version" not in found:
            return 0
        version = int(self.connection.execute("SELECT max(version) FROM schema_version").fetchall()[0][0] or 0)
        alike = all(found.get(table) == [name for name, _ in columns] for table, columns in expected.items())
        return version if alike or version != schema.SCHEMA_VERSION else 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.connection.begin()
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self.connection.commit()

    def insert(self, batch: pa.Table, statement: str, *parameters: object) -> int:
        """Run `statement`, to which `batch` is a table of that name; returns how many rows it inserted."""
        return int(str(self.select(batch, statement, *parameters)[0][0]))

    def select(self, batch: pa.Table, statement: str, *parameters: object) -> list[tuple[object, ...]]:
        """The rows of `statement`, to which `batch` is a table of that name."""
        self.connection.register("batch", batch)
        try:
            return self.connection.execute(statement, parameters).fetchall()
        finally:
            self.connection.unregister("batch")

    def checkpoint(self) -> None:
        """Compress what was inserted, and bring the file up to date.

        Raises:
            UsageError: not within the setting's memory.
        """
        with self.undisturbed, self.more_memory():
            try:
                self.connection.execute("CHECKPOINT store")
            except (duckdb.OutOfMemoryException, duckdb.FatalException, duckdb.IOException) as error:
                if "memory" not in str(error).lower():
                    raise
                raise UsageError(
                    f"the store cannot compress its trajectories within {self._most_mib} MiB: raise store.memory_limit_mib"
                ) from error
            self._remember()

    @contextmanager
    def more_memory(self) -> Iterator[None]:
        """As much as the setting allows, for what cannot be done with less."""
        self._limit(self._most_mib)
        try:
            yield
        finally:
            self._limit(KEPT_MEMORY_MIB)
            self._limit(self._working_mib)

    def check(self) -> None:
        """See that the file on disk is still the one that was opened.

        Raises:
            StoreLost: it was removed, replaced or cut.
        """
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            raise StoreLost(f"{self.path} was removed while the store_worker wrote it") from None
        if (found.st_dev, found.st_ino) != self._identity:
            raise StoreLost(f"{self.path} was replaced while the store_worker wrote it")
        if found.st_size < self._bytes:
            raise StoreLost(f"{self.path} was cut to {found.st_size} bytes while the store_worker wrote it")

    def damage(self) -> str:
        """What is wrong with the file's size, or nothing: one that was cut is opened without complaint, and fails later."""
        used = "SELECT block_size, used_blocks FROM pragma_database_size() WHERE database_name = 'store'"
        block_bytes, blocks = self.connection.execute(used).fetchall()[0]
        found, expected = os.stat(self.path).st_size, blocks * block_bytes
        return "" if found >= expected else f"{self.path.name} has {found} bytes, and {expected} in use"

    def close(self) -> None:
        try:
            # DuckDB checkpoints once more as it closes.
            self._limit(self._most_mib)
        except duckdb.Error as error:
            log.debug("closing without it: %s", error)
        finally:
            self.connection.close()

    def _remember(self) -> None:
        found = os.stat(self.path)
        self._identity, self._bytes = (found.st_dev, found.st_ino), found.st_size

    def _roll_back(self) -> None:
        try:
            self.connection.rollback()
        except duckdb.Error as error:
            # What made it fail is what there is to say.
            log.debug("no rollback: %s", error)

    def _limit(self, mib: int) -> None:
        try:
            self.connection.execute(f"SET memory_limit = '{mib}MiB'")
        except duckdb.OutOfMemoryException:
            log.debug("more than %d MiB are in use: the limit stays", mib)


@dataclass(slots=True)
class Database:
    """Both files. Create it with `Database.open`."""

    public: DatabaseFile
    private: DatabaseFile
    _inserted: int = 0

    @classmethod
    def open(cls, files: StoreFiles, settings: StoreSettings, *, are_copies: bool = False) -> "Database":
        """Open the files, made anew if they are missing or of an older schema.

        Args:
            are_copies: they take the place of others when they are complete.

        Raises:
            UsageError: a newer rollstream made them.
        """
        # Arrow's own allocator keeps what a large batch took; the system's gives it back.
        pa.set_memory_pool(pa.system_memory_pool())
        database = cls._open(files, settings, are_copies=True) if are_copies else cls._open_sound(files, settings)
        pruned: list[Row] = []
        try:
            versions = {database.public.version(schema.PUBLIC), database.private.version(schema.PRIVATE)}
            if any((version or 0) > schema.SCHEMA_VERSION for version in versions):
                raise UsageError(
                    f"the store in {files.folder} was made by a newer rollstream; upgrade, or use another data directory"
                )
            if versions != {schema.SCHEMA_VERSION} and versions != {None}:
                log.warning("the store in %s is of an older schema: set aside, and built anew from the log", files.folder)
                pruned = pruning.read(database.public.connection)
                database.close()
                set_aside(files)
                database = cls._open(files, settings)
                versions = {None}
            database._prepare(versions == {None})
            if pruned:
                log.warning("what was pruned from it stays out; `rollstream store rebuild` brings it back")
                pruning.add(database.public, pruned)
        except BaseException:
            database.close()
            raise
        return database

    def inserted(self, size: int) -> None:
        """Count bytes that are not compressed yet."""
        self._inserted += size

    def checkpoint_if_due(self) -> None:
        if self._inserted > CHECKPOINT_BYTES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Compress what was inserted, and bring both files up to date.

        Raises:
            UsageError: not within the setting's memory.
        """
        self.public.checkpoint()
        self.private.checkpoint()
        self._inserted = 0
        # Records come and go by the thousand, and their room is given back to the system only when it is asked for.
        pa.system_memory_pool().release_unused()

    def check(self) -> None:
        """See that both files are still there.

        Raises:
            StoreLost: one of them is not.
        """
        self.public.check()
        self.private.check()

    def close(self) -> None:
        try:
            self.public.close()
        finally:
            self.private.close()

    @classmethod
    def _open_sound(cls, files: StoreFiles, settings: StoreSettings) -> "Database":
        """Open the files; what is damaged is set aside, and made anew."""
        try:
            database = cls._open(files, settings)
        except STORAGE_ERRORS as error:
            reason = " ".join(str(error).split())
            if not _is_damage(reason):
                raise StoreLost(f"the store in {files.folder} cannot be opened: {reason[:300]}") from error
        else:
            if not (reason := database.public.damage() or database.private.damage()):
                return database
            database.close()
        log.warning("the store in %s is damaged (%s): set aside, and built anew from the log", files.folder, reason)
        set_aside(files)
        return cls._open(files, settings)

    @classmethod
    def _open(cls, files: StoreFiles, settings: StoreSettings, *, are_copies: bool = False) -> "Database":
        most = settings.memory_limit_mib
        public = DatabaseFile(files.public, most, is_copy=are_copies)
        try:
            return cls(public, DatabaseFile(files.private, most, is_copy=are_copies))
        except BaseException:
            public.close()
            raise

    def _prepare(self, is_new: bool) -> None:
        """Make the tables of new files, and the views of every file."""
        with self.public.more_memory(), self.public.transaction():
            if is_new:
                self.public.connection.execute(schema.public_ddl())
            self.public.connection.execute(schema.views_sql())
        if is_new:
            with self.private.transaction():
                self.private.connection.execute(schema.private_ddl())
        for file in (self.public, self.private):
            # Neither a view nor a question has a reason to touch another file.
            file.connection.execute("SET enable_external_access = false; SET python_enable_replacements = false")


def _is_damage(reason: str) -> bool:
    """Whether DuckDB means the file itself, and not who holds it, what it was made with, or the disk."""
    told = reason.lower()
    others = ("conflicting lock", "set lock", "version number", "no space", "permission denied", "read-only", "too many open")
    return not any(words in told for words in others)


def set_aside(files: StoreFiles) -> None:
    for path in (files.public, files.private):
        path.with_name(f"{path.name}.wal").unlink(missing_ok=True)
        if path.exists():
            os.replace(path, path.with_suffix(".old.duckdb"))
