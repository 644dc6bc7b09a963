"""Lanes that take one record after the other: everything that was taken ends once, whatever its neighbours do."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition

from rollstream.eventlog.commits import Progress
from rollstream.eventlog.running import Running, only_waiting

PARTITION = TopicPartition("t", 0)
seen_by_the_last: ContextVar[int | None] = ContextVar("seen_by_the_last", default=None)

Handler = Callable[[int], Awaitable[None]]


class Lanes:
    """What runs, and what became of it."""

    def __init__(self) -> None:
        self.progress = Progress(0)
        self.broke: list[BaseException] = []
        self.ends = 0
        self.running = Running(once=True, ended=self._ended, broke=self.broke.append)

    def _ended(self) -> None:
        self.ends += 1

    def start(self, handler: Handler, *offsets: int, run: bytes = b"r") -> None:
        async def handle(offset: int) -> None:
            await handler(offset)
            self.progress.complete(offset)

        for offset in offsets:
            assert self.progress.offer(offset)
            key = str(offset).encode()
            headers: Any = (("run_id", run),)
            record = ConsumerRecord("t", 0, offset, 0, 0, key, b"", None, 0, 0, headers)
            self.running.start(PARTITION, self.progress, record, handle(offset))

    @property
    def mark(self) -> int:
        commit = self.progress.next_commit()
        assert commit is not None
        return commit.offset


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_quick_records_share_a_lane_and_do_not_see_what_others_have_set() -> None:
    lanes = Lanes()
    found: list[int | None] = []
    tasks: set[Any] = set()

    async def handler(offset: int) -> None:
        found.append(seen_by_the_last.get())
        seen_by_the_last.set(offset)
        tasks.add(asyncio.current_task())

    lanes.start(handler, *range(100))
    await lanes.running.all_end(10)
    assert found == [None] * 100
    assert len(tasks) == 1
    assert (lanes.mark, lanes.ends, lanes.running.busy) == (100, 100, 0)


async def test_what_a_record_has_set_is_there_after_it_has_waited_and_in_the_tasks_that_it_makes() -> None:
    lanes = Lanes()
    found: list[tuple[int, int | None, int | None]] = []

    async def look() -> int | None:
        return seen_by_the_last.get()

    async def handler(offset: int) -> None:
        seen_by_the_last.set(offset)
        await asyncio.sleep(0)
        async with asyncio.TaskGroup() as group:
            child = group.create_task(look())
        found.append((offset, seen_by_the_last.get(), child.result()))

    lanes.start(handler, *range(30))
    await lanes.running.all_end(10)
    assert found == [(offset, offset, offset) for offset in range(30)]
    assert seen_by_the_last.get() is None


async def test_records_that_wait_do_not_keep_others_from_starting() -> None:
    lanes = Lanes()
    go = asyncio.Event()
    begun: list[int] = []

    async def handler(offset: int) -> None:
        begun.append(offset)
        await go.wait()

    lanes.start(handler, *range(1_000))
    await turns()
    assert begun == list(range(1_000))
    go.set()
    await lanes.running.all_end(10)
    assert lanes.mark == 1_000


async def test_a_timeout_of_one_record_is_not_the_next_ones() -> None:
    lanes = Lanes()
    timed_out: list[int] = []

    async def handler(offset: int) -> None:
        try:
            async with asyncio.timeout(0 if offset % 2 else 10):
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except TimeoutError:
            timed_out.append(offset)

    lanes.start(handler, *range(20))
    await lanes.running.all_end(10)
    assert sorted(timed_out) == list(range(1, 20, 2))
    assert lanes.mark == 20


@pytest.mark.parametrize("waits", [True, False], ids=["running", "not begun"])
async def test_the_records_of_a_cancelled_run_count_as_done_and_the_others_go_on(waits: bool) -> None:
    lanes = Lanes()
    ended: list[int] = []

    async def handler(offset: int) -> None:
        await asyncio.sleep(0.01)
        ended.append(offset)

    lanes.start(handler, 0, 1, run=b"cancelled")
    lanes.start(handler, 2, 3)
    lanes.start(handler, 4, run=b"cancelled")
    if waits:
        await turns()
    lanes.running.cancel_run("cancelled")
    await lanes.running.all_end(10)
    assert sorted(ended) == [2, 3]
    assert (lanes.mark, lanes.ends, lanes.running.busy) == (5, 5, 0)


@pytest.mark.parametrize("waits", [True, False], ids=["running", "not begun"])
async def test_the_records_of_a_partition_that_went_are_not_done_and_may_come_again(waits: bool) -> None:
    lanes = Lanes()

    async def handler(offset: int) -> None:
        await asyncio.sleep(3_600)

    lanes.start(handler, 0, 1)
    if waits:
        await turns()
    lanes.running.cancel_partition(PARTITION)
    await lanes.running.all_end(10)
    assert (lanes.mark, lanes.running.busy) == (0, 0)
    again = ConsumerRecord("t", 0, 9, 0, 0, b"0", b"", None, 0, 0, ())
    assert not lanes.running.was_seen(PARTITION, again)


async def test_cancelling_one_record_leaves_what_was_not_begun_to_other_lanes() -> None:
    lanes = Lanes()
    ended: list[int] = []

    async def handler(offset: int) -> None:
        if offset == 0:
            await asyncio.sleep(3_600)
        ended.append(offset)

    lanes.start(handler, 0)
    await turns()
    lanes.running.cancel(PARTITION, 0)
    lanes.start(handler, 1, 2)
    await lanes.running.all_end(10)
    assert ended == [1, 2]
    assert lanes.mark == 0


async def test_a_record_that_shrugs_its_cancellation_off_ends_as_itself_and_its_lane_with_it() -> None:
    lanes = Lanes()
    ended: list[int] = []

    async def handler(offset: int) -> None:
        if offset == 0:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                lanes.start(handler, 1, 2)
        await asyncio.sleep(0)
        ended.append(offset)

    lanes.start(handler, 0)
    await turns()
    lanes.running.cancel(PARTITION, 0)
    await lanes.running.all_end(10)
    assert sorted(ended) == [0, 1, 2]
    assert lanes.mark == 3


async def test_what_a_handler_raises_is_told_and_stays_undone() -> None:
    lanes = Lanes()

    async def handler(offset: int) -> None:
        if offset == 1:
            raise ValueError("boom")

    lanes.start(handler, 0, 1, 2)
    await lanes.running.all_end(10)
    assert [repr(error) for error in lanes.broke] == ["ValueError('boom')"]
    assert (lanes.running.busy, lanes.progress.running) == (0, frozenset({1}))


async def test_only_what_says_that_it_only_waits_is_handed_back_at_once() -> None:
    lanes = Lanes()
    go = asyncio.Event()

    async def patient(offset: int) -> None:
        with only_waiting():
            await asyncio.sleep(3_600)

    async def at_work(offset: int) -> None:
        await go.wait()

    lanes.start(patient, 0)
    lanes.start(at_work, 1)
    await turns()
    lanes.running.cancel_idle()
    await turns()
    assert lanes.running.busy == 1
    go.set()
    await lanes.running.all_end(10)
    assert lanes.progress.running == {0}


async def test_waiting_for_all_ends_has_a_deadline() -> None:
    lanes = Lanes()

    async def handler(offset: int) -> None:
        await asyncio.sleep(3_600)

    lanes.start(handler, 0, 1)
    await lanes.running.all_end(0.01)
    assert lanes.running.busy == 2
    lanes.running.cancel_all()
    await lanes.running.all_end(10)
    assert lanes.running.busy == 0
