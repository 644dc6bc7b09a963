"""How one column is picked out of an event's JSON.

A value of the wrong type is NULL, never an error: other writers' events, and newer ones, are stored for what they have.
Only a `required` column refuses the record.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from rollstream.store.json_text import dump
from schemas.values import truncate_text

Scalar = str | int | float | bool | datetime | bytes | None
Convert = Callable[[object], Scalar]
SqlType = Literal["VARCHAR", "BIGINT", "INTEGER", "DOUBLE", "BOOLEAN", "TIMESTAMP", "UUID", "JSON", "PAYLOAD", "BLOB"]
"""JSON and PAYLOAD are VARCHARs that hold strict JSON; PAYLOAD is compressed with zstd, and so is BLOB."""

MAX_VALUE_BYTES = 32 * 1024
"""Of one value in a table. DuckDB holds 2,048 values of a column at once, so their length is what bounds its memory."""
MAX_NAME_BYTES = 4 * 1024
"""Of an id or a name; ours have 512 characters at most."""
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


def text(name: str, *path: str, required: bool = False) -> Column:
    return Column(name, "VARCHAR", path, _as_text, required)


def long_text(name: str, *path: str) -> Column:
    """A text of some length, compressed; the payload has it whole."""
    return Column(name, "PAYLOAD", path, _as_long_text)


def integer(name: str, *path: str) -> Column:
    return Column(name, "BIGINT", path, _as_integer)


def ordinal(name: str, *path: str) -> Column:
    """An integer that is 0 when the event leaves it out."""
    return Column(name, "BIGINT", path, _as_ordinal)


def number(name: str, *path: str) -> Column:
    return Column(name, "DOUBLE", path, _as_number)


def flag(name: str, *path: str) -> Column:
    return Column(name, "BOOLEAN", path, _as_flag)


def moment(name: str, *path: str) -> Column:
    """A time with its offset, kept in UTC; without one, it is taken to be UTC."""
    return Column(name, "TIMESTAMP", path, as_utc)


def json(name: str, *path: str) -> Column:
    """An object or a list, as JSON."""
    return Column(name, "JSON", path, _as_json)


def length(name: str, *path: str) -> Column:
    """How long a list is."""
    return Column(name, "BIGINT", path, _as_length)


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
    return dump(value) if isinstance(value, dict | list) else None


def _as_length(value: object) -> int | None:
    return len(value) if isinstance(value, list) else None
