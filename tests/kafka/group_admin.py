"""What only an operator does to topics and consumer groups, on a real broker."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    KafkaError,
    TopicAlreadyExistsError,
    UnknownMemberIdError,
    for_code,
)
from aiokafka.protocol.group import LeaveGroupRequest

from rollstream.eventlog.commits import Commit
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.metadata import describe_topics
from rollstream.eventlog.offsets import GroupOffsets, Membership
from rollstream.eventlog.provisioning import TopicsRefused, ensure
from rollstream.settings import Settings
from topics.catalogue import TASKS_IN, Topic

NOBODY = Membership(-1, "")
"""As what an operator commits."""


class Operator:
    """Somebody with an admin client and no patience. Create it with `operator_of`."""

    def __init__(self, admin: AIOKafkaAdminClient, settings: Settings) -> None:
        self._admin = admin
        self._settings = settings
        self.offsets = GroupOffsets(admin)
        self.group = f"{settings.kafka.topic_prefix}tester"

    def name(self, topic: Topic) -> str:
        return self._settings.kafka.topic_prefix + topic.name

    def partitions(self, topic: Topic) -> list[TopicPartition]:
        count = topic.partitions(self._settings.kafka.partitions)
        return [TopicPartition(self.name(topic), number) for number in range(count)]

    async def delete(self, topic: Topic) -> None:
        await self._admin.delete_topics([self.name(topic)])
        async with asyncio.timeout(20):
            while (await describe_topics(self._admin._client, [self.name(topic)]))[self.name(topic)] is not None:
                await asyncio.sleep(0.05)

    async def make_anew(self, topic: Topic) -> None:
        await self.delete(topic)
        async with asyncio.timeout(20):
            while True:
                try:
                    await ensure(self._admin, self._settings.kafka)
                except (TopicsRefused, TopicAlreadyExistsError):
                    await asyncio.sleep(0.1)  # the broker still deletes
                else:
                    break
            await describe_topics(self._admin._client, [self.name(topic)])

    async def add_partitions(self, topic: Topic, count: int) -> None:
        await self._admin.create_partitions({self.name(topic): NewPartitions(total_count=count)})

    async def members(self) -> list[str]:
        responses = await self._admin.describe_consumer_groups([self.group])
        return [member[0] for response in responses for entry in response.groups for member in entry[5]]

    async def set_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        """As `kafka-consumer-groups --reset-offsets` does.

        Raises:
            UnknownMemberIdError: the group has members, and takes offsets of nobody else.
        """
        await self.offsets.commit(self.group, NOBODY, {tp: Commit(offset, "") for tp, offset in offsets.items()})

    async def evict_and_set(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Throw the members out of the group, and set its offsets before they are back."""
        async with asyncio.timeout(30):
            while True:
                coordinator = await self._admin.find_coordinator(self.group)
                for member in await self.members():
                    response = await self._admin._client.send(coordinator, LeaveGroupRequest(self.group, member))
                    if response.error_code:
                        raise for_code(response.error_code)
                try:
                    return await self.set_offsets(offsets)
                except UnknownMemberIdError:
                    continue

    async def committed(self, topic: Topic = TASKS_IN) -> dict[TopicPartition, Commit]:
        try:
            return await self.offsets.read(self.group, self.partitions(topic))
        except KafkaError:
            return {}


@asynccontextmanager
async def operator_of(settings: Settings) -> AsyncIterator[Operator]:
    assert settings.bootstrap_servers is not None
    admin = await connect_admin(settings.bootstrap_servers)
    try:
        operator = Operator(admin, settings)
        async with asyncio.timeout(20):
            while True:
                try:
                    await admin.find_coordinator(operator.group)
                    break
                except GroupCoordinatorNotAvailableError:
                    await asyncio.sleep(0.1)  # the broker's first group
        yield operator
    finally:
        await admin.close()
