"""From the bytes of a record to a JSON object and a text that every reader understands alike.

JSON that parses is not yet JSON that two parsers agree on: duplicate keys, lone surrogates, NaN, 1e400 and integers beyond
64 bits are each read differently, refused or rounded somewhere. Those are spelled out here once (see `schemas.values.clean`)
and marked, so that neither Arrow, DuckDB nor a later `->>` ever meets them.
"""

import json
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import orjson

from schemas.values import JsonObject, clean


class Unreadable(ValueError):
    """No JSON object can be made of the bytes. The message is one phrase that quotes nothing of them."""


class Document(NamedTuple):
    """One JSON object."""

    body: JsonObject
    raw: bytes
    """Strict JSON in valid UTF-8, equal to `body`: the record's own bytes, where nothing is wrong with them."""
    escaped: bool
    """Whether something had to be spelled out to fit; the log has the original."""

    def without(self, fields: frozenset[str]) -> bytes:
        """The same object, less its top-level `fields`."""
        if fields.isdisjoint(self.body):
            return self.raw
        return dump({name: value for name, value in self.body.items() if name not in fields})


def read(raw: bytes | None) -> Document:
    """Read one record value.

    Raises:
        Unreadable: no value, not JSON, not an object, or nested too deeply.
    """
    if raw is None:
        raise Unreadable("a record without a value")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _read_tolerantly(raw)
    # Equal bytes prove that nothing was dropped or rounded; a different spacing alone is worth the second look.
    return Document(body, raw, False) if dump(_object(body)) == raw else _read_tolerantly(raw)


def read_all(raws: Sequence[bytes | None]) -> list[Document | Unreadable]:
    """`read` of each value; what it would raise stands in the place of the document."""
    try:
        # The same, in loops that are in C.
        bodies = list(map(orjson.loads, raws))  # type: ignore[arg-type]
        if _OBJECT.issuperset(map(type, bodies)) and list(map(orjson.dumps, bodies)) == raws:
            return list(map(Document, bodies, raws, repeat(False)))
    except (orjson.JSONDecodeError, TypeError):
        pass
    return list(map(_read_or_reason, raws))


def _read_or_reason(raw: bytes | None) -> Document | Unreadable:
    try:
        return read(raw)
    except Unreadable as reason:
        return reason


_OBJECT = frozenset({dict})


def dump(value: object) -> bytes:
    """Compact JSON.

    Raises:
        Unreadable: nested too deeply for most readers.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        raise Unreadable("JSON nested more than 254 deep") from None


def _read_tolerantly(raw: bytes) -> Document:
    try:
        parsed = json.loads(raw.decode("utf-8", "surrogateescape"))
        body, escaped = clean(parsed)
    except RecursionError:
        raise Unreadable("JSON nested more than 254 deep") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"{len(raw)} bytes that are not JSON ({error.msg} at character {error.pos})") from None
    except ValueError:
        raise Unreadable("a JSON number of more than 4,300 digits") from None
    return Document(_object(body), dump(body), escaped)


def _object(value: object) -> JsonObject:
    if not isinstance(value, dict):
        found = "null" if value is None else type(value).__name__
        raise Unreadable(f"a JSON {found} where an object was expected")
    return value
