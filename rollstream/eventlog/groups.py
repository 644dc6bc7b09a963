"""Who consumes what, and how far behind: look-ups for commands that watch, never for workers.

A dead member stays listed until its session times out, so "nobody consumes" is certain and "somebody does" is recent.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError, KafkaError

from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.commits import decode_done
from rollstream.eventlog.connection import connect_admin
from rollstream.settings import KafkaSettings
from topics.catalogue import CATALOGUE, ROLLOUTS_RETRIES, RUNS_CONTROL, Topic

UNGROUPED = frozenset({"store_worker"})
"""Workers that keep their offsets elsewhere and so have no consumer group."""
FOLLOWED = frozenset({RUNS_CONTROL})
"""Topics that every worker reads whole, and so without a consumer group."""


def group_name(worker: str, topic: Topic) -> str:
    """The consumer group, without prefix, in which a worker reads a topic.

    Retries have a group of their own: a group whose members read different topics would not spread them evenly.
    """
    return f"{worker}.retries" if topic is ROLLOUTS_RETRIES else worker


@dataclass(frozen=True, slots=True)
class Consumption:
    """One worker role: the topic it consumes through a consumer group."""

    worker: str
    topic: Topic

    def group(self, kafka: KafkaSettings) -> str:
        return kafka.topic_prefix + group_name(self.worker, self.topic)


CONSUMPTIONS: tuple[Consumption, ...] = tuple(
    Consumption(worker, topic)
    for topic in CATALOGUE
    if topic not in FOLLOWED
    for worker in topic.read_by
    if worker.endswith("_worker") and worker not in UNGROUPED
)


@dataclass(frozen=True, slots=True)
class GroupState:
    """A consumer group as the broker sees it."""

    consumption: Consumption
    members: tuple[str, ...]
    """Client id and host of each."""
    lag: int | None
    """Records of its topic that are not done yet; None when the topic does not exist."""


@dataclass(frozen=True, slots=True)
class Done:
    """Which records the workers were done with, at the moment of one look at what they had committed."""

    committed: Mapping[Consumption, Mapping[int, tuple[int, frozenset[int]]]]
    """Worker and topic -> partition -> everything below this offset, and those offsets beyond."""

    def has(self, worker: str, topic: Topic, partition: int, offset: int) -> bool:
        """Whether `worker` was done with this record of `topic`."""
        below, beyond = self.committed.get(Consumption(worker, topic), {}).get(partition, (0, frozenset()))
        return offset < below or offset in beyond


class GroupReader:
    """Looks at the groups of one installation. Create it with `open_groups`."""

    def __init__(self, admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, kafka: KafkaSettings) -> None:
        self._admin = admin
        self._consumer = consumer
        self._kafka = kafka

    async def describe(self) -> list[GroupState]:
        """All groups, with members and lag.

        Raises:
            BrokerUnavailable: the broker does not answer any more.
        """
        with _broker_failures():
            return [GroupState(one, await self._members(one), await self._lag(one)) for one in CONSUMPTIONS]

    async def unattended(self) -> list[Consumption]:
        """Topics that nobody consumes at the moment.

        Raises:
            BrokerUnavailable: the broker does not answer any more.
        """
        with _broker_failures():
            return [one for one in CONSUMPTIONS if not await self._members(one)]

    async def done(self) -> Done:
        """What all groups have committed.

        Raises:
            BrokerUnavailable: the broker does not answer any more.
        """
        with _broker_failures():
            return Done({one: await self._done(one) for one in CONSUMPTIONS})

    async def _done(self, consumption: Consumption) -> dict[int, tuple[int, frozenset[int]]]:
        partitions = await self._partitions(consumption)
        found = await self._committed(consumption.group(self._kafka), partitions) if partitions else {}
        return {
            tp.partition: (offset, frozenset(decode_done(offset, metadata)))
            for tp, (offset, metadata) in found.items()
            if offset >= 0
        }

    async def _members(self, consumption: Consumption) -> tuple[str, ...]:
        group = consumption.group(self._kafka)
        try:
            responses = await self._admin.describe_consumer_groups([group])
        except GroupCoordinatorNotAvailableError:
            # A broker that never had a group makes its offsets topic at the first question.
            return ()
        found = [entry for response in responses for entry in response.groups if entry[1] == group]
        return tuple(f"{member[1]} {member[2]}" for entry in found for member in entry[5])

    async def _lag(self, consumption: Consumption) -> int | None:
        partitions = await self._partitions(consumption)
        if partitions is None:
            return None
        starts = await self._consumer.beginning_offsets(partitions)
        ends = await self._consumer.end_offsets(partitions)
        committed = await self._committed(consumption.group(self._kafka), partitions)
        return sum(remaining(committed.get(tp), starts[tp], ends[tp]) for tp in partitions)

    async def _partitions(self, consumption: Consumption) -> list[TopicPartition] | None:
        name = self._kafka.topic_prefix + consumption.topic.name
        # Asked first, because fetching the metadata of a missing topic may create it, with a wrong number of partitions.
        if name not in await self._admin.list_topics():
            return None
        await self._consumer._client.add_topic(name)  # fetches the metadata that partitions_for_topic reads
        return [TopicPartition(name, number) for number in self._consumer.partitions_for_topic(name) or ()]

    async def _committed(self, group: str, partitions: list[TopicPartition]) -> dict[TopicPartition, tuple[int, str]]:
        try:
            found = await self._admin.list_consumer_group_offsets(group, partitions=partitions)
        except GroupCoordinatorNotAvailableError:
            return {}
        return {tp: (entry.offset, entry.metadata) for tp, entry in found.items()}


def remaining(committed: tuple[int, str] | None, start: int, end: int) -> int:
    """Records of one partition that are not done: what is committed is, and what the commit's metadata tells of later ones.

    Args:
        committed: offset and metadata; None when the group never committed, and will begin at `start`.
    """
    if committed is None or committed[0] < 0:
        return end - start
    offset, metadata = committed
    return max(0, end - offset - len(decode_done(offset, metadata)))


@asynccontextmanager
async def open_groups(bootstrap: str, kafka: KafkaSettings) -> AsyncIterator[GroupReader]:
    """A reader of the installation's groups.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    admin = await connect_admin(bootstrap)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None)
    try:
        with _broker_failures():
            await consumer.start()
        yield GroupReader(admin, consumer, kafka)
    finally:
        await consumer.stop()
        await admin.close()


@contextmanager
def _broker_failures() -> Iterator[None]:
    try:
        yield
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnavailable(f"the broker stopped answering: {error or type(error).__name__}") from None
