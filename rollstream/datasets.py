"""Task files, read row by row: JSONL, JSON and Parquet, the first two also gzipped.

A line that is no row becomes a `BadLine` and the rest goes on; only a file that cannot be read at all is an error. JSONL and
Parquet are never held in memory as a whole. Numbers and text that JSON cannot carry survive escaped, as `schemas.values`
does everywhere.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, Literal, cast

import orjson

from rollstream.errors import UsageError
from schemas.values import JsonObject, clean

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_JSON_BYTES = 256 * 1024 * 1024
"""Of a JSON file, which cannot be read row by row."""
PARQUET_BATCH_ROWS = 256
SNIFFED_BYTES = 64 * 1024

Format = Literal["jsonl", "json", "parquet"]
SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".pq": "parquet"}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    index: int
    """From 0, among everything that stands where a row should be."""
    line: int
    """From 1; for JSON and Parquet, which have no lines, the number of the row."""
    content: JsonObject
    escaped: bool = False
    """True when something had to be escaped: NaN, an infinity, a huge integer or a lone surrogate."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """What stands where a row should be and is none."""

    index: int
    line: int
    reason: str
    """One sentence: what was expected, what was found."""


_JSON_NAMES = {str: "a string", list: "a list", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
# orjson silently reads an integer beyond 64 bits as a float; the standard library does not.
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


class _NotARow(ValueError):
    """The message is the `reason` of a BadLine."""


def read_rows(path: Path) -> Iterator[Row | BadLine]:
    """All rows of a task file, in order.

    Raises:
        UsageError: there is no such file, it is empty, or it is none of the formats.
    """
    _require_file(path)
    form = format_of(path)
    if form == "parquet":
        return _of_parquet(path)
    return _of_jsonl(path) if form == "jsonl" else _of_json(path)


def format_of(path: Path) -> Format:
    """By suffix, and by content where the suffix says nothing or cannot be true.

    Raises:
        UsageError: the file holds no row.
    """
    with _opened(path) as file:
        head = _until_content(file)
    if head.startswith(b"PAR1"):
        return "parquet"
    if not head:
        raise UsageError(f"{path} is empty: expected one JSON object a line, a JSON list of objects, or Parquet")
    named = SUFFIXES.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix)
    if named == "parquet":
        raise UsageError(f"{path} is named Parquet, but does not start with the bytes PAR1")
    if named is not None:
        # Many a `.json` is JSONL; only a second value after the first line tells them apart.
        return "jsonl" if named == "json" and _is_jsonl(head) else named
    first, newline, rest = head.partition(b"\n")
    goes_on = bool(newline and rest.strip()) and not first.rstrip().endswith(b"}")
    return "json" if head.startswith(b"[") or (head.startswith(b"{") and goes_on) else "jsonl"


def _require_file(path: Path) -> None:
    if path.is_file():
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder: expected a task file (JSONL, JSON or Parquet)")
    siblings = [entry.name for entry in path.parent.iterdir() if entry.is_file()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    suffix = f"; did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""
    raise UsageError(f"task file {path} does not exist{suffix}")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unzipped.

    Raises:
        UsageError: it cannot be opened, or is a damaged gzip file.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                yield raw
                return
            with gzip.open(raw) as unzipped:
                yield cast("BinaryIO", unzipped)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


def _until_content(file: BinaryIO) -> bytes:
    """The first piece of the file that is not blank; empty if there is none."""
    while piece := file.read(SNIFFED_BYTES):
        if head := piece.removeprefix(b"\xef\xbb\xbf").lstrip():
            return head
    return b""


def _is_jsonl(head: bytes) -> bool:
    """Whether the first line is a whole object and another line follows."""
    first, _, rest = head.partition(b"\n")
    if not first.rstrip().endswith(b"}") or not rest.strip():
        return False
    try:
        return isinstance(_parse(first), dict)
    except _NotARow:
        return False


def _of_jsonl(path: Path) -> Iterator[Row | BadLine]:
    index = 0
    with _opened(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            yield _row_of_line(line, index, number)
            index += 1


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """All lines, line ends included; what a line has beyond the limit is skipped, not kept in memory."""
    while line := file.readline(MAX_LINE_BYTES + len(b"\r\n")):
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE_BYTES)
        yield line


def _row_of_line(line: bytes, index: int, number: int) -> Row | BadLine:
    content = line.rstrip(b"\r\n")
    if len(content) > MAX_LINE_BYTES:
        return BadLine(index, number, f"expected at most {MAX_LINE_BYTES // 1024**2} MiB on a line, found more")
    try:
        return _as_row(_parse(content), index, number)
    except _NotARow as problem:
        return BadLine(index, number, str(problem))


def _parse(raw: bytes) -> object:
    """Parse JSON as people write it: NaN, infinities and lone surrogates are taken and cleaned later.

    Raises:
        _NotARow: it is not JSON, or not UTF-8.
    """
    if not _LONG_NUMBER.search(raw):
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise _NotARow(f"expected UTF-8, found byte 0x{raw[error.start]:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise _NotARow(f"expected JSON, found none: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _NotARow("expected JSON, found it nested too deeply") from None
    except ValueError as error:
        raise _NotARow(f"expected JSON, found a number that is too long: {error}") from None


def _as_row(value: object, index: int, line: int) -> Row:
    if not isinstance(value, dict):
        raise _NotARow(f"expected a JSON object, found {_JSON_NAMES.get(type(value), type(value).__name__)}")
    try:
        content, escaped = clean(value)
    except RecursionError:
        raise _NotARow("expected JSON, found it nested too deeply") from None
    return Row(index, line, content, escaped)


def _of_json(path: Path) -> Iterator[Row | BadLine]:
    with _opened(path) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        limit = MAX_JSON_BYTES // 1024**2
        raise UsageError(f"{path} is JSON of more than {limit} MiB, which is read at once: make it JSONL, one object a line")
    try:
        found = _parse(raw.removeprefix(b"\xef\xbb\xbf"))
    except _NotARow as problem:
        raise UsageError(f"{path}: {problem}") from None
    if found == []:
        raise UsageError(f"{path} is empty: a JSON list without objects")
    yield from _of_values(found if isinstance(found, list) else [found])


def _of_parquet(path: Path) -> Iterator[Row | BadLine]:
    # Imported here because it takes as long as all the rest of a command, and most task files are JSONL.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if file.metadata.num_rows == 0:
                raise UsageError(f"{path} is empty: Parquet without rows")
            start = 0
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                yield from _of_values([_json_value(row) for row in batch.to_pylist()], start)
                start += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path} is not Parquet that can be read: {error}") from None


def _json_value(value: object) -> object:
    """A Parquet value as JSON. A null field of a struct is left out: Parquet has no other way to leave one out."""
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _of_values(values: list[object], start: int = 0) -> Iterator[Row | BadLine]:
    for index, value in enumerate(values, start):
        try:
            yield _as_row(value, index, index + 1)
        except _NotARow as problem:
            yield BadLine(index, index + 1, str(problem))
