"""The two files of a store, open for writing, within a bound of memory.

DuckDB works through a column 2,048 values at a time, so a checkpoint may have to hold as many at once; everything else does
with little. So the limit is low, and raised to the setting's for a checkpoint; and checkpoints are made here and nowhere else,
because one that DuckDB makes by itself, and that runs out of memory, invalidates the database.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from rollstream.errors import UsageError
from rollstream.settings import StoreSettings
from rollstream.store import schema, snapshot
from rollstream.store.decoding import Row

log = logging.getLogger(__name__)

WORKING_MEMORY_MIB = 128
"""All that inserts and look-ups need. What DuckDB caches beyond it is of no use to a writer."""
CHECKPOINT_BYTES = 32 * 1024 * 1024
"""How much may be inserted until it is compressed: more takes memory, and time after a crash; less is compressed twice."""
# The log comes in one batch after another: a second thread costs memory and CPU time, and saves nothing.
_THREADS = 1
_NEVER = "1TB"
# A checkpoint compresses the last row group again, so small ones keep its cost flat. Neither option is remembered in the file.
_ATTACH = "ATTACH '{path}' AS {name} (ROW_GROUP_SIZE 2048, STORAGE_VERSION 'v1.5.0')"


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


class Database:
    """A connection to both files; the public one is the default. Create it with `Database.open`."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, most_mib: int) -> None:
        self.connection = connection
        self._most_mib = most_mib
        self._inserted = 0

    @classmethod
    def open(cls, files: StoreFiles, settings: StoreSettings) -> "Database":
        """Open the files, made anew if they are missing or of an older schema.

        Raises:
            UsageError: a newer rollstream made them.
        """
        # Arrow's own allocator keeps what a large batch took; the system's gives it back.
        pa.set_memory_pool(pa.system_memory_pool())
        connection = duckdb.connect(config={"threads": _THREADS, "temp_directory": str(files.folder / "spill")})
        connection.execute(f"SET checkpoint_threshold = '{_NEVER}'")
        database = cls(connection, settings.memory_limit_mib)
        with database.more_memory():
            _open_files(connection, files)
        return database

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.connection.begin()
        try:
            yield
        except BaseException:
            self.connection.rollback()
            raise
        self.connection.commit()

    def insert(self, rows: list[Row], columns: schema.Schema, statement: str, *parameters: object) -> None:
        """Run `statement`, to which `rows` are the table `batch`."""
        batch = schema.arrow_table(rows, columns)
        self._inserted += batch.nbytes
        self.connection.register("batch", batch)
        self.connection.execute(statement, parameters)
        self.connection.unregister("batch")

    def checkpoint_if_due(self) -> None:
        if self._inserted > CHECKPOINT_BYTES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Compress what was inserted, and bring both files up to date.

        Raises:
            UsageError: not within the setting's memory.
        """
        with self.more_memory():
            try:
                self.connection.execute("CHECKPOINT store; CHECKPOINT private")
            except (duckdb.OutOfMemoryException, duckdb.FatalException, duckdb.IOException) as error:
                if "memory" not in str(error).lower():
                    raise
                raise UsageError(
                    f"the store cannot compress its trajectories within {self._most_mib} MiB: raise store.memory_limit_mib"
                ) from error
        self._inserted = 0

    @contextmanager
    def more_memory(self) -> Iterator[None]:
        """As much as the setting allows, for what cannot be done with less."""
        self._limit(self._most_mib)
        try:
            yield
        finally:
            self._limit(min(WORKING_MEMORY_MIB, self._most_mib))

    def close(self) -> None:
        # DuckDB checkpoints once more as it closes.
        self._limit(self._most_mib)
        self.connection.close()

    def _limit(self, mib: int) -> None:
        try:
            self.connection.execute(f"SET memory_limit = '{mib}MiB'")
        except duckdb.OutOfMemoryException:
            log.debug("more than %d MiB are in use: the limit stays", mib)


def _open_files(connection: duckdb.DuckDBPyConnection, files: StoreFiles) -> None:
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
