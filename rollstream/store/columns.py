"""How one column is picked out of many events' JSON.

A value of the wrong type is NULL, never an error: other writers' events, and newer ones, are stored for what they have.
Only a `required` column refuses the record. A column whose values all have the right type is converted as a whole, which is
most of what makes projection fast; otherwise each value is looked at alone, with the same result for every good one.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Literal, cast

import pyarrow as pa
import pyarrow.compute as pc

from rollstream.store.json_text import dump
from schemas.values import truncate_text

Row = tuple["Scalar", ...]
Scalar = str | int | float | bool | datetime | bytes | None
Convert = Callable[[object], Scalar]
SqlType = Literal["VARCHAR", "BIGINT", "INTEGER", "DOUBLE", "BOOLEAN", "TIMESTAMP", "UUID", "JSON", "PAYLOAD", "BLOB"]
"""JSON and PAYLOAD are VARCHARs that hold strict JSON; PAYLOAD is compressed with zstd, and so is BLOB."""

MAX_VALUE_BYTES = 32 * 1024
"""Of one value in a table. DuckDB holds 2,048 values of a column at once, so their length is what bounds its memory."""
MAX_NAME_BYTES = 4 * 1024
"""Of an id or a name; ours have 512 characters at most."""
PythonTypes = frozenset[type]
EPOCH = datetime(1970, 1, 1)
"""TIMESTAMP columns hold UTC, without saying so."""
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of an event table: where its value stands in the event, and what is made of it."""

    name: str
    type: SqlType
    path: tuple[str, ...]
    convert: Convert
    required: bool = False
    plain: PythonTypes = frozenset()
    """Types of values that Arrow converts as `convert` does. Empty where `convert` does more than that."""
    max_bytes: int = 0
    """Beyond which `convert` cuts a text."""
    absent: int | None = None
    """What `convert` makes of a missing value."""

    def array(self, values: Sequence[object]) -> pa.Array:
        """`values`, as found, as this column."""
        if self.plain and self.plain.issuperset(set(map(type, values)) - _NULL):
            try:
                return self._converted(values)
            except (pa.ArrowInvalid, OverflowError, _TooLong):
                pass
        return pa.array(list(map(self.convert, values)), ARROW_TYPES[self.type])

    def _converted(self, values: Sequence[object]) -> pa.Array:
        if self.type == "TIMESTAMP":
            # What Arrow reads as a time with an offset is less than what Python reads, and never something else.
            return pa.array(values, pa.string()).cast(_UTC).cast(ARROW_TYPES["TIMESTAMP"])
        made = pa.array(values, ARROW_TYPES[self.type])
        if self.max_bytes and (pc.max(pc.binary_length(made)).as_py() or 0) > self.max_bytes:
            raise _TooLong
        return made if self.absent is None else made.fill_null(self.absent)


class _TooLong(ValueError):
    pass


_NULL = frozenset({type(None)})
_UTC = pa.timestamp("us", "UTC")
ARROW_TYPES: dict[SqlType, pa.DataType] = {
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


def text(name: str, *path: str, required: bool = False) -> Column:
    return Column(name, "VARCHAR", path, _as_text, required, frozenset({str}), MAX_NAME_BYTES)


def long_text(name: str, *path: str) -> Column:
    """A text of some length, compressed; the payload has it whole."""
    return Column(name, "PAYLOAD", path, _as_long_text, False, frozenset({str}), MAX_VALUE_BYTES)


def integer(name: str, *path: str) -> Column:
    return Column(name, "BIGINT", path, _as_integer, False, frozenset({int}))


def ordinal(name: str, *path: str) -> Column:
    """An integer that is 0 when the event leaves it out."""
    return Column(name, "BIGINT", path, _as_ordinal, False, frozenset({int}), absent=0)


def number(name: str, *path: str) -> Column:
    return Column(name, "DOUBLE", path, _as_number, False, frozenset({int, float}))


def flag(name: str, *path: str) -> Column:
    return Column(name, "BOOLEAN", path, _as_flag, False, frozenset({bool}))


def moment(name: str, *path: str) -> Column:
    """A time with its offset, kept in UTC; without one, it is taken to be UTC."""
    return Column(name, "TIMESTAMP", path, as_utc, False, frozenset({str}))


def json(name: str, *path: str) -> Column:
    """An object or a list, as JSON."""
    return Column(name, "JSON", path, _as_json)


def length(name: str, *path: str) -> Column:
    """How long a list is."""
    return Column(name, "BIGINT", path, _as_length)


def arrow_array(values: Sequence[Scalar], type_: SqlType) -> pa.Array:
    """Values of a column's own type, as DuckDB can read them without copying."""
    if type_ == "UUID":
        return pa.ExtensionArray.from_storage(ARROW_TYPES[type_], pa.array(values, pa.binary(16)))
    return pa.array(values, ARROW_TYPES[type_])


def payload_array(values: Sequence[bytes | None]) -> pa.Array:
    """Texts in valid UTF-8 as a PAYLOAD column, in memory that is asked for once: one that grows is moved again and again."""
    if None in values:
        return pa.array(values, ARROW_TYPES["PAYLOAD"])
    texts = cast("Sequence[bytes]", values)
    ends = array("q", accumulate(map(len, texts), initial=0))
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(texts)))


def as_utc(value: object) -> datetime | None:
    """An ISO 8601 time as naive UTC."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
        if parsed.tzinfo is not None and parsed.tzinfo is not UTC:
            parsed = parsed.astimezone(UTC)
        return parsed.replace(tzinfo=None)
    except (ValueError, OverflowError):
        return None


def utc_of_ms(milliseconds: int) -> datetime:
    """A record's own time as naive UTC; the epoch when it is out of range."""
    try:
        return EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return EPOCH


def utc_of_all_ms(milliseconds: Sequence[int]) -> pa.Array:
    """Records' own times as a TIMESTAMP column."""
    if _PYTHON_MS.start <= min(milliseconds) and max(milliseconds) < _PYTHON_MS.stop:
        return pa.array(milliseconds, pa.timestamp("ms")).cast(ARROW_TYPES["TIMESTAMP"])
    return pa.array(list(map(utc_of_ms, milliseconds)), ARROW_TYPES["TIMESTAMP"])


_PYTHON_MS = range(10**14)
"""Within what every clock of a broker says, and what Python can say."""


def _as_text(value: object) -> str | None:
    return truncate_text(value, MAX_NAME_BYTES) if isinstance(value, str) else None


def _as_long_text(value: object) -> str | None:
    return truncate_text(value, MAX_VALUE_BYTES) if isinstance(value, str) else None


def _as_integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value in _INT64 else None


def _as_ordinal(value: object) -> int:
    return _as_integer(value) or 0


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _as_flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_json(value: object) -> str | None:
    return dump(value).decode() if isinstance(value, dict | list) else None


def _as_length(value: object) -> int | None:
    return len(value) if isinstance(value, list) else None
