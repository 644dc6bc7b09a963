"""The files of an export: shards that no group is cut by, a manifest, and a directory that appears when all of it is there.

The names are those that `datasets.load_dataset(DIRECTORY)` looks for: `data/SPLIT-00000-of-00002.parquet`.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import UsageError
from rollstream.store.exports.request import FileFormat
from rollstream.store.exports.rows import Row

MANIFEST = "manifest.json"
MAX_SHARD_BYTES = 256 * 1024 * 1024
"""Of rows as JSON; a group that is longer has a file of its own."""
_ROW_GROUP_BYTES = 16 * 1024 * 1024
"""Of rows as JSON, held until they are written together."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file, as the manifest has it."""

    path: str
    split: str
    rows: int
    groups: int
    bytes: int
    sha256: str


class ShardWriter(Protocol):
    """One open file."""

    def write(self, rows: list[Row]) -> None: ...

    def close(self) -> None: ...


class ParquetShard:
    """Rows as Parquet with the types of `schema`."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")

    def write(self, rows: list[Row]) -> None:
        self._writer.write_table(pa.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class JsonlShard:
    """Rows as JSON, one a line."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")

    def write(self, rows: list[Row]) -> None:
        self._file.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)

    def close(self) -> None:
        self._file.close()


@dataclass(slots=True)
class _Shard:
    """What is known of a file while it is written."""

    path: Path
    writer: ShardWriter
    rows: int = 0
    groups: int = 0
    size: int = 0
    held: list[Row] = field(default_factory=list)
    held_bytes: int = 0

    def flush(self) -> None:
        if self.held:
            self.writer.write(self.held)
        self.held, self.held_bytes = [], 0


class SplitFiles:
    """The files of one split, in order."""

    def __init__(
        self, folder: Path, split: str, file_format: FileFormat, schema: pa.Schema | None, max_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self._folder, self._split, self._format, self._schema = folder, split, file_format, schema
        self._max_bytes = max_bytes
        self._done: list[_Shard] = []
        self._open: _Shard | None = None

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self._shards())

    def add_group(self, rows: list[Row]) -> None:
        """Write the rows of one group, all into one file."""
        # Measured as JSON whatever the format, so that both are cut alike.
        size = sum(len(orjson.dumps(row)) for row in rows)
        if self._open and self._open.size and self._open.size + size > self._max_bytes:
            self._close_shard()
        shard = self._open = self._open or self._new_shard()
        shard.held += rows
        shard.held_bytes += size
        shard.size += size
        shard.rows += len(rows)
        shard.groups += 1
        if shard.held_bytes >= _ROW_GROUP_BYTES:
            shard.flush()

    def finish(self) -> list[FileInfo]:
        """Close all files, and give them their names."""
        self._close_shard()
        return [self._named(number, shard) for number, shard in enumerate(self._done)]

    def close(self) -> None:
        """Close what is open, whatever state it is in."""
        if self._open:
            self._open.writer.close()
            self._open = None

    def _shards(self) -> list[_Shard]:
        return self._done + ([self._open] if self._open else [])

    def _new_shard(self) -> _Shard:
        path = self._folder / f"{self._split}-{len(self._done)}.tmp"
        writer = JsonlShard(path) if self._format == "jsonl" or self._schema is None else ParquetShard(path, self._schema)
        return _Shard(path, writer)

    def _close_shard(self) -> None:
        if self._open:
            self._open.flush()
            self._open.writer.close()
            self._done.append(self._open)
            self._open = None

    def _named(self, number: int, shard: _Shard) -> FileInfo:
        path = self._folder / f"{self._split}-{number:05d}-of-{len(self._done):05d}.{self._format}"
        shard.path.rename(path)
        with path.open("rb") as file:
            digest = _digest(file)
        return FileInfo(f"{self._folder.name}/{path.name}", self._split, shard.rows, shard.groups, path.stat().st_size, digest)


def _digest(file: BinaryIO) -> str:
    digest = sha256()
    while block := file.read(1024 * 1024):
        digest.update(block)
    return digest.hexdigest()


def check_target(target: Path, *, overwrite: bool) -> None:
    """See that an export may be written to `target`.

    Raises:
        UsageError: something stands there that may not be replaced.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise UsageError(f"--to expects a directory, found something else at {target}")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{target} is not empty: name another directory, or --overwrite the export that it holds")
    if not (target / MANIFEST).is_file():
        raise UsageError(f"--overwrite replaces exports only, and {target} has no {MANIFEST}: name another directory")


@contextmanager
def appearing(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory to write in, which becomes `target` at the end; on a failure nothing of it is left.

    Raises:
        UsageError: something stands at `target` that may not be replaced, or it cannot be written there.
    """
    target = target.absolute()
    check_target(target, overwrite=overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(f"--to {target}: {error.strerror}") from None
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        _replace(target, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _replace(target: Path, folder: Path) -> None:
    try:
        # Replaces an empty directory too.
        os.rename(folder, target)
    except OSError:
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        os.rename(target, aside)
        os.rename(folder, target)
        shutil.rmtree(aside)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
