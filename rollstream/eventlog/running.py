"""The records that are being handled, and the keys that were.

A lane is a task that takes one record after the other until none is left. One that comes back without having waited takes the
next at once, so quick work costs a task for a handful of records; while one waits, others take what is left. Each record is
handled in a context of its own: variables that one sets, the next does not see.

Work ends in one of four ways: handled, settled as a failure, cancelled because its partition went (somebody else runs it
again), or cancelled because its run was (then it counts as done). Nothing here knows of consumers or commits.
"""

import asyncio
import contextlib
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from aiokafka import ConsumerRecord, TopicPartition

from rollstream.eventlog.commits import Progress

MAX_SEEN = 20_000
"""Keys remembered for each owned partition of a topic that is read once."""

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


@dataclass(slots=True, eq=False)
class _Work:
    """One record until it has ended."""

    partition: TopicPartition
    progress: Progress
    record: "ConsumerRecord[Any, Any]"
    handle: Coroutine[Any, Any, None]
    lane: "asyncio.Task[None] | None" = None
    cancelled: bool = False
    unwanted: bool = False


class Running:
    """What runs in the lanes of one subscriber.

    Attributes:
        busy: records that were taken and have not ended.
    """

    def __init__(self, *, once: bool, ended: Callable[[], None], broke: Callable[[BaseException], None]) -> None:
        """
        Args:
            once: remember keys, so that a second record under one can be told.
            ended: called after each end, whatever it was.
            broke: told of what a handler raised; it never should.
        """
        self.busy = 0
        self._once = once
        self._ended_hook = ended
        self._broke = broke
        self._work: dict[TopicPartition, dict[int, _Work]] = {}
        self._unended: set[_Work] = set()
        self._untaken: deque[_Work] = deque()
        self._lanes: set[asyncio.Task[None]] = set()
        self._coming = 0
        self._context = copy_context()
        self._seen: dict[TopicPartition, dict[bytes, int]] = {}
        self._stopped: set[asyncio.Task[None]] = set()
        self._one_ended = asyncio.Event()

    def was_seen(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> bool:
        """Whether another record under the same key was started since the partition came."""
        if not self._once or not record.key:
            return False
        first = self._seen.get(partition, {}).get(record.key)
        return first is not None and first != record.offset

    def start(
        self,
        partition: TopicPartition,
        progress: Progress,
        record: "ConsumerRecord[Any, Any]",
        handle: Coroutine[Any, Any, None],
    ) -> None:
        """Run `handle`, which completes the record in `progress`, in a lane."""
        work = _Work(partition, progress, record, handle)
        of_partition = self._work.get(partition)
        if of_partition is None:
            of_partition = self._work[partition] = {}
        of_partition[record.offset] = work
        self._unended.add(work)
        self._untaken.append(work)
        self.busy += 1
        self._remember(partition, record)
        if not self._coming:
            self._open_lane()

    async def one_ends(self, timeout_s: float) -> None:
        """Wait until a record has ended, or so long."""
        self._one_ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._one_ended.wait()

    async def all_end(self, timeout_s: float) -> None:
        """Wait until every record has ended, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._unended:
                    self._one_ended.clear()
                    await self._one_ended.wait()

    def is_stopped(self) -> bool:
        """Whether the work of the current task was cancelled: whatever it ends with then is no failure of its record."""
        return asyncio.current_task() in self._stopped

    def cancel_partition(self, partition: TopicPartition) -> None:
        """Stop the work on a partition that went; whoever has it now runs it again."""
        self._seen.pop(partition, None)
        for work in self._work.pop(partition, {}).values():
            self._cancel(work)

    def cancel(self, partition: TopicPartition, offset: int) -> None:
        if work := self._work.get(partition, {}).get(offset):
            self._cancel(work)

    def cancel_run(self, run: str) -> None:
        """Stop the work of a run and count it as done: somebody else has written its end."""
        for work in list(self._unended):
            if run_of(work.record) == run:
                work.unwanted = True
                self._cancel(work)

    def cancel_idle(self) -> None:
        """Hand back what is `only_waiting`."""
        for work in list(self._unended):
            if work.lane in _idle:
                self._cancel(work)

    def cancel_all(self) -> None:
        for work in list(self._unended):
            self._cancel(work)

    def _cancel(self, work: _Work) -> None:
        if work.lane is not None:
            self._stopped.add(work.lane)
            work.lane.cancel()
        elif not work.cancelled:
            work.handle.close()
            work.cancelled = True
            self._end(work)

    def _open_lane(self, more: int = 1) -> None:
        self._coming += 1
        lane = asyncio.create_task(self._lane(more))
        self._lanes.add(lane)
        lane.add_done_callback(self._lane_ended)

    def _lane_ended(self, lane: "asyncio.Task[None]") -> None:
        self._lanes.discard(lane)
        self._stopped.discard(lane)
        if not lane.cancelled() and (error := lane.exception()):
            self._broke(error)

    async def _lane(self, more: int) -> None:
        """Take records until none is left.

        Args:
            more: lanes to open beside the first record. A lane that still finds records when it comes opens two: whoever
                opened it waits, so many wait, and lanes double at each turn of the event loop.
        """
        self._coming -= 1
        lane = asyncio.current_task()
        assert lane is not None
        while self._untaken:
            work = self._untaken.popleft()
            if work.cancelled:
                continue
            work.lane = lane
            while more and len(self._untaken) > self._coming:
                self._open_lane(more=2)
                more -= 1
            try:
                await _in_context(self._context.copy(), work.handle)
            except asyncio.CancelledError:
                work.cancelled = True
            except Exception as error:
                self._broke(error)
            finally:
                self._end(work)
            more = 0 if self._coming else 1
            if self.is_stopped() or lane.cancelling():
                if self._untaken and more:
                    self._open_lane()
                return

    def _end(self, work: _Work) -> None:
        self.busy -= 1
        self._unended.discard(work)
        record = work.record
        of_partition = self._work.get(work.partition)
        if of_partition is not None and of_partition.get(record.offset) is work:
            del of_partition[record.offset]
        if work.unwanted:
            work.progress.complete(record.offset)
        elif work.cancelled and record.key:
            self._seen.get(work.partition, {}).pop(record.key, None)
        self._one_ended.set()
        self._ended_hook()

    def _remember(self, partition: TopicPartition, record: "ConsumerRecord[Any, Any]") -> None:
        if self._once and record.key:
            seen = self._seen.setdefault(partition, {})
            seen[record.key] = record.offset
            if len(seen) > MAX_SEEN:
                del seen[next(iter(seen))]


@types.coroutine
def _in_context(context: Context, handle: Coroutine[Any, Any, None]) -> Generator[Any, None, None]:
    """Await `handle` in the current task, with each of its steps in `context`."""
    step: Callable[[Any], Any] = handle.send
    given: BaseException | None = None
    while True:
        try:
            awaited = context.run(step, given)
        except StopIteration:
            return
        try:
            yield awaited
        except BaseException as error:
            step, given = handle.throw, error
        else:
            step, given = handle.send, None


def run_of(record: "ConsumerRecord[Any, Any]") -> str | None:
    """The run that a record's headers name."""
    for name, value in record.headers:
        if name == "run_id":
            return str(value, "utf-8", "replace")
    return None
