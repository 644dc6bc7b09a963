"""What a consumer group has committed, read and written on a connection of its own.

Not through the consumer: while the group rebalances its connection waits for an answer, and then it commits as whatever member
it has become. A commit here names the member and the generation that did the work. The broker takes commits of a generation
until all have joined the next one, so what finishes meanwhile, which may be as long as a dead member's session, is not run
again by its next owner.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from uuid import UUID

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from aiokafka.protocol.commit import OffsetCommitRequest

from rollstream.eventlog.commits import Commit, as_of, tagged

Ends = Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, int]]]


@dataclass(frozen=True, slots=True)
class Membership:
    """As what a worker holds its partitions."""

    generation: int
    member: str


NO_MEMBER = Membership(-1, "")
"""As what somebody commits who is no member. The broker takes it only while the group has none."""


class GroupOffsets:
    """The commits of consumer groups.

    Args:
        ids: of topics, as whoever commits began with them; their commits carry them, and those of another log are not believed.
        ends: where partitions end; commits are then held against it.
    """

    def __init__(self, admin: AIOKafkaAdminClient, ids: Mapping[str, UUID] = {}, ends: Ends | None = None) -> None:
        self._admin = admin
        self._ids = ids
        self._ends = ends

    async def read(self, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Commit]:
        """What was committed for each partition; offset -1 if nothing ever was.

        A partition that is not there was not read: a coordinator that is still loading answers with an error that aiokafka
        does not look at, beside an empty list.

        Raises:
            KafkaError: the broker failed.
        """
        found = await self._admin.list_consumer_group_offsets(group, partitions=list(partitions))
        commits = {partition: Commit(entry.offset, entry.metadata) for partition, entry in found.items()}
        if self._ends is None:
            return commits
        begun = [tp for tp, commit in commits.items() if commit.offset > 0]
        ends = await self._ends(begun) if begun else {}
        return {tp: as_of(commit, self._ids.get(tp.topic), ends.get(tp, 0)) for tp, commit in commits.items()}

    async def commit(self, group: str, membership: Membership, commits: Mapping[TopicPartition, Commit]) -> None:
        """Commit, as a member of the group.

        Raises:
            UnknownMemberIdError, IllegalGenerationError: the group has gone on without this member.
            KafkaError: the broker failed.
        """
        topics: dict[str, list[tuple[int, int, str]]] = {}
        for partition, untagged in commits.items():
            topic_id = self._ids.get(partition.topic)
            commit = untagged if topic_id is None else tagged(untagged, topic_id)
            topics.setdefault(partition.topic, []).append((partition.partition, commit.offset, commit.metadata))
        request = OffsetCommitRequest(
            group,
            membership.generation,
            membership.member,
            OffsetCommitRequest.DEFAULT_RETENTION_TIME,
            list(topics.items()),
        )
        coordinator = await self._admin.find_coordinator(group)
        response = await self._admin._client.send(coordinator, request)
        for _, partitions in response.topics:
            for _, code in partitions:
                if code:
                    raise for_code(code)()
