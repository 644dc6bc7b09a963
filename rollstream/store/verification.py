"""Whether a published store is what the log says: every record is read again, decoded again and compared with its row.

Both sides are summed up by topic and partition, by the same SQL: how many rows, and the exclusive or of the hashes of all their
columns. It does not depend on the order, so the log is summed up batch by batch in bounded memory.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

from rollstream.settings import KafkaSettings
from rollstream.store.batch import Batch, Position, arrow
from rollstream.store.feed import Feed
from rollstream.store.planned import Request, open_planned
from rollstream.store.pruning import PRUNED, PRUNINGS, topic_in
from rollstream.store.rebuild import Advance
from rollstream.store.schema import PUBLIC
from rollstream.store.tables import DUPLICATES, EVENT_TABLES, LONG_PAYLOADS


@dataclass(slots=True)
class Sums:
    """Rows and hashes, by topic and partition."""

    rows: Counter[Position] = field(default_factory=Counter)
    """Without the parts of long payloads, so as many as there are records."""
    hashes: Counter[Position] = field(default_factory=Counter)

    def add(self, connection: duckdb.DuckDBPyConnection, table: str, source: str, where: str) -> None:
        """Add the rows of `source`, which has the columns of `table`."""
        columns = ", ".join(f'"{name}"' for name, _ in PUBLIC[table])
        found = connection.execute(
            f"SELECT {topic_in(table)}, kafka_partition, count(*), bit_xor(hash({columns})) FROM {source} "
            f"WHERE {where} GROUP BY ALL"
        ).fetchall()
        for topic, partition, rows, xor in found:
            self.rows[topic, partition] += 0 if table == LONG_PAYLOADS else rows
            self.hashes[topic, partition] ^= xor


@dataclass(frozen=True, slots=True)
class Difference:
    """One partition where store and log differ."""

    topic: str
    partition: int
    in_log: int
    """Records, up to the offset that the store has read, and less those that were pruned from the store."""
    in_store: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What a comparison found."""

    records: int
    partitions: int
    differences: list[Difference]
    gone: dict[Position, int]
    """Where the log no longer reaches back to offset 0: its first offset. What the store has from before is not compared."""
    repeated_events: dict[str, int]
    """Event tables that have an event id twice, and how often."""

    @property
    def is_clean(self) -> bool:
        return not self.differences and not self.repeated_events


async def verify(
    bootstrap: str,
    kafka: KafkaSettings,
    connection: duckdb.DuckDBPyConnection,
    begin: Callable[[int], Advance] = lambda records: lambda count: None,
) -> Verified:
    """Compare the store behind `connection` with the log, up to the offsets that the store has read.

    Raises:
        BrokerUnavailable: nobody answers.
        UsageError: the log is shorter than what the store has read.
    """
    offsets = _offsets(connection)
    # Opened at the store's offsets first, because that refuses a log that is shorter.
    feed = await Feed.open(bootstrap, kafka, offsets)
    try:
        starts, _ = await feed.whole_log()
    finally:
        await feed.close()
    ends = {position: end for position, end in offsets.items() if end > starts.get(position, 0)}
    stored = _sum_store(connection, starts)
    advance = begin(sum(end - starts.get(position, 0) for position, end in ends.items()))
    log = LogSums(connection)
    # Which of two records of an event came first is for the store to say: partitions have no order among them.
    async with open_planned(Request(bootstrap, kafka, until=ends, keep_repeated=True)) as planned:
        async for batch, *_ in planned.batches():
            await asyncio.to_thread(log.add, batch)
            advance(batch.records)
    gone = {position: start for position, start in starts.items() if start > 0}
    differences = list(_compare(log.sums, stored))
    return Verified(sum(log.sums.rows.values()), len(ends), differences, gone, _repeated(connection))


class LogSums:
    """What a store of the log would have, where what the store takes for repeated, and what was pruned from it, is so."""

    def __init__(self, store: duckdb.DuckDBPyConnection) -> None:
        self.sums = Sums()
        self._memory = duckdb.connect(config={"threads": 1})
        for name in (DUPLICATES, PRUNINGS):
            self._memory.register("found", store.sql(f"FROM {name}").to_arrow_table())
            self._memory.execute(f"CREATE TABLE {name} AS FROM found")

    def add(self, batch: Batch) -> None:
        """Add a batch of the log."""
        for events in batch.events:
            name = events.table.name
            repeated = _REPEATED.format(topic=f"'{events.topic}'")
            self._add(name, events.rows, f"NOT {repeated}")
            columns = f"'{events.topic}' AS topic, event_id, run_id, kafka_partition, kafka_offset, recorded_at"
            self._add(DUPLICATES, events.rows, repeated, f"(SELECT {columns} FROM batch) AS batch")
        for name, rows in batch.public.items():
            where = f"NOT {_REPEATED.format(topic='batch.topic')}" if name == LONG_PAYLOADS else "true"
            self._add(name, arrow(name, rows), where)

    def _add(self, table: str, rows: pa.Table, where: str, source: str = "batch") -> None:
        self._memory.register("batch", rows)
        pruned = PRUNED.format(topic=topic_in(table, "batch"), row="batch")
        self.sums.add(self._memory, table, source, f"{where} AND NOT {pruned}")
        self._memory.unregister("batch")


_REPEATED = f"""EXISTS (
    SELECT 1 FROM {DUPLICATES} AS known
    WHERE known.kafka_offset = batch.kafka_offset AND known.kafka_partition = batch.kafka_partition AND known.topic = {{topic}}
)"""


def _sum_store(connection: duckdb.DuckDBPyConnection, starts: Mapping[Position, int]) -> Sums:
    """What the store has of what is still in the log."""
    sums = Sums()
    for table in PUBLIC:
        gone = " OR ".join(
            f"({topic_in(table)} = '{topic}' AND kafka_partition = {partition} AND kafka_offset < {start})"
            for (topic, partition), start in starts.items()
            if start > 0
        )
        sums.add(connection, table, table, f"NOT ({gone})" if gone else "true")
    return sums


def _compare(log: Sums, store: Sums) -> Iterator[Difference]:
    for topic, partition in sorted(log.rows.keys() | store.rows.keys()):
        position = (topic, partition)
        if log.rows[position] != store.rows[position] or log.hashes[position] != store.hashes[position]:
            yield Difference(topic, partition, log.rows[position], store.rows[position])


def _repeated(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    counts = {
        table.name: connection.execute(f"SELECT count(*) - count(DISTINCT event_id) FROM {table.name}").fetchall()[0][0]
        for table in EVENT_TABLES
    }
    return {name: count for name, count in counts.items() if count}


def _offsets(connection: duckdb.DuckDBPyConnection) -> dict[Position, int]:
    found = connection.execute("SELECT topic, kafka_partition, next_offset FROM projector_offsets").fetchall()
    return {(topic, partition): offset for topic, partition, offset in found}
