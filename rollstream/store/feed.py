"""The whole log, from given positions on: every partition of every topic, without a consumer group.

The store keeps its own offsets, so the broker's commits, groups and rebalances play no part. Topics and partitions that appear
later are picked up; a log that is shorter than what the store has read of it is another log, and stops the store.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollstream.errors import UsageError
from rollstream.eventlog.connection import consumer_options, start_consumer, stop_consumer
from rollstream.eventlog.reading import Record
from rollstream.settings import KafkaSettings
from topics.catalogue import CATALOGUE

log = logging.getLogger(__name__)

Position = tuple[str, int]
"""Topic (without prefix) and partition."""

LOOK_AGAIN_S = 10.0
MAX_BATCH_BYTES = 16 * 1024 * 1024
"""About how much is stored at once; in memory it costs a multiple of that."""
MAX_FETCH_BYTES = 1 * 1024 * 1024
"""About how much is fetched at once: compressed, so in memory it is a multiple of that."""
MAX_PARTITION_BYTES = 512 * 1024
"""Of one partition in one fetch; a longer record still comes, alone."""


class Feed:
    """A reader of the installation's log. Create it with `Feed.open`; one task reads."""

    def __init__(self, consumer: AIOKafkaConsumer, prefix: str, positions: Mapping[Position, int], look_again_s: float) -> None:
        self._consumer = consumer
        self._prefix = prefix
        self._next = dict(positions)
        self._look_again_s = look_again_s
        self._looked_at = float("-inf")

    @classmethod
    async def open(
        cls, bootstrap: str, kafka: KafkaSettings, positions: Mapping[Position, int], *, look_again_s: float = LOOK_AGAIN_S
    ) -> "Feed":
        """Connect, to read on from `positions`, and from the start where there is none.

        Args:
            look_again_s: how often topics and partitions are looked for.

        Raises:
            BrokerUnavailable: nobody answers.
        """
        options = consumer_options(kafka) | {
            # A position outside the log is a finding, see `start_of`, and no reason to go elsewhere by itself.
            "auto_offset_reset": "none",
            "fetch_max_bytes": MAX_FETCH_BYTES,
            "max_partition_fetch_bytes": MAX_PARTITION_BYTES,
        }
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, client_id="rollstream-store_worker", **options)
        await start_consumer(consumer, bootstrap)
        return cls(consumer, kafka.topic_prefix, positions, look_again_s)

    async def fetch(self, timeout_s: float, max_records: int) -> list[Record]:
        """What arrived, each partition in offset order; empty after `timeout_s` without any.

        Raises:
            UsageError: the log is not the one that the positions are from.
            KafkaError: the broker failed; a new feed from the last stored positions loses nothing.
        """
        if time.monotonic() - self._looked_at > self._look_again_s:
            await self._look_for_partitions()
        if not self._consumer.assignment():
            await asyncio.sleep(timeout_s)
            return []
        found = await self._consumer.getmany(timeout_ms=round(timeout_s * 1000), max_records=max_records)
        records: list[Record] = []
        for tp, some in found.items():
            topic, partition = position = self._position(tp)
            records += (_record(topic, partition, one) for one in some)
            self._next[position] = some[-1].offset + 1
        return records

    async def whole_log(self) -> tuple[dict[Position, int], dict[Position, int]]:
        """Where each partition that has records starts, and where it ends, now."""
        await self._look_for_partitions()
        assigned = self._consumer.assignment()
        starts, ends = await self._consumer.beginning_offsets(assigned), await self._consumer.end_offsets(assigned)
        some = [tp for tp in assigned if starts[tp] < ends[tp]]
        return {self._position(tp): starts[tp] for tp in some}, {self._position(tp): ends[tp] for tp in some}

    async def reached(self, ends: Mapping[Position, int]) -> bool:
        """Whether everything before `ends` was fetched."""
        for topic, partition in ends:
            if await self._consumer.position(TopicPartition(self._prefix + topic, partition)) < ends[topic, partition]:
                return False
        return True

    def ends(self) -> dict[Position, int]:
        """Where each partition ends, as the last fetch told."""
        known = ((tp, self._consumer.highwater(tp)) for tp in self._consumer.assignment())
        return {self._position(tp): end for tp, end in known if end is not None}

    def behind(self) -> int:
        """How many records are in the log that were not fetched yet."""
        return sum(max(0, end - self._next.get(position, 0)) for position, end in self.ends().items())

    async def close(self) -> None:
        await stop_consumer(self._consumer)

    async def _look_for_partitions(self) -> None:
        found = await self._partitions()
        self._looked_at = time.monotonic()
        if found == self._consumer.assignment():
            return
        starts = await self._consumer.beginning_offsets(found)
        ends = await self._consumer.end_offsets(found)
        self._consumer.assign(found)
        for tp in found:
            position = self._position(tp)
            self._next[position] = start_of(position, self._next.get(position), starts[tp], ends[tp])
            self._consumer.seek(tp, self._next[position])

    async def _partitions(self) -> set[TopicPartition]:
        wanted = {self._prefix + topic.name for topic in CATALOGUE}
        # The only request of this client that names no topic, and so creates none.
        cluster = await self._consumer._client.fetch_all_metadata()
        return {TopicPartition(name, n) for name in wanted & cluster.topics() for n in cluster.partitions_for_topic(name)}

    def _position(self, tp: TopicPartition) -> Position:
        return tp.topic.removeprefix(self._prefix), tp.partition


def _record(topic: str, partition: int, found: "ConsumerRecord[bytes | None, bytes | None]") -> Record:
    return Record(topic, partition, found.offset, found.timestamp, found.key, found.value, tuple(found.headers))


def start_of(position: Position, stored: int | None, start: int, end: int) -> int:
    """Where to read a partition on whose log reaches from `start` to `end`.

    Raises:
        UsageError: the store has read more than the log has.
    """
    topic, partition = position
    if stored is None:
        return start
    if stored > end:
        raise UsageError(
            f"the store has read {topic}/{partition} up to offset {stored}, but the log ends at {end}: the topic was made "
            "anew; remove the data directory's `store` folder to build the store from the new log"
        )
    if stored < start:
        log.warning("%s/%d: offsets %d to %d are gone from the log, and not in the store", topic, partition, stored, start)
    return max(stored, start)


def size_of(records: Iterable[Record]) -> int:
    """Bytes of the values."""
    return sum(len(record.value or b"") for record in records)
