"""From the bytes of a record to a JSON object and a text that every reader understands alike.

JSON that parses is not yet JSON that two parsers agree on: duplicate keys, lone surrogates, NaN, 1e400 and integers beyond
64 bits are each read differently, refused or rounded somewhere. Those are spelled out here once (see `schemas.values.clean`)
and marked, so that neither Arrow, DuckDB nor a later `->>` ever meets them.
"""

import json
from dataclasses import dataclass

import orjson

from schemas.values import JsonObject, clean


class Unreadable(ValueError):
    """No JSON object can be made of the bytes. The message is one phrase that quotes nothing of them."""


@dataclass(frozen=True, slots=True)
class Document:
    """One JSON object."""

    body: JsonObject
    text: str
    """Strict JSON in valid UTF-8, equal to `body`."""
    escaped: bool
    """Whether something had to be spelled out to fit; the log has the original."""

    def without(self, fields: frozenset[str]) -> "Document":
        """The same object, less its top-level `fields`."""
        kept = {name: value for name, value in self.body.items() if name not in fields}
        return Document(kept, dump(kept), self.escaped)


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
    text = dump(_object(body))
    # Equal bytes prove that nothing was dropped or rounded; a different spacing alone is worth the second look.
    return Document(body, text, False) if text.encode() == raw else _read_tolerantly(raw)


def dump(value: object) -> str:
    """Compact JSON text.

    Raises:
        Unreadable: nested too deeply for most readers.
    """
    try:
        return orjson.dumps(value).decode()
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
