"""From records to rows. Pure: a batch of records in, rows by table out, whatever the records hold.

No record raises. What is no event of its topic's kind and version becomes a row that says so, and its bytes go to the private
tables. No pydantic models here: this decodes every event of the system once more, and only picks columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import md5
from uuid import UUID

from rollstream.eventlog.reading import Record
from rollstream.store import json_text
from rollstream.store.columns import MAX_VALUE_BYTES, Scalar, as_utc, utc_of_ms
from rollstream.store.json_text import Document, Unreadable
from rollstream.store.tables import BY_KIND, DEAD_LETTERED, LONG_PAYLOADS, TASK_SUBMITTED, EventTable
from schemas.values import JsonObject, clean_text
from topics.catalogue import BY_NAME, CATALOGUE, TASKS_IN

Row = tuple[Scalar, ...]

READABLE: dict[str, int] = {event.__name__: event.SCHEMA_VERSION for topic in CATALOGUE for event in topic.events}
"""Kind -> the newest schema version whose columns we know how to pick."""


@dataclass(slots=True)
class Rows:
    """Rows to insert, by table, in the order of the tables' columns. Each event id occurs once in a table."""

    public: dict[str, list[Row]] = field(default_factory=dict)
    private: dict[str, list[Row]] = field(default_factory=dict)
    _seen: set[tuple[str, Scalar]] = field(default_factory=set)

    def add_event(self, table: EventTable, row: Row, long_payload: str = "") -> None:
        """Keep `row` unless its event id was here before: the first by offset counts."""
        identity = (table.name, row[0])
        if identity in self._seen:
            return
        self._seen.add(identity)
        self.add_public(table.name, row)
        for part, text in enumerate(_parts(long_payload)):
            self.add_public(LONG_PAYLOADS, (row[0], table.kind, part, text))

    def add_public(self, table: str, row: Row) -> None:
        self.public.setdefault(table, []).append(row)

    def add_private(self, table: str, row: Row) -> None:
        self.private.setdefault(table, []).append(row)


def decode(records: Iterable[Record]) -> Rows:
    """Rows of a batch whose partitions are each in offset order."""
    rows = Rows()
    for record in records:
        try:
            document = json_text.read(record.value)
            _add(rows, record, document)
        except Unreadable as reason:
            _add_dead(rows, record, str(reason))
    return rows


def _add(rows: Rows, record: Record, document: Document) -> None:
    kind = document.body.get("kind")
    topic = BY_NAME.get(record.topic)
    expected = [event.__name__ for event in topic.events] if topic else []
    if record.topic == TASKS_IN.name and kind not in expected:
        _add_bare_task(rows, record, document)
        return
    if not isinstance(kind, str):
        raise Unreadable(f"expected {' or '.join(expected) or 'an event'}, found JSON without a kind")
    table = BY_KIND.get(kind)
    version = _version(document.body)
    if table is None or kind not in expected or version > READABLE[kind]:
        _add_unknown(rows, record, document, kind, version)
        return
    _add_event(rows, record, document, table)


def _add_event(rows: Rows, record: Record, document: Document, table: EventTable) -> None:
    body = document.body
    own = table.pick(body)
    event_id = text if isinstance(text := body.get("event_id"), str) else ""
    missing = table.missing(own) or ("" if event_id else "event_id")
    if missing and table is TASK_SUBMITTED:
        _add_bare_task(rows, record, document)
        return
    if missing:
        raise Unreadable(f"a {table.kind} without {missing}")
    published = document.without(table.withheld) if table.withheld else document
    position = _position(record)
    occurred_at = as_utc(body.get("occurred_at")) or position[-1]
    caused_at = as_utc(body.get("caused_at")) or occurred_at
    head = (_uuid(event_id), _version(body), occurred_at, caused_at, document.escaped)
    if len(published.text) <= MAX_VALUE_BYTES:
        rows.add_event(table, (*head, *own, published.text, *position))
    else:
        rows.add_event(table, (*head, *own, None, *position), long_payload=published.text)
    if table is TASK_SUBMITTED:
        _keep_task_row(rows, record, document)
    elif table is DEAD_LETTERED:
        _keep_raw(rows, record, "dead letter")


def _add_bare_task(rows: Rows, record: Record, document: Document) -> None:
    """A task in another form than ours: which ids it gets is its environment's business, so its ids are NULL here."""
    position = _position(record)
    recorded_at = position[-1]
    event_id = _uuid(f"{record.topic}/{record.partition}/{record.offset}")
    own = (None,) * len(TASK_SUBMITTED.columns)
    rows.add_event(TASK_SUBMITTED, (event_id, None, recorded_at, recorded_at, document.escaped, *own, None, *position))
    _keep_task_row(rows, record, document)


def _keep_task_row(rows: Rows, record: Record, document: Document) -> None:
    ids = [value if isinstance(value := document.body.get(name), str) else None for name in ("run", "group")]
    for part, text in enumerate(_parts(document.text)):
        rows.add_private("task_rows", (record.topic, *ids, document.escaped, part, text, *_position(record)))


def _add_unknown(rows: Rows, record: Record, document: Document, kind: str, version: int) -> None:
    row = (record.topic, kind, version, *_size_and_ids(record), *_position(record))
    rows.add_public("unknown_events", row)
    _keep_raw(rows, record, "unknown event")


def _add_dead(rows: Rows, record: Record, reason: str) -> None:
    rows.add_public("dead_rows", (record.topic, reason, *_size_and_ids(record), *_position(record)))
    _keep_raw(rows, record, "dead row")


def _keep_raw(rows: Rows, record: Record, why: str) -> None:
    key, value = (part[:MAX_VALUE_BYTES] if part is not None else None for part in (record.key, record.value))
    rows.add_private("raw_records", (record.topic, why, key, value, *_position(record)))


def _parts(text: str) -> list[str]:
    return [text[start : start + MAX_VALUE_BYTES] for start in range(0, len(text), MAX_VALUE_BYTES)]


def _position(record: Record) -> tuple[int, int, Scalar]:
    return record.partition, record.offset, utc_of_ms(record.timestamp_ms)


def _size_and_ids(record: Record) -> tuple[int, str | None, str | None]:
    headers = record.header_map()
    return len(record.value or b""), headers.get("run_id"), headers.get("rollout_id")


def _version(body: JsonObject) -> int:
    version = body.get("schema_version")
    # In Python, true and false are integers.
    return version if isinstance(version, int) and not isinstance(version, bool) and 0 <= version < 2**31 else 1


def _uuid(event_id: str) -> bytes:
    """The id as 16 bytes; ids of other writers that are no UUIDs get one by hash."""
    try:
        return UUID(event_id).bytes
    except ValueError:
        return md5(clean_text(event_id).encode(), usedforsecurity=False).digest()
