"""From records to rows. Pure: a batch of records in, rows by table out, whatever the records hold.

No record raises. What is no event of its topic's kind and version becomes a row that says so, and its bytes go to the private
tables. No pydantic models here: this decodes every event of the system once more, and only picks columns.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, itemgetter
from typing import NamedTuple, cast

from rollstream.eventlog.reading import Record
from rollstream.store import contamination, json_text
from rollstream.store.columns import MAX_NAME_BYTES, MAX_VALUE_BYTES, Row, utc_of_ms
from rollstream.store.contamination import Prompt
from rollstream.store.event_columns import AGENT_STEPPED, DEAD_LETTERED, SESSION_READY, TASK_SUBMITTED
from rollstream.store.event_rows import EventRows, Events, Rows, uuid_of, uuids_of
from rollstream.store.event_table import EventTable
from rollstream.store.json_text import Document, Unreadable
from rollstream.store.tables import BY_KIND, DUPLICATES, GRADING_TEXTS, LONG_PAYLOADS
from schemas.values import JsonObject
from topics.catalogue import BY_NAME, CATALOGUE, TASKS_IN

READABLE: dict[str, int] = {event.__name__: event.SCHEMA_VERSION for topic in CATALOGUE for event in topic.events}
"""Kind -> the newest schema version whose columns we know how to pick."""
_KNOWN: dict[str, dict[str, EventTable]] = {
    topic.name: {event.__name__: BY_KIND[event.__name__] for event in topic.events if event.__name__ in BY_KIND}
    for topic in CATALOGUE
}


AT_ONCE = 64
"""How many records are parsed, and picked from, together: enough for loops in C, few enough for the processor's caches."""


def decode(records: Iterable[Record], *, keep_repeated: bool = False) -> Rows:
    """Rows of a batch whose partitions are each in offset order.

    Args:
        keep_repeated: leave it to the caller which of several records of one event is the first.
    """
    rows = Rows(keep_repeated)
    by_topic: dict[str, list[Record]] = {}
    for record in records:
        by_topic.setdefault(record.topic, []).append(record)
    with _no_search_for_cycles():
        for of_topic in by_topic.values():
            for start in range(0, len(of_topic), AT_ONCE):
                _add(rows, of_topic[start : start + AT_ONCE])
    return rows


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Parsed JSON refers to itself nowhere, and there is much of it: looking for cycles in it costs a fifth of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _add(rows: Rows, records: list[Record]) -> None:
    """Add some records of one topic."""
    documents = json_text.read_all([record.value for record in records])
    if alike := _alike(records[0].topic, documents):
        _add_known(rows, alike.table, records, alike.documents, alike.versions)
        return
    by_table: dict[str, tuple[EventTable, list[Record], list[Document], list[int | None]]] = {}
    known = _KNOWN.get(records[0].topic, {})
    for record, document in zip(records, documents, strict=True):
        if isinstance(document, Unreadable):
            _add_dead(rows, record, str(document))
            continue
        kind = document.body.get("kind")
        version = _version(document.body)
        if not isinstance(kind, str) or kind not in known or version > READABLE[kind]:
            _add_other(rows, record, document, version)
            continue
        table = known[kind]
        of_table = by_table.get(table.name)
        if of_table is None:
            of_table = by_table[table.name] = (table, [], [], [])
        of_table[1].append(record)
        of_table[2].append(document)
        of_table[3].append(version)
    for table, found, readable, versions in by_table.values():
        _add_known(rows, table, found, readable, versions)


class _Alike(NamedTuple):
    """Events of one kind, and of versions whose columns we know how to pick."""

    table: EventTable
    documents: list[Document]
    versions: list[int]


def _alike(topic: str, documents: Sequence[Document | Unreadable]) -> _Alike | None:
    """Almost all there is: found by loops in C, where looking at one after the other costs a tenth of the whole time."""
    if not _DOCUMENT.issuperset(map(type, documents)):
        return None
    readable = cast("list[Document]", documents)
    bodies = list(map(_BODY, readable))
    try:
        versions = list(map(_VERSION, bodies))
        (kind,) = set(map(_KIND, bodies))
    except (KeyError, TypeError, ValueError):
        return None
    table = _KNOWN.get(topic, {}).get(kind)
    if table is None or not _INT.issuperset(map(type, versions)) or min(versions) < 0 or max(versions) > READABLE[kind]:
        return None
    return _Alike(table, readable, versions)


_DOCUMENT = frozenset({Document})
_INT = frozenset({int})
_BODY = attrgetter("body")
_KIND = itemgetter("kind")
_VERSION = itemgetter("schema_version")
_ID = itemgetter("event_id")


def _add_known(
    rows: Rows, table: EventTable, records: list[Record], documents: list[Document], versions: Sequence[int | None]
) -> None:
    """Add events of known kinds and versions; one that lacks what every one of its kind has becomes something else."""
    bodies = [document.body for document in documents]
    picked = table.pick(bodies)
    missing = table.missing(picked)
    for index in _without_id(bodies):
        missing.setdefault(index, "event_id")
    events = Events(records, documents, versions, picked)
    if missing:
        for index, what in missing.items():
            _add_incomplete(rows, table, records[index], documents[index], what)
        events = events.only([index for index in range(len(records)) if index not in missing])
    if events.records:
        _keep(rows, rows.events_of(table, records[0].topic), events)


def _keep(rows: Rows, rows_of_table: EventRows, events: Events) -> None:
    """Keep events that are complete, and for each one that was there before a row that says that it repeats another."""
    table = rows_of_table.table
    _keep_beside(rows, table, events)
    ids = uuids_of(events)
    kept = rows_of_table.new(ids)
    if len(kept) < len(ids):
        for index in sorted(set(range(len(ids))).difference(kept)):
            record, run = events.records[index], _run(events.documents[index])
            rows.add_public(DUPLICATES, (record.topic, ids[index], run, *_position(record)))
        events = events.only(kept)
        ids = [ids[index] for index in kept]
    rows_of_table.add(events, ids, _payloads(rows, table, events, ids))


def _payloads(rows: Rows, table: EventTable, events: Events, ids: Sequence[bytes]) -> Sequence[bytes | None]:
    """What is published of each event; None where that is kept in parts."""
    if not table.withheld:
        raws = [document.raw for document in events.documents]
        if max(map(len, raws)) <= MAX_VALUE_BYTES:
            return raws
    payloads: list[bytes | None] = []
    for record, document, event_id in zip(events.records, events.documents, ids, strict=True):
        payload = document.without(table.withheld) if table.withheld else document.raw
        if len(payload) <= MAX_VALUE_BYTES:
            payloads.append(payload)
        else:
            payloads.append(None)
            _keep_in_parts(rows, record, document, event_id, payload)
    return payloads


def _keep_beside(rows: Rows, table: EventTable, events: Events) -> None:
    """Keep what other tables have of some events."""
    if table is TASK_SUBMITTED:
        for record, document in zip(events.records, events.documents, strict=True):
            _keep_task_row(rows, record, document)
            _keep_grading_texts(rows, record, document.body)
    elif table in (SESSION_READY, AGENT_STEPPED):
        for document in events.documents:
            _keep_prompt(rows, document.body)
    elif table is DEAD_LETTERED:
        for record in events.records:
            _keep_raw(rows, record, "dead letter")


def _keep_in_parts(rows: Rows, record: Record, document: Document, event_id: bytes, payload: bytes) -> None:
    kind, run = str(document.body["kind"]), _run(document)
    for part, text in enumerate(_parts(payload)):
        rows.add_public(LONG_PAYLOADS, (event_id, record.topic, kind, run, part, text, *_position(record)))


def _add_incomplete(rows: Rows, table: EventTable, record: Record, document: Document, missing: str) -> None:
    """An event that lacks what every one of its kind has."""
    if table is TASK_SUBMITTED:
        _add_bare_task(rows, record, document)
    else:
        _add_dead(rows, record, f"a {document.body['kind']} without {missing}")


def _add_other(rows: Rows, record: Record, document: Document, version: int) -> None:
    """A record that is not of a kind and version that its topic is known to carry."""
    kind = document.body.get("kind")
    expected = [event.__name__ for event in topic.events] if (topic := BY_NAME.get(record.topic)) else []
    if record.topic == TASKS_IN.name and kind not in expected:
        _add_bare_task(rows, record, document)
    elif isinstance(kind, str):
        rows.add_public("unknown_events", (record.topic, kind, version, *_size_and_ids(record), *_position(record)))
        _keep_raw(rows, record, "unknown event")
    else:
        _add_dead(rows, record, f"expected {' or '.join(expected) or 'an event'}, found JSON without a kind")


def _add_bare_task(rows: Rows, record: Record, document: Document) -> None:
    """A task in another form than ours: which ids it gets is its environment's business, so its ids are NULL here."""
    bare = Document({}, b"{}", document.escaped)
    events = rows.events_of(TASK_SUBMITTED, record.topic)
    ids = [uuid_of("", record)]
    if events.new(ids):
        events.add(Events([record], [bare], [None], TASK_SUBMITTED.pick([bare.body])), ids, [None])
    _keep_task_row(rows, record, document)


def _keep_task_row(rows: Rows, record: Record, document: Document) -> None:
    ids = [value if isinstance(value := document.body.get(name), str) else None for name in ("run", "group")]
    for part, text in enumerate(_parts(document.raw)):
        rows.add_private("task_rows", (record.topic, *ids, document.escaped, part, text, *_position(record)))


def _keep_grading_texts(rows: Rows, record: Record, body: JsonObject) -> None:
    for one in contamination.grading_texts(body):
        ids = (record.topic, str(body["run"]), str(body["group"]))
        rows.add_private(GRADING_TEXTS, (*ids, one.field[:MAX_NAME_BYTES], one.in_task, one.text, *_position(record)))


def _keep_prompt(rows: Rows, body: JsonObject) -> None:
    text = contamination.prompt_text(body)
    group = body["group"]
    if text and isinstance(group, dict):
        rows.prompts.append(Prompt(str(body["run"]), str(group["id"]), str(body["rollout"]), str(body["session"]), text))


def _add_dead(rows: Rows, record: Record, reason: str) -> None:
    rows.add_public("dead_rows", (record.topic, reason, *_size_and_ids(record), *_position(record)))
    _keep_raw(rows, record, "dead row")


def _keep_raw(rows: Rows, record: Record, why: str) -> None:
    key, value = (part[:MAX_VALUE_BYTES] if part is not None else None for part in (record.key, record.value))
    run = record.header_map().get("run_id")
    rows.add_private("raw_records", (record.topic, why, run, key, value, *_position(record)))


def _parts(raw: bytes) -> list[str]:
    """JSON in pieces that are each short enough for a value, cut between characters."""
    parts = []
    start = 0
    while start < len(raw):
        end = min(start + MAX_VALUE_BYTES, len(raw))
        while end < len(raw) and raw[end] & 0xC0 == 0x80:
            end -= 1
        parts.append(raw[start:end].decode())
        start = end
    return parts


def _position(record: Record) -> Row:
    return record.partition, record.offset, utc_of_ms(record.timestamp_ms)


def _size_and_ids(record: Record) -> tuple[int, str | None, str | None]:
    headers = record.header_map()
    return len(record.value or b""), headers.get("run_id"), headers.get("rollout_id")


def _version(body: JsonObject) -> int:
    version = body.get("schema_version")
    # In Python, true and false are integers.
    return version if type(version) is int and 0 <= version < 2**31 else 1


def _without_id(bodies: Sequence[JsonObject]) -> list[int]:
    """Which events have none."""
    try:
        ids = list(map(_ID, bodies))
        if _TEXT.issuperset(map(type, ids)) and "" not in ids:
            return []
    except KeyError:
        pass
    return [index for index, body in enumerate(bodies) if not isinstance(found := body.get("event_id"), str) or not found]


_TEXT = frozenset({str})


def _run(document: Document) -> str | None:
    return run if isinstance(run := document.body.get("run"), str) else None
