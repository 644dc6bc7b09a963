"""Rows in the making: what is picked of many events, column by column, until it becomes Arrow tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import md5
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from rollstream.eventlog.reading import Record
from rollstream.store.columns import Row, arrow_array, payload_array, utc_of_all_ms
from rollstream.store.contamination import Prompt
from rollstream.store.event_table import EventTable
from rollstream.store.json_text import Document
from schemas.values import clean_text

CONVERTED_AT_ONCE = 2_048
"""How many events are kept as they were picked: enough for Arrow's loops, few enough for the processor's caches."""


@dataclass(frozen=True, slots=True)
class Events:
    """Some events for one table, by what is known of each."""

    records: list[Record]
    documents: list[Document]
    versions: Sequence[int | None]
    picked: list[list[object]]
    """By column."""

    def only(self, kept: Sequence[int]) -> "Events":
        return Events(
            [self.records[index] for index in kept],
            [self.documents[index] for index in kept],
            [self.versions[index] for index in kept],
            [[values[index] for index in kept] for values in self.picked],
        )


@dataclass(slots=True)
class EventRows:
    """Events of one table, one of each id, column by column.

    Of each event only what is picked is kept: whole JSON objects of a batch would not fit the processor's caches.
    """

    table: EventTable
    topic: str
    keeps_repeated: bool = False
    _seen: set[bytes] = field(default_factory=set)
    _ids: list[bytes] = field(default_factory=list)
    _versions: list[int | None] = field(default_factory=list)
    _escaped: list[bool] = field(default_factory=list)
    _picked: list[list[object]] = field(default_factory=list)
    _payloads: list[bytes | None] = field(default_factory=list)
    _partitions: list[int] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)
    _times: list[int] = field(default_factory=list)
    _chunks: list[pa.Table] = field(default_factory=list)

    def new(self, ids: Sequence[bytes]) -> list[int]:
        """Which of some events are to be kept: of each id, the first by offset."""
        if self.keeps_repeated:
            return list(range(len(ids)))
        distinct = set(ids)
        if len(distinct) == len(ids) and self._seen.isdisjoint(distinct):
            self._seen |= distinct
            return list(range(len(ids)))
        kept = []
        for index, event_id in enumerate(ids):
            if event_id not in self._seen:
                self._seen.add(event_id)
                kept.append(index)
        return kept

    def add(self, events: Events, ids: Sequence[bytes], payloads: Sequence[bytes | None]) -> None:
        """Keep some events.

        Args:
            payloads: None where one is too long for one value, or not published.
        """
        self._ids += ids
        self._versions += events.versions
        self._escaped += [document.escaped for document in events.documents]
        self._payloads += payloads
        self._partitions += [record.partition for record in events.records]
        self._offsets += [record.offset for record in events.records]
        self._times += [record.timestamp_ms for record in events.records]
        if not self._picked:
            self._picked = [[] for _ in events.picked]
        for column, values in zip(self._picked, events.picked, strict=True):
            column += values
        if len(self._ids) >= CONVERTED_AT_ONCE:
            self._convert()

    def arrow(self) -> pa.Table:
        """The rows, in the order of the table's columns."""
        if self._ids:
            self._convert()
        return pa.concat_tables(self._chunks)

    def _convert(self) -> None:
        occurred, caused, *own = self.table.arrays(self._picked)
        recorded = utc_of_all_ms(self._times)
        occurred = pc.coalesce(occurred, recorded)
        columns = [
            arrow_array(self._ids, "UUID"),
            pa.array(self._versions, pa.int32()),
            occurred,
            pc.coalesce(caused, occurred),
            pa.array(self._escaped, pa.bool_()),
            *own,
            payload_array(self._payloads),
            pa.array(self._partitions, pa.int32()),
            pa.array(self._offsets, pa.int64()),
            recorded,
        ]
        self._chunks.append(pa.Table.from_arrays(columns, names=[name for name, _ in self.table.schema()]))
        for values in (self._ids, self._versions, self._escaped, self._payloads, self._partitions, self._offsets, self._times):
            values.clear()
        self._picked = []


@dataclass(slots=True)
class Rows:
    """Rows to insert, by table; those of `public` and `private` in the order of the tables' columns."""

    keeps_repeated: bool = False
    events: dict[str, EventRows] = field(default_factory=dict)
    public: dict[str, list[Row]] = field(default_factory=dict)
    private: dict[str, list[Row]] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)

    def events_of(self, table: EventTable, topic: str) -> EventRows:
        """Where events of a table go."""
        rows = self.events.get(table.name)
        if rows is None:
            rows = self.events[table.name] = EventRows(table, topic, self.keeps_repeated)
        return rows

    def add_public(self, table: str, row: Row) -> None:
        self.public.setdefault(table, []).append(row)

    def add_private(self, table: str, row: Row) -> None:
        self.private.setdefault(table, []).append(row)


def uuids_of(events: Events) -> list[bytes]:
    """The ids of events that have one, as 16 bytes each."""
    texts = [str(document.body["event_id"]) for document in events.documents]
    if _ARE_36_LONG.issuperset(map(len, texts)):
        # Many times as fast as UUID(), for the form that our own writers use.
        joined = "".join(texts)
        dashes = "-" * len(texts)
        try:
            raw = bytes.fromhex(joined.replace("-", ""))
        except ValueError:
            raw = b""
        if len(raw) == 16 * len(texts) and all(joined[place::36] == dashes for place in (8, 13, 18, 23)):
            return [raw[start : start + 16] for start in range(0, len(raw), 16)]
    return [uuid_of(text, record) for text, record in zip(texts, events.records, strict=True)]


_ARE_36_LONG = frozenset({36})


def uuid_of(event_id: str, record: Record) -> bytes:
    """An id as 16 bytes: one that is no UUID gets one by hash, and a record without an id one of its position."""
    text = event_id or f"{record.topic}/{record.partition}/{record.offset}"
    try:
        return UUID(text).bytes
    except ValueError:
        return md5(clean_text(text).encode(), usedforsecurity=False).digest()
