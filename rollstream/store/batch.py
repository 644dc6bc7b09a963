"""A batch of records as Arrow tables, ready to be inserted. Pure, so that it can be made while another batch is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from rollstream.eventlog.reading import Record
from rollstream.store import schema
from rollstream.store.columns import Row, utc_of_ms
from rollstream.store.contamination import Prompt
from rollstream.store.decoding import decode
from rollstream.store.event_table import EventTable
from rollstream.store.tables import BY_KIND

Position = tuple[str, int]
"""Topic (without prefix) and partition."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Rows of one event table, one of each event id."""

    table: EventTable
    topic: str
    rows: pa.Table

    def __reduce__(self) -> tuple[object, ...]:
        # To another process, a table goes by its name.
        return _event_batch, (self.table.kind, self.topic, self.rows)


def _event_batch(kind: str, topic: str, rows: pa.Table) -> EventBatch:
    return EventBatch(BY_KIND[kind], topic, rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one transaction inserts."""

    events: list[EventBatch]
    public: dict[str, list[Row]]
    private: dict[str, list[Row]]
    moved: list[Row]
    """Of `projector_offsets`."""
    offsets: dict[Position, int]
    """All offsets, once this batch is stored."""
    records: int
    first_offset: int
    """The lowest of any partition."""
    prompts: list[Prompt]

    def nbytes(self) -> int:
        """About how much is inserted."""
        return sum(batch.rows.nbytes for batch in self.events)


def plan(
    records: Sequence[Record],
    stored: Mapping[Position, int],
    ends: Mapping[Position, int],
    *,
    keep_repeated: bool = False,
) -> Batch:
    """What of `records` is new, as a batch.

    Args:
        records: those of each partition in offset order; the ones below the `stored` offset are skipped.
        ends: where the log ends as far as the reader knows, for the view `lag`.
        keep_repeated: see `decode`.
    """
    offsets = dict(stored)
    last: dict[Position, Record] = {}
    fresh = []
    for record in records:
        position = (record.topic, record.partition)
        if record.offset >= offsets.get(position, 0):
            offsets[position] = record.offset + 1
            last[position] = record
            fresh.append(record)
    rows = decode(fresh, keep_repeated=keep_repeated)
    events = [EventBatch(found.table, found.topic, found.arrow()) for found in rows.events.values()]
    first = min((record.offset for record in fresh), default=0)
    return Batch(events, rows.public, rows.private, _moved(last, ends), offsets, len(fresh), first, rows.prompts)


def arrow(table: str, rows: list[Row]) -> pa.Table:
    """Rows of one of the tables that hold no events, as DuckDB can read them."""
    return schema.arrow_table(rows, schema.PUBLIC.get(table) or schema.PRIVATE[table])


def _moved(last: Mapping[Position, Record], ends: Mapping[Position, int]) -> list[Row]:
    """Rows of `projector_offsets` for the partitions whose `last` records are stored."""
    now = utc_now()
    return [
        (topic, partition, record.offset + 1, ends.get((topic, partition)), utc_of_ms(record.timestamp_ms), now)
        for (topic, partition), record in last.items()
    ]


def utc_now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)
