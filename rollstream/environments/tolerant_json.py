"""JSON as people write it: NaN, lone surrogates, huge integers and a byte order mark survive, escaped.

orjson reads what is well-formed, ten times faster; the standard library reads what orjson refuses, and what orjson would
silently change: an integer beyond 64 bits becomes a float there.
"""

import json
import re
from collections.abc import Iterable

import orjson

from schemas.values import JsonObject, clean

MAX_DEPTH = 100
"""Of nested lists and objects. The event contracts are read back by a parser that stops at about 200."""
_LONG_INTEGER = re.compile(rb"[0-9]{19}")
_JSON_NAMES = {str: "a JSON string", list: "a JSON list", bool: "a JSON boolean", int: "a JSON number", float: "a JSON number"}


class NotAnObject(ValueError):
    """The bytes are no JSON object. The message is what was found."""


def parse_object(raw: bytes | None) -> JsonObject:
    """The JSON object in `raw`, fit for the log.

    Raises:
        NotAnObject: no value, no UTF-8 (with the position), no JSON, another JSON value, or nested too deeply.
    """
    if raw is None:
        raise NotAnObject("a record without a value")
    try:
        try:
            body = orjson.loads(raw) if not _LONG_INTEGER.search(raw) else _parse_slowly(raw)
        except orjson.JSONDecodeError:
            body = _parse_slowly(raw)
        if not isinstance(body, dict):
            raise NotAnObject(_JSON_NAMES.get(type(body), "JSON null"))
        cleaned: JsonObject = clean(body)[0]
    except RecursionError:
        raise NotAnObject(f"JSON nested deeper than {MAX_DEPTH} levels") from None
    return cleaned


def require_shallow(value: object) -> None:
    """Refuse what the event contracts could not be read back from.

    Raises:
        NotAnObject: lists and objects are nested deeper than `MAX_DEPTH`.
    """
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise NotAnObject(f"JSON nested deeper than {MAX_DEPTH} levels")


def _inside(container: object) -> Iterable[object]:
    items: Iterable[object] = ()
    if isinstance(container, dict):
        items = container.values()
    elif isinstance(container, list):
        items = container
    return [item for item in items if isinstance(item, (dict, list))]


def _parse_slowly(raw: bytes) -> object:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec counts from after the mark.
        start = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise NotAnObject(f"byte 0x{raw[start]:02x} at position {start}, which is not UTF-8") from None
    try:
        return json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise NotAnObject(f"{len(raw)} bytes that are not JSON: {error}") from None


def _integer(digits: str) -> int | str:
    # Python refuses to read thousands of digits; what is beyond 64 bits ends as text anyway.
    return int(digits) if len(digits) <= 20 else digits
