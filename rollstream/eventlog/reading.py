"""Reading the log without a consumer group: for commands that look, not for workers that work."""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from rollstream.cancelling import ended
from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.connection import consumer_options, start_consumer, stop_consumer, unreachable
from rollstream.eventlog.metadata import describe_topics
from rollstream.settings import KafkaSettings
from schemas.envelope import header_map
from topics.catalogue import Topic


async def interrupted(reading: Coroutine[Any, Any, None]) -> Exception | None:
    """Read until that ends, in a task of its own: a consumer that stops may let the cancellation of its fetches escape, which
    must not be the caller's.

    Returns:
        The failure of the broker that interrupted it, after which it can be read again; None if it ended by itself.

    Raises:
        Exception: anything else.
    """
    task = asyncio.create_task(reading)
    try:
        await asyncio.wait([task])
    finally:
        await ended(task)
    error = None if task.cancelled() else task.exception()
    if error is None or isinstance(error, KafkaError | OSError | BrokerUnavailable):
        return error
    raise error


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the log, as it stands."""

    topic: str
    """Without the installation's prefix."""
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    def header_map(self) -> dict[str, str]:
        return header_map(self.headers)


class LogReader:
    """Reads whole topics from a position on, in batches. Create it with `open_reader`."""

    def __init__(self, consumer: AIOKafkaConsumer, prefix: str) -> None:
        self._consumer = consumer
        self._prefix = prefix

    async def seek_to_start(self) -> None:
        await self._consumer.seek_to_beginning(*self._consumer.assignment())

    async def seek_to_end(self) -> None:
        if partitions := self._consumer.assignment():
            await self._consumer.seek_to_end(*partitions)

    async def seek_to_time(self, moment: datetime) -> None:
        """Every partition to its first record at or after `moment`, by broker time."""
        partitions = self._consumer.assignment()
        # The ends first: what arrives between the two look-ups lies behind them and is read.
        ends = await self._consumer.end_offsets(partitions)
        found = await self._consumer.offsets_for_times({tp: round(moment.timestamp() * 1000) for tp in partitions})
        for partition in partitions:
            position = found.get(partition)
            self._consumer.seek(partition, ends[partition] if position is None else position.offset)

    def seek(self, topic: Topic, positions: Mapping[int, int]) -> None:
        """Partitions of a topic to given offsets."""
        for partition, offset in positions.items():
            self._consumer.seek(TopicPartition(self._prefix + topic.name, partition), offset)

    async def has(self, topic: Topic, partition: int, offset: int) -> bool:
        """Whether an offset lies between the start and the end of its partition."""
        tp = TopicPartition(self._prefix + topic.name, partition)
        if tp not in self._consumer.assignment():
            return False
        starts, ends = await self._consumer.beginning_offsets([tp]), await self._consumer.end_offsets([tp])
        return bool(starts[tp] <= offset < ends[tp])

    async def positions(self) -> dict[int, int]:
        """Partition -> next offset, of a reader of one topic."""
        return {tp.partition: await self._consumer.position(tp) for tp in self._consumer.assignment()}

    async def poll(self, timeout_s: float = 0.5, max_records: int = 2_000) -> list[Record]:
        """What arrived, at most `max_records`; empty after `timeout_s` without any."""
        batches = await self._consumer.getmany(timeout_ms=round(timeout_s * 1000), max_records=max_records)
        return [
            Record(
                topic=record.topic.removeprefix(self._prefix),
                partition=record.partition,
                offset=record.offset,
                timestamp_ms=record.timestamp,
                key=record.key,
                value=record.value,
                headers=tuple(record.headers),
            )
            for records in batches.values()
            for record in records
        ]

    async def to_end(self) -> AsyncIterator[list[Record]]:
        """Batches up to where the log ended when the call was made."""
        ends = await self._consumer.end_offsets(self._consumer.assignment())
        while True:
            positions = [(await self._consumer.position(tp), end) for tp, end in ends.items()]
            if all(position >= end for position, end in positions):
                return
            if batch := await self.poll():
                yield batch


@asynccontextmanager
async def open_reader(bootstrap: str, kafka: KafkaSettings, topics: Collection[Topic]) -> AsyncIterator[LogReader]:
    """A reader over all partitions of `topics`, at their start. Topics that do not exist read as empty, and are not made.

    Raises:
        BrokerUnavailable: nobody answers, or nobody can say which partitions there are.
    """
    options = consumer_options(kafka)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, **options)
    await start_consumer(consumer, bootstrap)
    try:
        try:
            found = await describe_topics(consumer._client, [kafka.topic_prefix + topic.name for topic in topics])
        except KafkaError as error:
            raise unreachable(bootstrap, error) from None
        partitions = [
            TopicPartition(name, number) for name, topic in found.items() if topic for number in range(topic.partitions)
        ]
        consumer.assign(partitions)
        reader = LogReader(consumer, kafka.topic_prefix)
        if partitions:
            await reader.seek_to_start()
        yield reader
    finally:
        await stop_consumer(consumer)
