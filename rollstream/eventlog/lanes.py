"""A FastStream subscriber whose records run in bounded concurrent lanes and are committed out of order.

The lane runs FastStream's whole pipeline (parser, decoder, middlewares), so records that do not parse are seen too. Polling
never stops: when all lanes are busy the record is rewound and the partitions pause, so long episodes never cost the
membership in the consumer group. An offset counts as done only after its handler has returned, or its failure has been
settled durably; see `commits` for what is committed, and `failures` for what settling means.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import ConsumerStoppedError, KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError
from faststream.kafka.subscriber.usecase import DefaultSubscriber

from rollstream.errors import EpisodeTimeout
from rollstream.eventlog.commits import Progress
from rollstream.eventlog.offsets import GroupOffsets
from rollstream.eventlog.ownership import Assignment, LogLost, Ownership, WorkerStuck
from rollstream.eventlog.running import Running
from rollstream.health import LaneHealth

log = logging.getLogger(__name__)

Settle = Callable[["ConsumerRecord[Any, Any]", Exception], Awaitable[None]]
Wants = Callable[["ConsumerRecord[Any, Any]"], bool]

COMMIT_EVERY = 500
"""Completions after which a commit is made at once, whatever the interval."""
LANE_WAIT_S = 2.0
"""How long intake may block on a free lane. After an error aiokafka does nothing until the next fetch, so it must be short."""
STARTS_AT_ONCE = 16
"""Handlers started before those that are started get a turn: quick ones are gone then, before the collector looks at them."""
RESUME_AT = 0.9
"""Share of busy lanes at which paused partitions resume: `pause()` throws prefetched records away, so not at once."""

fence: ContextVar[int] = ContextVar("fence", default=0)
"""Generation of the consumer group under which the current record is handled."""


class QueueTimeout(EpisodeTimeout):
    """A record waited too long for a lane; a retry may find one, here or elsewhere."""

    def __init__(self, message: str) -> None:
        super().__init__(message, stage="admission")
        self.kind = "queue_timeout"


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How one subscriber runs."""

    lanes: int
    commit_interval_s: float
    drain_timeout_s: float
    session_timeout_s: float
    """After which the group gives this worker's partitions to others."""
    once: bool = False
    """A second record under the same key is acked unrun, as far back as the memory of an owned partition reaches."""
    queue_timeout_s: float | None = None
    """How long a fetched record may wait for a lane before it fails, retryably."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a subscriber asks of its worker.

    Attributes:
        settle: puts an end to a failed record; returns only when that is durable.
        wants: False acks the record at once, undecoded.
        offsets: where commits are made and read.
        broke: told of a failure that nothing here can handle; the worker must end.
        assigned: told of each assignment, before its first record. Must not wait.
    """

    settle: Settle
    wants: Wants
    offsets: Callable[[], GroupOffsets]
    broke: Callable[[BaseException], None]
    assigned: Callable[[Assignment], None] | None = None


class LaneSubscriber(DefaultSubscriber):
    """`DefaultSubscriber` with its one-at-a-time consumption replaced. Make it with `rollstream.eventlog.apps`."""

    options: LaneOptions
    hooks: Hooks
    ownership: Ownership
    work: Running

    def set_up(self, options: LaneOptions, hooks: Hooks) -> None:
        """Say how to run, before the start."""
        assert self.group_id is not None, "lanes consume in a group"
        self.options = options
        self.hooks = hooks
        self.ownership = Ownership(
            self.group_id,
            self._consumer,
            hooks.offsets,
            session_timeout_s=options.session_timeout_s,
            uncrowded=self._resume,
            assigned=hooks.assigned,
        )
        self.work = Running(once=options.once, ended=self._resume_if_free, broke=hooks.broke)
        self._waiting: dict[tuple[TopicPartition, int], float] = {}
        self._started = 0
        self._completed = 0
        self._enough_done = asyncio.Event()
        self._draining = False
        self._failed = False
        self._held = False
        self._committer: asyncio.Task[None] | None = None

    @property
    def busy(self) -> int:
        """Records being handled now."""
        return self.work.busy

    def health(self) -> LaneHealth:
        """What this subscriber holds at the moment, and since when."""
        return self.ownership.health(in_flight=self.busy)

    # Intake.

    async def get_msg(self, consumer: "AIOKafkaConsumer[Any, Any]") -> "ConsumerRecord[Any, Any]":
        while True:
            try:
                return await consumer.getone()
            except OffsetOutOfRangeError as error:
                for partition, offset in error.args[0].items():
                    await self._find(partition, offset)
            except NoOffsetForPartitionError as error:
                await self._find(error.args[0], None)

    async def _find(self, partition: TopicPartition, offset: int | None) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                await self.ownership.find(partition, offset)
        except LogLost as lost:
            self._failed = True
            self.hooks.broke(lost)
            raise ConsumerStoppedError from None  # ends FastStream's loop, without a word of its own
        # What was given back and is gone is not waited for any more.
        progress = self.ownership.parts.get(partition)
        first = progress.position if progress is not None else None
        for place in [place for place in self._waiting if place[0] == partition and first is not None and place[1] < first]:
            del self._waiting[place]

    async def consume_one(self, msg: "ConsumerRecord[Any, Any]") -> None:
        if self._failed:
            return
        try:
            await self._take(msg)
        except Exception as error:
            # FastStream would go on with the next record, and the mark would pass over this one.
            self._failed = True
            self.hooks.broke(error)

    async def _take(self, msg: "ConsumerRecord[Any, Any]") -> None:
        partition = TopicPartition(msg.topic, msg.partition)
        if not self.ownership.may_take(partition, msg.offset) or self._ack_unrun(partition, msg):
            return
        if self.busy >= self.options.lanes and not await self._found_a_lane(partition, msg):
            return
        progress = self.ownership.parts.get(partition)
        if self._draining or progress is None or not progress.offer(msg.offset):
            return
        late = self._waited_too_long(partition, msg)
        if self._waiting:
            self._waiting.pop((partition, msg.offset), None)
        self.work.start(partition, progress, msg, self._handle(progress, msg, late=late))
        self._started += 1
        if self._started % STARTS_AT_ONCE == 0:
            await asyncio.sleep(0)

    async def _found_a_lane(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> bool:
        """Wait for a lane. False if the record is not to be run now: acked, given back, or fetched again after a rebalance."""
        rebalances = self.ownership.rebalances
        await self.work.one_ends(LANE_WAIT_S)
        if self._draining or rebalances != self.ownership.rebalances:
            return False
        if self._ack_unrun(partition, record):
            return False  # its run was cancelled during the wait
        if self.busy < self.options.lanes or self._waited_too_long(partition, record):
            return True  # what waited too long needs no lane to be told so
        self._hold(partition, record.offset)
        return False

    def _ack_unrun(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> bool:
        """Whether the record is nobody's business here, or was seen before; then it counts as done."""
        progress = self.ownership.parts.get(partition)
        if progress is None or self._draining:
            return False
        if not self.work.was_seen(partition, record) and self.hooks.wants(record):
            return False
        self._waiting.pop((partition, record.offset), None)
        if progress.offer(record.offset):
            progress.complete(record.offset)
        return True

    def _waited_too_long(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> bool:
        limit = self.options.queue_timeout_s
        if limit is None:
            return False
        since = self._waiting.setdefault((partition, record.offset), time.monotonic())
        return time.monotonic() - since > limit

    def _fetch_the_late(self) -> None:
        """Resume when a record that was given back has waited too long: it needs no lane to be told so."""
        limit = self.options.queue_timeout_s
        if limit is None or not self._held or not self._waiting:
            return
        if time.monotonic() - min(self._waiting.values()) > limit:
            self._held = False
            self._resume()

    def _hold(self, partition: TopicPartition, offset: int) -> None:
        """All lanes are busy with long work: give the record back and pause, but keep polling."""
        consumer = self._consumer()
        consumer.seek(partition, offset)
        consumer.pause(*consumer.assignment())
        self._held = True

    def _resume_if_free(self) -> None:
        if self._held and self.busy <= self.options.lanes * RESUME_AT and not self._draining:
            self._held = False
            self._resume()

    def _resume(self) -> None:
        if self._held or not self.ownership.opened.is_set():
            return
        consumer = self._consumer()
        free = [partition for partition in consumer.assignment() if partition not in self.ownership.crowded]
        with contextlib.suppress(KafkaError):
            consumer.resume(*free)

    def cancel_run(self, run: str) -> None:
        """Stop the running work of a run and count it as done: somebody else has written its end."""
        self.work.cancel_run(run)

    async def _handle(self, progress: Progress, record: "ConsumerRecord[Any, Any]", *, late: bool) -> None:
        fence.set(self.ownership.generation)
        try:
            if late:
                raise QueueTimeout(f"waited longer than {self.options.queue_timeout_s:g} s for one of the lanes")
            await self.process_message(record)
        except Exception as error:
            # Whoever gets the partition in a rebalance may take away what is worked with here before this worker has heard
            # that it lost it: such a failure is nobody's, and this task is cancelled in the wait.
            await self.ownership.known()
            if self.work.is_stopped():
                # What failed is how it cleaned up.
                raise asyncio.CancelledError from error
            # A failure of `settle` itself leaves the offset undone and breaks the worker: nothing is lost silently.
            await self.hooks.settle(record, error)
        progress.complete(record.offset)
        self._completed += 1
        if self._completed >= COMMIT_EVERY:
            self._enough_done.set()

    # Commits and rebalances: see `ownership`.

    async def commit_now(self) -> None:
        """Commit what has changed.

        Raises:
            KafkaError, TimeoutError, OSError: the broker failed.
        """
        self._completed = 0
        await self.ownership.commit()

    async def _commit_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.commit_interval_s):
                    await self._enough_done.wait()
            self._enough_done.clear()
            self._completed = 0
            self.ownership.was_frozen()
            try:
                self.ownership.watch()
            except WorkerStuck as stuck:
                self.hooks.broke(stuck)
            self._fetch_the_late()
            await self.ownership.commit_or_warn()

    async def on_revoked(self, revoked: set[TopicPartition]) -> None:
        """Stop intake, commit once, keep tasks running: most partitions come back."""
        await self.ownership.revoked()

    async def on_assigned(self, assigned: set[TopicPartition]) -> None:
        """Cancel what was lost, learn what others finished, and reopen."""
        for partition in self.ownership.let_go(assigned):
            self.work.cancel_partition(partition)
        self._waiting = {place: since for place, since in self._waiting.items() if place[0] in assigned}
        for partition, offsets in (await self.ownership.take_over(assigned)).items():
            for offset in offsets:
                self.work.cancel(partition, offset)
        self._held = False  # aiokafka has forgotten the pauses

    # Life cycle.

    async def start(self) -> None:
        await super().start()
        self.ownership.started()
        self._committer = asyncio.create_task(self._commit_loop())
        self._committer.add_done_callback(self._committer_ended)

    def _committer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.hooks.broke(error)

    async def drain(self) -> None:
        """Take nothing new, wait for what runs up to the deadline, hand the rest back, commit."""
        self._draining = True
        self.running = False  # ends FastStream's loop; heartbeats go on
        self.work.cancel_idle()
        await self._finish()
        if self._committer is not None:
            self._committer.cancel()
        for _ in range(5):
            # The broker may be away, or the group may have thrown this worker out: commit once it is back in.
            with contextlib.suppress(KafkaError, TimeoutError, OSError):
                async with asyncio.timeout(5):
                    if self.ownership.membership is None:
                        await self.ownership.opened.wait()
                    await self.commit_now()
                break

    async def _finish(self) -> None:
        await self.work.all_end(self.options.drain_timeout_s)
        if late := self.busy:
            log.warning("%d records handed back unfinished after %g s", late, self.options.drain_timeout_s)
            self.work.cancel_all()
            await self.work.all_end(5)

    async def stop(self) -> None:
        if self.consumer is not None and not self._draining:
            await self.drain()
        await super().stop()

    def _consumer(self) -> "AIOKafkaConsumer[Any, Any]":
        assert self.consumer is not None, "the subscriber is not started"
        return self.consumer


class LaneListener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Hands the consumer's rebalances to its subscriber, which is created after it."""

    subscriber: LaneSubscriber

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self.subscriber.on_revoked(set(revoked))

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        await self.subscriber.on_assigned(set(assigned))
