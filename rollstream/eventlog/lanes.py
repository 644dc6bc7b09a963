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
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from faststream.kafka.subscriber.usecase import DefaultSubscriber

from rollstream.errors import EpisodeTimeout, RollstreamError
from rollstream.eventlog.commits import SOFT_LIMIT, Commit, Progress, decode_done

log = logging.getLogger(__name__)

Settle = Callable[["ConsumerRecord[Any, Any]", Exception], Awaitable[None]]
Wants = Callable[["ConsumerRecord[Any, Any]"], bool]

COMMIT_EVERY = 500
"""Completions after which a commit is made at once, whatever the interval."""
LANE_WAIT_S = 2.0
"""How long intake may block on a free lane. After an error aiokafka does nothing until the next fetch, so it must be short."""
RESUME_AT = 0.9
"""Share of busy lanes at which paused partitions resume: `pause()` throws prefetched records away, so not at once."""

MAX_SEEN = 20_000
"""Keys remembered for each owned partition of a topic that is read once."""
STUCK_S = 300.0
"""A rebalance that has not ended by then never will: better a new process."""

fence: ContextVar[int] = ContextVar("fence", default=0)
"""Generation of the consumer group under which the current record is handled."""


class QueueTimeout(EpisodeTimeout):
    """A record waited too long for a lane; a retry may find one, here or elsewhere."""

    def __init__(self, message: str) -> None:
        super().__init__(message, stage="admission")
        self.kind = "queue_timeout"


class WorkerStuck(RollstreamError):
    """The consumer group does not let this worker go on."""


_idle: WeakSet["asyncio.Task[Any]"] = WeakSet()


@contextlib.contextmanager
def only_waiting() -> Iterator[None]:
    """Say that the current handler has nothing to lose: while it waits here, a drain hands its record back at once."""
    task = asyncio.current_task()
    assert task is not None, "a handler runs in a task"
    _idle.add(task)
    try:
        yield
    finally:
        _idle.discard(task)


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How one subscriber runs."""

    lanes: int
    commit_interval_s: float
    drain_timeout_s: float
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
        admin: the client that reads commit metadata.
        broke: told of a failure that nothing here can handle; the worker must end.
    """

    settle: Settle
    wants: Wants
    admin: Callable[[], AIOKafkaAdminClient]
    broke: Callable[[BaseException], None]


class LaneSubscriber(DefaultSubscriber):
    """`DefaultSubscriber` with its one-at-a-time consumption replaced. Make it with `rollstream.eventlog.apps`."""

    options: LaneOptions
    hooks: Hooks

    def set_up(self, options: LaneOptions, hooks: Hooks) -> None:
        """Say how to run, before the start."""
        self.options = options
        self.hooks = hooks
        self._parts: dict[TopicPartition, Progress] = {}
        self._tasks: dict[TopicPartition, dict[int, asyncio.Task[None]]] = {}
        self._seen: dict[TopicPartition, dict[bytes, int]] = {}
        self._waiting: dict[tuple[TopicPartition, int], float] = {}
        self._unwanted: set[asyncio.Task[None]] = set()
        self._early: dict[TopicPartition, int] = {}
        self._busy = 0
        self._completed = 0
        self._open = asyncio.Event()
        self._lane_free = asyncio.Event()
        self._enough_done = asyncio.Event()
        self._draining = False
        self._held = False
        self._crowded: set[TopicPartition] = set()
        self._rebalances = 0
        self._closed_at = time.monotonic()
        self._commit_lock = asyncio.Lock()
        self._commit_task: asyncio.Task[None] | None = None
        self._committer: asyncio.Task[None] | None = None

    @property
    def busy(self) -> int:
        """Records being handled now."""
        return self._busy

    # Intake.

    async def consume_one(self, msg: "ConsumerRecord[Any, Any]") -> None:
        partition = TopicPartition(msg.topic, msg.partition)
        if not self._open.is_set():
            # aiokafka delivers before on_partitions_assigned has returned: drop, and seek back when it does.
            self._early[partition] = min(self._early.get(partition, msg.offset), msg.offset)
            return
        if self._ack_unrun(partition, msg):
            return
        rebalances = self._rebalances
        if (
            self._busy >= self.options.lanes
            and not await self._lane_came_free()
            and not self._waited_too_long(partition, msg)
            and rebalances == self._rebalances
            and not self._draining
        ):
            self._hold(partition, msg.offset)
            return
        # Looked up only now: a rebalance may have passed during the wait, and then the record is fetched again.
        progress = self._parts.get(partition)
        if self._draining or rebalances != self._rebalances or progress is None or not progress.offer(msg.offset):
            return
        late = self._waited_too_long(partition, msg)
        self._waiting.pop((partition, msg.offset), None)
        self._start(partition, progress, msg, late=late)

    def _ack_unrun(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> bool:
        """Whether the record is nobody's business here, or was seen before; then it counts as done."""
        progress = self._parts.get(partition)
        if progress is None or self._draining:
            return False
        first = self._seen.get(partition, {}).get(record.key) if self.options.once and record.key else None
        if (first is None or first == record.offset) and self.hooks.wants(record):
            return False
        if progress.offer(record.offset):
            progress.complete(record.offset)
        return True

    def _waited_too_long(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> bool:
        limit = self.options.queue_timeout_s
        if limit is None:
            return False
        since = self._waiting.setdefault((partition, record.offset), time.monotonic())
        return time.monotonic() - since > limit

    async def _lane_came_free(self) -> bool:
        self._lane_free.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LANE_WAIT_S):
                await self._lane_free.wait()
        return self._busy < self.options.lanes

    def _hold(self, partition: TopicPartition, offset: int) -> None:
        """All lanes are busy with long work: give the record back and pause, but keep polling."""
        consumer = self._consumer()
        consumer.seek(partition, offset)
        consumer.pause(*consumer.assignment())
        self._held = True

    def _start(self, partition: TopicPartition, progress: Progress, record: "ConsumerRecord[Any, Any]", *, late: bool) -> None:
        task = asyncio.create_task(self._handle(progress, record, late=late), name=_run_of(record))
        tasks = self._tasks.setdefault(partition, {})
        tasks[record.offset] = task
        self._busy += 1
        self._remember(partition, record)

        # Not in a `finally`: a task that is cancelled before its first step runs none.
        def ended(task: asyncio.Task[None]) -> None:
            self._busy -= 1
            if tasks.get(record.offset) is task:
                del tasks[record.offset]
            if task in self._unwanted:
                self._unwanted.discard(task)
                progress.complete(record.offset)
            elif task.cancelled() and record.key:
                self._seen.get(partition, {}).pop(record.key, None)
            self._lane_free.set()
            if self._held and self._busy <= self.options.lanes * RESUME_AT and not self._draining:
                self._held = False
                self._resume()
            if not task.cancelled() and (error := task.exception()):
                self.hooks.broke(error)

        task.add_done_callback(ended)

    def _remember(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> None:
        if self.options.once and record.key:
            seen = self._seen.setdefault(partition, {})
            seen[record.key] = record.offset
            if len(seen) > MAX_SEEN:
                del seen[next(iter(seen))]

    def cancel_run(self, run: str) -> None:
        """Stop the running work of a run and count it as done: somebody else has written its end."""
        for tasks in self._tasks.values():
            for task in tasks.values():
                if task.get_name() == run:
                    self._unwanted.add(task)
                    task.cancel()

    async def _handle(self, progress: Progress, record: "ConsumerRecord[Any, Any]", *, late: bool) -> None:
        fence.set(max(0, self._generation()))
        try:
            if late:
                raise QueueTimeout(f"waited longer than {self.options.queue_timeout_s:g} s for one of the lanes")
            await self.process_message(record)
        except Exception as error:
            # A failure of `settle` itself leaves the offset undone and breaks the worker: nothing is lost silently.
            await self.hooks.settle(record, error)
        progress.complete(record.offset)
        self._completed += 1
        if self._completed >= COMMIT_EVERY:
            self._enough_done.set()

    def _resume(self) -> None:
        if self._held or not self._open.is_set():
            return
        consumer = self._consumer()
        free = [partition for partition in consumer.assignment() if partition not in self._crowded]
        with contextlib.suppress(KafkaError):
            consumer.resume(*free)

    # Commits.

    async def _commit_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.commit_interval_s):
                    await self._enough_done.wait()
            self._enough_done.clear()
            self._watch_rebalance()
            if self._open.is_set():
                task = asyncio.create_task(self.commit_now())
                self._commit_task = task
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()):
                    log.warning("commit failed, will be repeated: %r", error)

    def _watch_rebalance(self) -> None:
        """A member that is stuck between two generations looks alive and does nothing: say so and end."""
        if self._open.is_set():
            self._closed_at = time.monotonic()
        elif time.monotonic() - self._closed_at > STUCK_S:
            self.hooks.broke(WorkerStuck(f"no rebalance of group {self.group_id} has ended for {STUCK_S:g} s"))

    async def commit_now(self) -> None:
        """Commit what has changed. Bounded: aiokafka retries a commit without end, whatever generation is current."""
        async with self._commit_lock:
            self._completed = 0
            commits = self._changed()
            if not commits:
                return
            offsets = {partition: (commit.offset, commit.metadata) for partition, commit in commits.items()}
            async with asyncio.timeout(30):
                await self._consumer().commit(offsets)
            for partition, commit in commits.items():
                if partition in self._parts:
                    self._parts[partition].committed = commit

    def _changed(self) -> dict[TopicPartition, Commit]:
        """Offset and metadata of each partition, computed in one step without awaiting."""
        commits = {}
        for partition, progress in self._parts.items():
            commit = progress.next_commit()
            if commit is None:
                continue
            self._pause_if_crowded(partition, commit)
            if commit != progress.committed:
                commits[partition] = commit
        return commits

    def _pause_if_crowded(self, partition: TopicPartition, commit: Commit) -> None:
        """Stop fetching a partition whose finished set is about to outgrow the metadata."""
        crowded = len(commit.metadata) > SOFT_LIMIT
        if crowded and partition not in self._crowded:
            self._crowded.add(partition)
            self._consumer().pause(partition)
        elif not crowded and partition in self._crowded:
            self._crowded.discard(partition)
            self._resume()

    # Rebalances (eager protocol: everything is revoked, then the new set is assigned).

    async def on_revoked(self, revoked: set[TopicPartition]) -> None:
        """Stop intake, commit once, keep tasks running: most partitions come back."""
        self._rebalances += 1
        self._early = {}
        self._open.clear()
        if self._commit_task is not None and not self._commit_task.done():
            self._commit_task.cancel()
            await asyncio.wait([self._commit_task])
        try:
            async with asyncio.timeout(3):
                await self.commit_now()
        except (KafkaError, TimeoutError) as error:
            log.warning("commit before a rebalance failed, finished records may run again: %r", error)

    async def on_assigned(self, assigned: set[TopicPartition]) -> None:
        """Cancel what was lost, learn what others finished, and reopen."""
        for partition in self._parts.keys() - assigned:
            del self._parts[partition]
            self._seen.pop(partition, None)
            for task in self._tasks.pop(partition, {}).values():
                task.cancel()
        saved = await self._saved(assigned)
        for partition in assigned:
            base, done = saved.get(partition, (None, set()))
            progress = self._parts.get(partition)
            if progress is None:
                self._parts[partition] = Progress(base, done)
                continue
            for offset in progress.merge(base, done):
                if running := self._tasks.get(partition, {}).get(offset):
                    running.cancel()
        # No await from here on: intake must see either the old state or the new one.
        consumer = self._consumer()
        for partition, progress in self._parts.items():
            position = progress.position if progress.position is not None else self._early.get(partition)
            if position is not None:
                consumer.seek(partition, position)
        self._early = {}
        self._held = False
        self._crowded = set()
        self._open.set()

    async def _saved(self, assigned: set[TopicPartition]) -> dict[TopicPartition, tuple[int, set[int]]]:
        """Committed offsets and finished sets. A failed read means records run again, never that they are skipped.

        Bounded, because no heartbeat is sent while a rebalance callback runs.
        """
        if not assigned:
            return {}
        try:
            async with asyncio.timeout(5):
                found = await self.hooks.admin().list_consumer_group_offsets(self.group_id, partitions=list(assigned))
        except (KafkaError, TimeoutError, OSError) as error:
            log.error("cannot read what is finished, records may run again: %r", error)
            return {}
        return {
            partition: (entry.offset, decode_done(entry.offset, entry.metadata))
            for partition, entry in found.items()
            if entry.offset >= 0
        }

    # Life cycle.

    async def start(self) -> None:
        await super().start()
        self._committer = asyncio.create_task(self._commit_loop())

    async def drain(self) -> None:
        """Take nothing new, wait for what runs up to the deadline, hand the rest back, commit."""
        self._draining = True
        self.running = False  # ends FastStream's loop; heartbeats go on
        tasks = [task for tasks in self._tasks.values() for task in tasks.values()]
        for task in tasks:
            if task in _idle:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.options.drain_timeout_s)
            for task in late:
                task.cancel()
            if late:
                log.warning("%d records handed back unfinished after %g s", len(late), self.options.drain_timeout_s)
                await asyncio.wait(late, timeout=5)
        if self._committer is not None:
            self._committer.cancel()
        for _ in range(5):
            # A rebalance may be under way: commit once it has settled.
            with contextlib.suppress(KafkaError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._open.wait()
                    await self.commit_now()
                break

    async def stop(self) -> None:
        if self.consumer is not None and not self._draining:
            await self.drain()
        await super().stop()

    def _consumer(self) -> "AIOKafkaConsumer[Any, Any]":
        assert self.consumer is not None, "the subscriber is not started"
        return self.consumer

    def _generation(self) -> int:
        coordinator = self._consumer()._coordinator
        return coordinator.generation if coordinator is not None else 0


class LaneListener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Hands the consumer's rebalances to its subscriber, which is created after it."""

    subscriber: LaneSubscriber

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self.subscriber.on_revoked(set(revoked))

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        await self.subscriber.on_assigned(set(assigned))


def _run_of(record: "ConsumerRecord[Any, Any]") -> str | None:
    for name, value in record.headers:
        if name == "run_id":
            return str(value, "utf-8", "replace")
    return None
