"""Offsets that an operator moves, while a worker runs and while none does: work is repeated or skipped as told, never lost."""

import asyncio

import pytest
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import UnknownMemberIdError

from rollstream.eventlog.lanes import LaneSubscriber
from rollstream.eventlog.reading import Record
from rollstream.settings import Settings
from tests.kafka.group_admin import operator_of
from tests.kafka.test_lanes import app_for, read_all, running, send, until, until_nothing_is_open
from topics.catalogue import TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(120)]


class Held:
    """A handler that waits to be let go."""

    def __init__(self) -> None:
        self.begun: list[bytes | None] = []
        self.ended: list[bytes | None] = []
        self.go = asyncio.Event()

    async def __call__(self, record: Record) -> None:
        self.begun.append(record.value)
        await self.go.wait()
        self.ended.append(record.value)


async def test_a_group_at_work_takes_no_offsets_of_an_operator(settings: Settings) -> None:
    work = Held()
    await send(settings, 20)
    async with operator_of(settings) as operator, running(app_for(settings, work)):
        await until(lambda: len(work.begun) == 20)
        for offset in (0, 100):
            with pytest.raises(UnknownMemberIdError):
                await operator.set_offsets(dict.fromkeys(operator.partitions(TASKS_IN), offset))
        work.go.set()
        await until_nothing_is_open(settings)
    assert len(work.ended) == len(work.begun) == 20


async def test_a_worker_that_was_thrown_out_and_set_back_goes_on_with_what_it_has_in_hand(settings: Settings) -> None:
    """What it knows to be done is done, whatever the offsets say."""
    work = Held()
    await send(settings, 20)
    app = app_for(settings, work)
    async with operator_of(settings) as operator, running(app):
        await until(lambda: len(work.begun) == 20)
        await operator.evict_and_set(dict.fromkeys(operator.partitions(TASKS_IN), 0))
        work.go.set()
        await until_nothing_is_open(settings)
        await send(settings, 5)
        await until(lambda: len(work.ended) == 25)
        await until_nothing_is_open(settings)
    assert len(work.begun) == 25


async def test_a_worker_that_was_thrown_out_and_set_forward_drops_what_it_is_to_skip_and_takes_what_comes(
    settings: Settings,
) -> None:
    work = Held()
    await send(settings, 20)
    ends: dict[int, int] = {}
    for record in await read_all(settings, TASKS_IN):
        ends[record.partition] = record.offset + 1
    app = app_for(settings, work)
    (lanes,) = [one for one in app.brokers[0].subscribers if isinstance(one, LaneSubscriber)]
    async with operator_of(settings) as operator, running(app):
        await until(lambda: len(work.begun) == 20)
        forward = {tp: ends.get(tp.partition, 0) for tp in operator.partitions(TASKS_IN)}
        await operator.evict_and_set(forward)
        await until(lambda: lanes.busy == 0)
        work.go.set()
        await send(settings, 5)
        await until(lambda: len(work.ended) == 5)
        await until_nothing_is_open(settings)
    assert len(work.begun) == 25


async def test_offsets_set_beyond_the_end_skip_nothing_that_comes_later(settings: Settings) -> None:
    """Also what a commit is after a broker has lost the end of its log."""
    work = Held()
    work.go.set()
    await send(settings, 20)
    async with operator_of(settings) as operator:
        await operator.set_offsets(dict.fromkeys(operator.partitions(TASKS_IN), 1_000))
        async with running(app_for(settings, work)):
            await send(settings, 7)
            await until(lambda: len(work.ended) == 7)
            await until_nothing_is_open(settings)
    assert sorted(work.ended) == sorted(str(number).encode() for number in range(7))


async def test_offsets_set_before_the_start_of_a_log_that_was_cut_begin_at_its_start(settings: Settings) -> None:
    work = Held()
    work.go.set()
    await send(settings, 30)
    records = await read_all(settings, TASKS_IN)
    async with operator_of(settings) as operator:
        await operator._admin.delete_records({tp: RecordsToDelete(2) for tp in operator.partitions(TASKS_IN)})
        await operator.set_offsets(dict.fromkeys(operator.partitions(TASKS_IN), 0))
        async with running(app_for(settings, work)):
            left = [record.value for record in records if record.offset >= 2]
            await until(lambda: len(work.ended) == len(left))
    assert sorted(work.ended) == sorted(left)
