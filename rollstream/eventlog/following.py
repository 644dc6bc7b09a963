"""What else stands in the log about the sessions a worker owns: what its agents did before, and what environments answer.

Topics keyed by session are co-partitioned, so whoever owns a partition of `sessions.ready` reads the same number of the others.
A partition that was gained is scanned once, in the background, from the time of its oldest unfinished session; that one scan
serves every session to be resumed. Observations are followed from then on. No consumer group: nothing here is ever committed.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from rollstream.cancelling import ended
from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.connection import UNCONNECTED, consumer_options, start_consumer, stop_consumer
from rollstream.eventlog.ownership import Assignment
from rollstream.settings import KafkaSettings, Settings
from topics.catalogue import AGENT_STEPS, ENV_OBSERVATIONS, EPISODES_COMPLETED, SESSIONS_READY, Topic

log = logging.getLogger(__name__)

POLL_MS = 100
"""How long a poll may take before a change of the assignment is looked at."""
FETCH_WAIT_MS = 20
RECONNECT_S = 0.5
CLOCK_SKEW_MS = 60_000
"""Clocks of two producers may disagree by this much; records have their producers' time."""
LAST_WORDS_S = 0.5
"""After a rebalance, before the end of the log is looked up: what the last owner had sent may be on its way still."""
MAX_COMPLETED = 100_000
"""Sessions that are remembered to be over; older ones are known by the group's commits."""
MAX_UNCLAIMED_BYTES = 128 * 1024 * 1024
"""Of records kept for sessions that nobody plays here yet. Beyond it the oldest are let go, and play from their start."""


@dataclass(slots=True, eq=False)
class Inbox:
    """What the log tells of one session, for whoever plays it."""

    partition: int
    steps: list[bytes] = field(default_factory=list)
    """AgentStepped events from before, in the order of the log."""
    _observations: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _waiting: dict[str, "asyncio.Future[bytes]"] = field(default_factory=dict)
    size_bytes: int = 0

    def peek(self, observation: str) -> bytes | None:
        """The first observation of an id that has come so far."""
        found = self._observations.pop(observation, None)
        if found is None:
            return None
        self._taken.add(observation)
        return found[1]

    async def wait(self, observation: str) -> bytes:
        """The first observation of an id, once it comes."""
        found = self.peek(observation)
        if found is not None:
            return found
        future = self._waiting[observation] = asyncio.get_running_loop().create_future()
        try:
            value: bytes = await future
        finally:
            self._waiting.pop(observation, None)
        return value

    def put(self, observation: str, offset: int, value: bytes) -> None:
        """Take in an observation. Of several under one id the first by offset is the one that happened."""
        if observation in self._taken:
            return
        future = self._waiting.get(observation)
        if future is not None and not future.done():
            self._taken.add(observation)
            future.set_result(value)
            return
        held = self._observations.get(observation)
        if held is None or offset < held[0]:
            self._observations[observation] = (offset, value)
            self.size_bytes += len(value)


@dataclass(slots=True, eq=False)
class _Partition:
    """One owned partition number."""

    mark: int | None
    """Offset of the oldest unfinished session, as far as the group knows."""
    sessions_end: int = 0
    """Sessions from here on came after the assignment: nobody has played them before."""
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    """Observations are followed."""
    scanned: asyncio.Event = field(default_factory=asyncio.Event)
    """What was there before is known."""


class SessionFollower:
    """Reads along for the sessions of the partitions that a worker owns."""

    def __init__(self, settings: Settings) -> None:
        self._bootstrap = settings.bootstrap_servers or UNCONNECTED
        self._kafka: KafkaSettings = settings.kafka
        self._owned: dict[int, _Partition] = {}
        self._positions: dict[int, int] = {}
        """Next observation to read, of partitions that are followed."""
        self._changed = False
        self._claimed: dict[str, Inbox] = {}
        self._unclaimed: OrderedDict[str, Inbox] = OrderedDict()
        self._unclaimed_bytes = 0
        self._over: OrderedDict[str, int | None] = OrderedDict()
        """Sessions, with their partition if they are over only because they failed here."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.broke: Callable[[BaseException], None] = lambda error: None
        """Told of a failure that nothing here can handle."""

    async def start(self) -> None:
        self._spawn(self._follow())

    async def close(self) -> None:
        await ended(*self._tasks)

    def assigned(self, assignment: Assignment) -> None:
        """Take note of which partitions are owned now. Called without an await between the old state and the new one."""
        kept = {
            number: partition
            for number, partition in self._owned.items()
            if number in assignment.marks and number not in assignment.gained
        }
        gained = {number: _Partition(mark) for number, mark in assignment.marks.items() if number not in kept}
        for number in self._owned.keys() - kept.keys():
            # Whoever waits here looks again.
            self._owned[number].placed.set()
            self._owned[number].scanned.set()
        self._owned = kept | gained
        self._positions = {number: self._positions[number] for number in kept if number in self._positions}
        # Of a partition that goes, failures that are not settled by now never will be here.
        self._over = OrderedDict(
            (one, failed_in) for one, failed_in in self._over.items() if failed_in is None or failed_in in kept
        )
        # Whoever plays a session of a lost partition is being stopped; if it comes back, somebody else will.
        self._claimed = {session: inbox for session, inbox in self._claimed.items() if inbox.partition in self._owned}
        for session in [session for session, inbox in self._unclaimed.items() if inbox.partition not in kept]:
            self._drop(session)
        self._changed = True
        if gained:
            self._spawn(self._scan(gained))

    async def known(self, partition: int, offset: int) -> None:
        """Return once all is known that the log tells of a session that stands at this place of `sessions.ready`."""
        while (owned := self._owned.get(partition)) is not None:
            await owned.placed.wait()
            if offset < owned.sessions_end:
                await owned.scanned.wait()
            if self._owned.get(partition) is owned:
                return

    def is_over(self, session: str) -> bool:
        """Whether the session's episode is known to be completed, or to have failed here."""
        return session in self._over

    @contextlib.contextmanager
    def inbox(self, session: str, partition: int) -> Iterator[Inbox]:
        """What is known of a session, and what comes while it is played."""
        inbox = self._unclaimed.pop(session, None)
        if inbox is None:
            inbox = Inbox(partition)
        self._unclaimed_bytes -= inbox.size_bytes
        self._claimed[session] = inbox
        try:
            yield inbox
        finally:
            if self._claimed.get(session) is inbox:
                del self._claimed[session]

    def over(self, session: str) -> None:
        """Remember that an episode is completed: nobody plays it again, and what is told of it later concerns nobody."""
        self._remember(session, None)

    def failed(self, session: str, partition: int) -> None:
        """Remember that a session failed: what follows is another one, unless the partition goes before that is settled."""
        self._remember(session, partition)

    def _remember(self, session: str, failed_in: int | None) -> None:
        self._over[session] = failed_in
        while len(self._over) > MAX_COMPLETED:
            self._over.popitem(last=False)

    # Scanning.

    async def _scan(self, gained: Mapping[int, _Partition]) -> None:
        while any(self._owned.get(number) is partition for number, partition in gained.items()):
            try:
                async with self._consumer() as consumer:
                    await self._scan_once(consumer, gained)
                return
            except (KafkaError, OSError, BrokerUnavailable) as error:
                log.warning("cannot read what happened to sessions before, trying again: %r", error)
                await asyncio.sleep(RECONNECT_S)

    async def _scan_once(self, consumer: "AIOKafkaConsumer[Any, Any]", gained: Mapping[int, _Partition]) -> None:
        since = await self._place(consumer, gained)
        if since:
            await asyncio.sleep(LAST_WORDS_S)
        # Completed episodes first: what was done for them needs no room.
        means = {EPISODES_COMPLETED: self._completed, AGENT_STEPS: self._stepped, ENV_OBSERVATIONS: self._observed}
        for topic, take in means.items():
            moments = {TopicPartition(self._name(topic), number): at for number, at in since.items()}
            if not moments:
                continue
            consumer.assign(list(moments))
            ends = await consumer.end_offsets(list(moments))
            found = await consumer.offsets_for_times(moments)
            starts = {tp: ends[tp] if found.get(tp) is None else found[tp].offset for tp in moments}
            async for record in self._between(consumer, starts, ends):
                take(record)
        for partition in gained.values():
            partition.scanned.set()

    async def _place(self, consumer: "AIOKafkaConsumer[Any, Any]", gained: Mapping[int, _Partition]) -> dict[int, int]:
        """Begin to follow observations; partition -> time from which the log may tell of unfinished sessions."""
        observations = {number: TopicPartition(self._name(ENV_OBSERVATIONS), number) for number in gained}
        sessions = {number: TopicPartition(self._name(SESSIONS_READY), number) for number in gained}
        consumer.assign([*observations.values(), *sessions.values()])
        places = await consumer.end_offsets(list(observations.values()))
        begins = await consumer.beginning_offsets(list(sessions.values()))
        ends = await consumer.end_offsets(list(sessions.values()))
        marks: dict[TopicPartition, int] = {}
        for number, partition in gained.items():
            tp = sessions[number]
            partition.sessions_end = ends[tp]
            mark = max(begins[tp], partition.mark or 0)
            if mark < ends[tp]:
                marks[tp] = mark
            if self._owned.get(number) is partition:
                self._positions.setdefault(number, places[observations[number]])
                partition.placed.set()
        self._changed = True
        since: dict[int, int] = {}
        if marks:
            consumer.assign(list(marks))
            async for record in self._between(consumer, marks, {tp: mark + 1 for tp, mark in marks.items()}):
                since.setdefault(record.partition, record.timestamp - CLOCK_SKEW_MS)
        return {number: max(at, 0) for number, at in since.items()}

    @staticmethod
    async def _between(
        consumer: "AIOKafkaConsumer[Any, Any]", starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> AsyncIterator[Any]:
        """Records of assigned partitions, each from its start to before its end."""
        open_ = {tp for tp, start in starts.items() if start < ends[tp]}
        for tp, start in starts.items():
            consumer.seek(tp, start)
            if tp not in open_:
                consumer.pause(tp)
        while open_:
            for tp, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
                for record in records:
                    if record.offset < ends[tp]:
                        yield record
            for tp in list(open_):
                # The position, because offsets that hold no record are never delivered.
                if await consumer.position(tp) >= ends[tp]:
                    open_.discard(tp)
                    consumer.pause(tp)

    # Following.

    async def _follow(self) -> None:
        while True:
            try:
                async with self._consumer() as consumer:
                    self._changed = True
                    while True:
                        await self._poll(consumer)
            except (KafkaError, OSError, BrokerUnavailable) as error:
                log.warning("cannot follow observations, trying again: %r", error)
            await asyncio.sleep(RECONNECT_S)

    async def _poll(self, consumer: "AIOKafkaConsumer[Any, Any]") -> None:
        if self._changed:
            self._changed = False
            name = self._name(ENV_OBSERVATIONS)
            consumer.assign([TopicPartition(name, number) for number in self._positions])
            for number, position in self._positions.items():
                consumer.seek(TopicPartition(name, number), position)
        if not self._positions:
            await asyncio.sleep(POLL_MS / 1000)
            return
        for tp, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
            for record in records:
                if record.offset == self._positions.get(tp.partition):
                    self._positions[tp.partition] += 1
                elif record.offset > self._positions.get(tp.partition, record.offset):
                    self._positions[tp.partition] = record.offset + 1
                else:
                    continue
                self._observed(record)

    # What records mean.

    def _completed(self, record: Any) -> None:
        if record.key is not None:
            session = _text(record.key)
            self.over(session)
            self._drop(session)

    def _stepped(self, record: Any) -> None:
        inbox = self._kept_for(record)
        if inbox is not None and record.value is not None:
            inbox.steps.append(record.value)
            self._grown(inbox, len(record.value))

    def _observed(self, record: Any) -> None:
        if record.key is None or record.value is None:
            return
        name = next((value for header, value in record.headers if header == "ce_id"), None)
        if name is None:
            return
        claimed = self._claimed.get(_text(record.key))
        if claimed is not None:
            claimed.put(_text(name), record.offset, record.value)
            return
        inbox = self._kept_for(record)
        if inbox is not None:
            before = inbox.size_bytes
            inbox.put(_text(name), record.offset, record.value)
            self._grown(inbox, 0, inbox.size_bytes - before)

    def _kept_for(self, record: Any) -> Inbox | None:
        """The inbox of a session that nobody plays here, or not yet; None when nobody ever will."""
        if record.key is None or record.partition not in self._owned:
            return None
        session = _text(record.key)
        if session in self._over or session in self._claimed:
            return None
        return self._unclaimed.setdefault(session, Inbox(record.partition))

    def _grown(self, inbox: Inbox, own: int, counted: int = 0) -> None:
        inbox.size_bytes += own
        self._unclaimed_bytes += own + counted
        while self._unclaimed_bytes > MAX_UNCLAIMED_BYTES and len(self._unclaimed) > 1:
            session = next(iter(self._unclaimed))
            log.warning("no room for what happened to session %s; if it was not over, it plays from its start", session)
            self._drop(session)

    def _drop(self, session: str) -> None:
        inbox = self._unclaimed.pop(session, None)
        if inbox is not None:
            self._unclaimed_bytes -= inbox.size_bytes

    # Clients and tasks.

    @contextlib.asynccontextmanager
    async def _consumer(self) -> "AsyncIterator[AIOKafkaConsumer[Any, Any]]":
        options = consumer_options(self._kafka) | {"fetch_max_wait_ms": FETCH_WAIT_MS}
        consumer = AIOKafkaConsumer(bootstrap_servers=self._bootstrap, group_id=None, **options)
        await start_consumer(consumer, self._bootstrap)
        try:
            for topic in (SESSIONS_READY, EPISODES_COMPLETED, AGENT_STEPS, ENV_OBSERVATIONS):
                await consumer._client.add_topic(self._name(topic))
            yield consumer
        finally:
            await stop_consumer(consumer)

    def _name(self, topic: Topic) -> str:
        return self._kafka.topic_prefix + topic.name

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.broke(error)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
