"""An answer as text for another program: JSON, CSV, Markdown. Nothing is cut."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal

from rollstream.store.reader import Answer


def as_json(answer: Answer) -> Iterator[str]:
    """A list of objects, one a line; columns of type JSON as what they hold."""
    parse = [type_ == "JSON" for type_ in answer.types]
    yield "["
    before = "\n"
    for row in answer.rows:
        values = (_parsed(value) if is_json else plain(value) for value, is_json in zip(row, parse, strict=True))
        yield f"{before}{json.dumps(dict(zip(answer.columns, values, strict=True)), ensure_ascii=False, allow_nan=False)}"
        before = ",\n"
    yield "\n]\n"


def as_csv(answer: Answer) -> Iterator[str]:
    """RFC 4180 with a header; NULL is an empty field."""
    yield _csv_line(answer.columns)
    for row in answer.rows:
        yield _csv_line(["" if value is None else cell(value) for value in row])


def as_markdown(answer: Answer) -> Iterator[str]:
    yield _markdown_line(answer.columns)
    yield _markdown_line(["---"] * len(answer.columns))
    for row in answer.rows:
        yield _markdown_line(["" if value is None else cell(value) for value in row])


FORMATS: dict[str, Callable[[Answer], Iterator[str]]] = {"json": as_json, "csv": as_csv, "markdown": as_markdown}


def plain(value: object) -> object:
    """A value of DuckDB's as one that JSON has."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def cell(value: object) -> str:
    """A value as one text."""
    simple = plain(value)
    if isinstance(simple, str):
        return simple
    return json.dumps(simple, ensure_ascii=False)


# Of the control characters, a text keeps line breaks and tabs.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """`text` with control characters spelled out: what a model wrote must not steer a terminal."""
    return text.translate(_CONTROLS)


def _parsed(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else None


def _csv_line(values: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def _markdown_line(values: list[str]) -> str:
    safe = (value.replace("|", "\\|").replace("\n", "<br>") for value in values)
    return f"| {' | '.join(safe)} |\n"
