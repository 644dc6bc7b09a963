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
from functools import partial
from typing import Any
from weakref import WeakSet

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import IllegalGenerationError, KafkaError, UnknownMemberIdError
from faststream.kafka.subscriber.usecase import DefaultSubscriber

from rollstream.errors import EpisodeTimeout, RollstreamError
from rollstream.eventlog.commits import SOFT_LIMIT, Commit, Progress, decode_done
from rollstream.eventlog.offsets import GroupOffsets, Membership

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

MAX_SEEN = 20_000
"""Keys remembered for each owned partition of a topic that is read once."""
STUCK_S = 300.0
"""A rebalance that has not ended by then never will: better a new process."""
COMMIT_S = 5.0
"""How long one commit may take before it is given up, to be made again. Under any session timeout, see `_was_frozen`."""
READ_SAVED_S = 5.0
"""How long to try to read what is finished. No heartbeat is sent meanwhile, so it must stay under any session timeout."""

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
    """

    settle: Settle
    wants: Wants
    offsets: Callable[[], GroupOffsets]
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
        self._records: dict[asyncio.Task[None], ConsumerRecord[Any, Any]] = {}
        self._seen: dict[TopicPartition, dict[bytes, int]] = {}
        self._waiting: dict[tuple[TopicPartition, int], float] = {}
        self._unwanted: set[asyncio.Task[None]] = set()
        self._early: dict[TopicPartition, int] = {}
        self._busy = 0
        self._started = 0
        self._completed = 0
        self._open = asyncio.Event()
        self._lane_free = asyncio.Event()
        self._enough_done = asyncio.Event()
        self._draining = False
        self._failed = False
        self._held = False
        self._crowded: set[TopicPartition] = set()
        self._rebalances = 0
        self._closed_at = time.monotonic()
        self._alive_at = time.monotonic()
        self._membership: Membership | None = None
        self._commit_lock = asyncio.Lock()
        self._commits_fail = False
        self._committer: asyncio.Task[None] | None = None

    @property
    def busy(self) -> int:
        """Records being handled now."""
        return self._busy

    @property
    def _group(self) -> str:
        assert self.group_id is not None, "lanes consume in a group"
        return self.group_id

    # Intake.

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
        if self._was_frozen() or not self._open.is_set() or not self._is_member():
            # aiokafka delivers before on_partitions_assigned has returned, and what it had fetched before the worker was
            # thrown out of the group: drop, and seek back when it returns.
            self._early[partition] = min(self._early.get(partition, msg.offset), msg.offset)
            return
        if self._ack_unrun(partition, msg):
            return
        if self._busy >= self.options.lanes:
            rebalances = self._rebalances
            free = await self._lane_came_free()
            if self._draining or rebalances != self._rebalances:
                return  # it is fetched again
            if self._ack_unrun(partition, msg):
                return  # its run was cancelled during the wait
            if not free and not self._waited_too_long(partition, msg):
                self._hold(partition, msg.offset)
                return
        progress = self._parts.get(partition)
        if self._draining or progress is None or not progress.offer(msg.offset):
            return
        late = self._waited_too_long(partition, msg)
        if self._waiting:
            self._waiting.pop((partition, msg.offset), None)
        self._start(partition, progress, msg, late=late)
        self._started += 1
        if self._started % STARTS_AT_ONCE == 0:
            await asyncio.sleep(0)

    def _was_frozen(self) -> bool:
        """Whether this process stood still for so long that others have its partitions by now; then it asks to join anew."""
        stood_still_s = time.monotonic() - self._alive_at
        self._alive_at += stood_still_s
        if stood_still_s < self.options.session_timeout_s:
            return False
        log.warning("stood still for %.1f s, joining group %s anew", stood_still_s, self.group_id)
        self._join_anew()
        return True

    def _is_member(self) -> bool:
        return self._membership is not None and self._membership.generation == self._consumer()._coordinator.generation

    def _join_anew(self) -> None:
        self._open.clear()
        self._consumer()._coordinator.request_rejoin()

    def _ack_unrun(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> bool:
        """Whether the record is nobody's business here, or was seen before; then it counts as done."""
        progress = self._parts.get(partition)
        if progress is None or self._draining:
            return False
        first = self._seen.get(partition, {}).get(record.key) if self.options.once and record.key else None
        if (first is None or first == record.offset) and self.hooks.wants(record):
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
        task = asyncio.create_task(self._handle(progress, record, late=late))
        self._tasks.setdefault(partition, {})[record.offset] = task
        self._records[task] = record
        self._busy += 1
        self._remember(partition, record)
        # Not in a `finally`: a task that is cancelled before its first step runs none.
        task.add_done_callback(partial(self._ended, partition, progress))

    def _ended(self, partition: TopicPartition, progress: Progress, task: asyncio.Task[None]) -> None:
        self._busy -= 1
        record = self._records.pop(task)
        tasks = self._tasks.get(partition, {})
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

    def _remember(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> None:
        if self.options.once and record.key:
            seen = self._seen.setdefault(partition, {})
            seen[record.key] = record.offset
            if len(seen) > MAX_SEEN:
                del seen[next(iter(seen))]

    def cancel_run(self, run: str) -> None:
        """Stop the running work of a run and count it as done: somebody else has written its end."""
        for task, record in self._records.items():
            if run_of(record) == run:
                self._unwanted.add(task)
                task.cancel()

    async def _handle(self, progress: Progress, record: "ConsumerRecord[Any, Any]", *, late: bool) -> None:
        fence.set(self._membership.generation if self._membership is not None else 0)
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
            self._was_frozen()
            self._watch_membership()
            self._fetch_the_late()
            try:
                await self.commit_now()
            except (KafkaError, TimeoutError, OSError) as error:
                if not self._commits_fail:
                    log.warning("commits of group %s fail, and are repeated: %r", self.group_id, error)
                self._commits_fail = True

    def _watch_membership(self) -> None:
        """A member whose coordination ended, or that is stuck between two generations, looks alive and does nothing."""
        coordination = self._consumer()._coordinator._coordination_task
        if coordination.done():
            cause = None if coordination.cancelled() else coordination.exception()
            self.hooks.broke(WorkerStuck(f"the membership in group {self.group_id} has ended: {cause!r}"))
        elif self._open.is_set():
            self._closed_at = time.monotonic()
        elif time.monotonic() - self._closed_at > STUCK_S:
            self.hooks.broke(WorkerStuck(f"no rebalance of group {self.group_id} has ended for {STUCK_S:g} s"))

    async def commit_now(self) -> None:
        """Commit what has changed, during a rebalance too: see `offsets`."""
        async with asyncio.timeout(COMMIT_S), self._commit_lock:
            self._completed = 0
            commits, membership = self._changed(), self._membership
            if not commits or membership is None:
                return
            try:
                await self.hooks.offsets().commit(self._group, membership, commits)
            except (IllegalGenerationError, UnknownMemberIdError):
                self._thrown_out(membership)
                return
            self._commits_fail = False
            for partition, commit in commits.items():
                if partition in self._parts and membership == self._membership:
                    self._parts[partition].committed = commit

    def _thrown_out(self, membership: Membership) -> None:
        """The group has gone on without this member: nothing can be committed before it has joined anew."""
        if membership != self._membership:
            return
        self._membership = None
        if self._open.is_set():
            self._join_anew()

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
        if not self._open.is_set():
            return
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
        with contextlib.suppress(KafkaError, TimeoutError, OSError):
            async with asyncio.timeout(3):
                await self.commit_now()

    async def on_assigned(self, assigned: set[TopicPartition]) -> None:
        """Cancel what was lost, learn what others finished, and reopen."""
        for partition in self._parts.keys() - assigned:
            del self._parts[partition]
            self._seen.pop(partition, None)
            for task in self._tasks.pop(partition, {}).values():
                task.cancel()
        self._waiting = {place: since for place, since in self._waiting.items() if place[0] in assigned}
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
        self._membership = Membership(consumer._coordinator.generation, consumer._coordinator.member_id)
        self._open.set()

    async def _saved(self, assigned: set[TopicPartition]) -> dict[TopicPartition, tuple[int, set[int]]]:
        """Committed offsets and finished sets. A failed read means records run again, never that they are skipped."""
        found: dict[TopicPartition, Commit] = {}
        try:
            async with asyncio.timeout(READ_SAVED_S):
                while missing := assigned - found.keys():
                    with contextlib.suppress(KafkaError, OSError):
                        found |= await self.hooks.offsets().read(self._group, missing)
                    # Nothing, or not all, is what a coordinator says that is still loading.
                    await asyncio.sleep(0.0 if found.keys() >= assigned else 0.1)
        except TimeoutError:
            log.error("cannot read what is finished, records of %s may run again", self.group_id)
        return {
            partition: (commit.offset, decode_done(commit.offset, commit.metadata))
            for partition, commit in found.items()
            if commit.offset >= 0
        }

    # Life cycle.

    async def start(self) -> None:
        await super().start()
        self._alive_at = time.monotonic()
        self._committer = asyncio.create_task(self._commit_loop())
        self._committer.add_done_callback(self._committer_ended)

    def _committer_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.hooks.broke(error)

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
            # The broker may be away, or the group may have thrown this worker out: commit once it is back in.
            with contextlib.suppress(KafkaError, TimeoutError, OSError):
                async with asyncio.timeout(5):
                    if self._membership is None:
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


class LaneListener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Hands the consumer's rebalances to its subscriber, which is created after it."""

    subscriber: LaneSubscriber

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        await self.subscriber.on_revoked(set(revoked))

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        await self.subscriber.on_assigned(set(assigned))


def run_of(record: "ConsumerRecord[Any, Any]") -> str | None:
    """The run that a record's headers name."""
    for name, value in record.headers:
        if name == "run_id":
            return str(value, "utf-8", "replace")
    return None
