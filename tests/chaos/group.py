"""A consumer group in memory, for schedules that no broker can be made to follow.

It stands in for aiokafka's consumer and for the broker's commits, and keeps the truth beside them: which records were really
handled. A commit that tells of a record that was not is an error at once.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalGenerationError, KafkaConnectionError, UnknownMemberIdError

from rollstream.eventlog.apps import Route, _lanes, bare_broker
from rollstream.eventlog.commits import METADATA_LIMIT, Commit, decode_done
from rollstream.eventlog.lanes import Hooks, LaneOptions, LaneSubscriber
from rollstream.eventlog.offsets import Membership
from rollstream.settings import Settings
from topics.catalogue import TASKS_IN

TOPIC = "t"


def partition(number: int = 0) -> TopicPartition:
    return TopicPartition(TOPIC, number)


class CommittedTooMuch(AssertionError):
    """A commit told of a record that nobody has handled."""


@dataclass
class Group:
    """The broker's side: logs, commits, who is a member of which generation."""

    logs: dict[TopicPartition, list[int]]
    """Offsets that exist. Gaps are transaction markers and the like."""
    generation: int = 0
    members: dict[str, int] = field(default_factory=dict)
    """Member -> its generation."""
    committed: dict[TopicPartition, Commit] = field(default_factory=dict)
    handled: set[tuple[TopicPartition, int]] = field(default_factory=set)
    away: bool = False
    """Whether commits and reads of commits fail."""
    unreadable: bool = False
    """Whether reads of commits find nothing, as with a coordinator that is loading."""

    async def read(self, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Commit]:
        await asyncio.sleep(0)
        if self.away:
            raise KafkaConnectionError("away")
        return {} if self.unreadable else {one: self.committed.get(one, Commit(-1, "")) for one in partitions}

    async def commit(self, group: str, membership: Membership, commits: Mapping[TopicPartition, Commit]) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise KafkaConnectionError("away")
        if membership.member not in self.members:
            raise UnknownMemberIdError
        if membership.generation != self.members[membership.member]:
            raise IllegalGenerationError
        for one, commit in commits.items():
            self.check(one, commit)
            self.committed[one] = commit

    def check(self, one: TopicPartition, commit: Commit) -> None:
        assert len(commit.metadata) <= METADATA_LIMIT
        beyond = decode_done(commit.offset, commit.metadata)
        told = {offset for offset in self.logs[one] if offset < commit.offset} | beyond
        if unhandled := sorted(offset for offset in told if (one, offset) not in self.handled):
            raise CommittedTooMuch(f"{one} {commit}: {unhandled} were never handled")

    def known_done(self, one: TopicPartition) -> set[int]:
        commit = self.committed.get(one, Commit(0, ""))
        beyond = decode_done(commit.offset, commit.metadata)
        return {offset for offset in self.logs[one] if offset < commit.offset or offset in beyond}


class Coordinator:
    """What lanes look at of aiokafka's coordinator."""

    def __init__(self, name: str) -> None:
        self.member_id = name
        self.generation = -1
        self.asked_to_join_anew = 0
        self._coordination_task: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def request_rejoin(self) -> None:
        self.asked_to_join_anew += 1


class Consumer:
    """What lanes use of aiokafka's consumer."""

    def __init__(self, name: str) -> None:
        self._coordinator = Coordinator(name)
        self.positions: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self.positions)

    def seek(self, one: TopicPartition, offset: int) -> None:
        self.positions[one] = offset

    def pause(self, *partitions: TopicPartition) -> None:
        self.paused |= set(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self.paused -= set(partitions)


class Member:
    """One worker: a real `LaneSubscriber` whose handlers wait until they are told how to end."""

    def __init__(self, name: str, group: Group, lanes: int = 8, **options: Any) -> None:
        self.name = name
        self.group = group
        self.started: list[tuple[TopicPartition, int]] = []
        self.settled: list[tuple[TopicPartition, int]] = []
        self.broke: list[BaseException] = []
        self.running: dict[tuple[TopicPartition, int], asyncio.Future[None]] = {}
        settings = Settings(bootstrap_servers="localhost:1")

        async def unused(record: object) -> None: ...

        self.lanes: LaneSubscriber = _lanes(bare_broker(settings, "tester"), settings, "tester", Route(TASKS_IN, unused, lanes))
        chosen = {"lanes": lanes, "commit_interval_s": 60.0, "drain_timeout_s": 1.0, "session_timeout_s": 600.0} | options
        self.lanes.set_up(
            LaneOptions(**chosen),
            Hooks(settle=self._settle, wants=lambda record: True, offsets=lambda: group, broke=self.broke.append),  # type: ignore[arg-type, return-value]
        )
        self.consumer = Consumer(name)
        self.lanes.consumer = self.consumer  # type: ignore[assignment]
        self.lanes.process_message = self._handle  # type: ignore[method-assign, assignment]

    async def _handle(self, record: "ConsumerRecord[Any, Any]") -> None:
        place = (TopicPartition(record.topic, record.partition), record.offset)
        self.started.append(place)
        end = self.running[place] = asyncio.get_running_loop().create_future()
        try:
            await end
        finally:
            if self.running.get(place) is end:
                del self.running[place]
        self.group.handled.add(place)

    async def _settle(self, record: "ConsumerRecord[Any, Any]", error: Exception) -> None:
        place = (TopicPartition(record.topic, record.partition), record.offset)
        self.settled.append(place)
        self.group.handled.add(place)

    def next_record(self, one: TopicPartition) -> "ConsumerRecord[Any, Any] | None":
        """What a fetch would bring, if the partition is assigned and not paused."""
        position = self.consumer.positions.get(one)
        if position is None or one in self.consumer.paused:
            return None
        offset = next((offset for offset in self.group.logs[one] if offset >= position), None)
        return None if offset is None else record(one, offset)

    async def deliver(self, one: TopicPartition) -> bool:
        """Fetch and consume one record; False if there was none."""
        found = self.next_record(one)
        if found is None:
            return False
        self.consumer.positions[one] = found.offset + 1
        await self.lanes.consume_one(found)
        await settle_loop()
        return True

    async def finish(self, one: TopicPartition, offset: int, error: Exception | None = None) -> None:
        """Let a running handler return, or raise."""
        end = self.running[one, offset]
        if end.done():
            pass  # it was cancelled, and does not know yet
        elif error is None:
            end.set_result(None)
        else:
            end.set_exception(error)
        await settle_loop()

    async def revoked(self) -> None:
        await self.lanes.on_revoked(set(self.consumer.positions))

    async def assigned(self, partitions: Collection[TopicPartition], generation: int, *, early: bool = False) -> None:
        """As aiokafka does it: new state, forgotten pauses, positions from the commits, then the callback.

        Args:
            early: records arrive before the callback has returned.
        """
        self.consumer._coordinator.generation = generation
        self.consumer._coordinator.member_id = self.name
        self.group.members[self.name] = generation
        self.consumer.paused = set()
        self.consumer.positions = {one: max(0, self.group.committed.get(one, Commit(0, "")).offset) for one in partitions}
        callback = asyncio.create_task(self.lanes.on_assigned(set(partitions)))
        if early:
            await asyncio.sleep(0)
            for one in partitions:
                await self.deliver(one)
        await callback


async def settle_loop() -> None:
    """Let everything that can run now run."""
    for _ in range(6):
        await asyncio.sleep(0)


async def rebalance(group: Group, shares: Mapping[Member, Collection[TopicPartition]]) -> None:
    """One whole rebalance among the given members; all others are no members any more."""
    for member in shares:
        await member.revoked()
    group.generation += 1
    group.members = {member.name: group.members.get(member.name, -1) for member in shares}
    for member, partitions in shares.items():
        await member.assigned(partitions, group.generation)


def record(one: TopicPartition, offset: int, key: bytes | None = None) -> "ConsumerRecord[Any, Any]":
    return ConsumerRecord(one.topic, one.partition, offset, 0, 0, key, b"", None, 0, 0, [])


def group_of(*counts: int) -> Group:
    return Group({partition(number): list(range(count)) for number, count in enumerate(counts)})


async def drain(member: Member) -> None:
    """Deliver and finish everything of the member's partitions, and commit."""
    async with asyncio.timeout(20):
        while True:
            was_busy = member.lanes.busy > 0
            delivered = [await member.deliver(one) for one in sorted(member.consumer.assignment())]
            for place in sorted(member.running):
                await member.finish(*place)
            await settle_loop()
            if not any(delivered) and not was_busy:
                break
    await member.lanes.commit_now()
