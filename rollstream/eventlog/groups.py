"""Who consumes what, and how far behind: look-ups for commands that watch, never for workers.

A dead member stays listed until its session times out, so "nobody consumes" is certain and "somebody does" is recent.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError, KafkaError

from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.commits import decode_done
from rollstream.eventlog.connection import close_admin, connect_admin, start_consumer, stop_consumer
from rollstream.eventlog.metadata import describe_topics
from rollstream.eventlog.pools import Pools
from rollstream.settings import DEFAULT_POOL, KafkaSettings, Settings
from topics.catalogue import (
    AGENT_STEPS,
    CATALOGUE,
    ENV_ACTIONS,
    ENV_OBSERVATIONS,
    EPISODES_COMPLETED,
    ROLLOUTS_RETRIES,
    ROLLOUTS_SCORED,
    RUNS_CONTROL,
    SANDBOXES_LEASES,
    Topic,
)

UNGROUPED = frozenset({"store_worker"})
"""Workers that keep their offsets elsewhere and so have no consumer group."""
FOLLOWED = frozenset({RUNS_CONTROL, SANDBOXES_LEASES})
"""Topics that workers read for themselves, each all of it, and so without a consumer group."""
FOLLOWED_BY_OWNERS = frozenset(
    {
        *(("agent_worker", topic) for topic in (AGENT_STEPS, ENV_OBSERVATIONS, EPISODES_COMPLETED)),
        *(("env_worker", topic) for topic in (EPISODES_COMPLETED, ROLLOUTS_SCORED)),
    }
)
"""What a worker reads of the sessions it owns or holds something for, without a group."""
_OF_THEIR_OWN = {ROLLOUTS_RETRIES: "retries", ENV_ACTIONS: "actions"}


def group_name(worker: str, topic: Topic, pool: str = DEFAULT_POOL) -> str:
    """The consumer group, without prefix, in which a worker of a pool reads a topic.

    A second topic of a worker has a group of its own: a group whose members read different topics would not spread them evenly.
    """
    name = worker if pool == DEFAULT_POOL else f"{worker}.{pool}"
    return f"{name}.{_OF_THEIR_OWN[topic]}" if topic in _OF_THEIR_OWN else name


@dataclass(frozen=True, slots=True)
class Consumption:
    """One worker role of one pool: the topic it consumes through a consumer group."""

    worker: str
    topic: Topic
    pool: str = DEFAULT_POOL

    def group(self, kafka: KafkaSettings) -> str:
        return kafka.topic_prefix + group_name(self.worker, self.topic, self.pool)


CONSUMPTIONS: tuple[Consumption, ...] = tuple(
    Consumption(worker, topic)
    for topic in CATALOGUE
    if topic not in FOLLOWED
    for worker in topic.read_by
    if worker.endswith("_worker") and worker not in UNGROUPED and (worker, topic) not in FOLLOWED_BY_OWNERS
)
"""Of the default pool; every other pool has the same ones."""


def worker_for(topic: Topic, headers: Mapping[str, str]) -> str | None:
    """Which worker handles a record of a topic that workers consume; None for other topics."""
    if topic is ROLLOUTS_RETRIES:
        return "verifier_worker" if headers.get("stage") == "verification" else "env_worker"
    return next((one.worker for one in CONSUMPTIONS if one.topic is topic), None)


def consumptions_of(pool: str) -> tuple[Consumption, ...]:
    """What the workers of one pool consume."""
    return tuple(replace(one, pool=pool) for one in CONSUMPTIONS)


@dataclass(frozen=True, slots=True)
class GroupState:
    """A consumer group as the broker sees it."""

    consumption: Consumption
    members: tuple[str, ...]
    """Client id and host of each."""
    lag: int | None
    """Records of its topic that it has not passed yet, other pools' among them; None when the topic does not exist."""


@dataclass(frozen=True, slots=True)
class Done:
    """Which records the workers were done with, at the moment of one look at what they had committed."""

    committed: Mapping[Consumption, Mapping[int, tuple[int, frozenset[int]]]]
    """Worker, topic and pool -> partition -> everything below this offset, and those offsets beyond."""

    def has(self, worker: str, topic: Topic, partition: int, offset: int, pool: str = DEFAULT_POOL) -> bool:
        """Whether `worker` was done with this record of `topic`, which belongs to `pool`."""
        below, beyond = self.committed.get(Consumption(worker, topic, pool), {}).get(partition, (0, frozenset()))
        return offset < below or offset in beyond


class GroupReader:
    """Looks at the groups of one installation. Create it with `open_groups`."""

    def __init__(self, admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, settings: Settings) -> None:
        self._admin = admin
        self._consumer = consumer
        self._kafka = settings.kafka
        self._pools = Pools.of(settings)
        self._all = tuple(one for pool in self._pools.names for one in consumptions_of(pool))

    async def describe(self, pools: Sequence[str] | None = None) -> list[GroupState]:
        """The groups of some pools, by default all, with members and lag.

        Raises:
            BrokerUnavailable: the broker does not answer any more.
        """
        chosen = [one for one in self._all if pools is None or one.pool in pools]
        with _broker_failures():
            return [GroupState(one, await self._members(one), await self._lag(one)) for one in chosen]

    async def unattended(self) -> list[Consumption]:
        """Topics that nobody consumes at the moment, for every pool; of actions, only when some wait: not every run has any.

        Raises:
            BrokerUnavailable: the broker does not answer any more.
        """
        with _broker_failures():
            nobodys = [one for one in self._all if not await self._members(one)]
            return [one for one in nobodys if one.topic is not ENV_ACTIONS or await self._lag(one)]

    async def done(self) -> Done:
        """What all groups have committed. A pool that never began has done what the default pool has: it was all its own.

        Raises:
            BrokerUnavailable: the broker does not answer any more.
        """
        with _broker_failures():
            return Done({one: await self._done(one) for one in self._all})

    async def _done(self, consumption: Consumption) -> dict[int, tuple[int, frozenset[int]]]:
        partitions = await self._partitions(consumption)
        found = await self._passed(consumption, partitions) if partitions else {}
        return {tp.partition: (offset, frozenset(decode_done(offset, metadata))) for tp, (offset, metadata) in found.items()}

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
        committed = await self._passed(consumption, partitions)
        return sum(remaining(committed.get(tp), starts[tp], ends[tp]) for tp in partitions)

    async def _passed(
        self, consumption: Consumption, partitions: list[TopicPartition]
    ) -> dict[TopicPartition, tuple[int, str]]:
        """What a group has committed, partition by partition; of a pool that never began, what the default pool has."""
        found = await self._committed(consumption.group(self._kafka), partitions)
        committed = {tp: commit for tp, commit in found.items() if commit[0] >= 0}
        if consumption.pool == DEFAULT_POOL or len(committed) == len(partitions):
            return committed
        default = await self._committed(replace(consumption, pool=DEFAULT_POOL).group(self._kafka), partitions)
        return {tp: commit for tp, commit in default.items() if commit[0] >= 0} | committed

    async def _partitions(self, consumption: Consumption) -> list[TopicPartition] | None:
        name = self._kafka.topic_prefix + consumption.topic.name
        found = (await describe_topics(self._admin._client, [name]))[name]
        return None if found is None else [TopicPartition(name, number) for number in range(found.partitions)]

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
async def open_groups(bootstrap: str, settings: Settings) -> AsyncIterator[GroupReader]:
    """A reader of the groups of all pools of the installation.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    admin = await connect_admin(bootstrap)
    try:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None)
        await start_consumer(consumer, bootstrap)
        try:
            yield GroupReader(admin, consumer, settings)
        finally:
            await stop_consumer(consumer)
    finally:
        await close_admin(admin)


@contextmanager
def _broker_failures() -> Iterator[None]:
    try:
        yield
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnavailable(f"the broker stopped answering: {error or type(error).__name__}") from None
