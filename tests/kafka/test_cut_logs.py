"""Logs that are cut under a worker that runs: it goes on at their new start, and says what it never saw."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka.admin import RecordsToDelete

from rollstream.eventlog.apps import WorkerApp
from rollstream.eventlog.ownership import LogLost
from rollstream.settings import Settings
from tests.kafka.group_admin import Operator, operator_of
from tests.kafka.test_lanes import _crash, app_for, lanes_of, read_all, running, send, until
from tests.kafka.test_moved_offsets import Held
from topics.catalogue import TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(120)]

Place = tuple[int, int]
"""Partition and offset."""


async def cut(operator: Operator, before: dict[int, int]) -> None:
    """Delete what is before an offset of each partition, as an operator or the retention does."""
    partitions = {tp: RecordsToDelete(before[tp.partition]) for tp in operator.partitions(TASKS_IN) if tp.partition in before}
    await operator._admin.delete_records(partitions)


async def values(settings: Settings) -> dict[Place, bytes | None]:
    return {(record.partition, record.offset): record.value for record in await read_all(settings, TASKS_IN)}


def ends_of(places: dict[Place, bytes | None]) -> dict[int, int]:
    ends: dict[int, int] = {}
    for partition, offset in places:
        ends[partition] = max(ends.get(partition, 0), offset + 1)
    return ends


async def until_committed(operator: Operator, ends: dict[int, int]) -> None:
    async with asyncio.timeout(30):
        while {tp.partition: commit.offset for tp, commit in (await operator.committed()).items() if commit.offset > 0} != ends:
            await asyncio.sleep(0.1)


def told_gone(caplog: pytest.LogCaptureFixture) -> list[Place]:
    """Every offset that a warning names as gone."""
    gone = []
    for record in caplog.records:
        if found := re.fullmatch(r".*tasks\.in/(\d+): the log was cut .* gone: offsets (.*)", record.getMessage()):
            assert record.levelno == logging.WARNING
            for span in found[2].split(", "):
                first, _, last = span.partition("-")
                gone += [(int(found[1]), offset) for offset in range(int(first), int(last or first) + 1)]
    return gone


@asynccontextmanager
async def busy(settings: Settings, work: Held) -> AsyncIterator[tuple[WorkerApp, dict[Place, bytes | None], Operator]]:
    """A worker with 60 records before it: all its lanes are busy, and nothing more is fetched."""
    await send(settings, 60)
    before = await values(settings)
    app = app_for(settings, work, lanes=4)
    async with operator_of(settings) as operator, running(app):
        await until(lambda: lanes_of(app)._held)
        yield app, before, operator


async def test_a_log_cut_ahead_of_a_busy_worker_is_gone_on_with_at_its_start_and_the_gap_is_told(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    work = Held()
    async with busy(settings, work) as (_, before, operator):
        await cut(operator, dict.fromkeys(range(3), 8))
        work.go.set()
        await send(settings, 5)
        after = await values(settings)
        await until(lambda: set(after.values()) <= set(work.ended))
        await until_committed(operator, ends_of(after))
    gone = [before[place] for place in told_gone(caplog)]
    ended = [value for value in work.ended if value is not None]
    assert gone
    assert sorted(gone + ended) == sorted([*before.values(), *(str(number).encode() for number in range(5))])
    assert all(offset < 8 for _, offset in told_gone(caplog))


async def test_a_log_that_was_cut_to_its_end_is_committed_to_its_end_though_nothing_comes(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    work = Held()
    async with busy(settings, work) as (app, before, operator):
        await cut(operator, ends_of(before))
        work.go.set()
        await until_committed(operator, ends_of(before))
        assert sorted([before[place] for place in told_gone(caplog)] + work.ended) == sorted(before.values())
        await send(settings, 9)
        await until(lambda: len(work.begun) + len(told_gone(caplog)) == 69)
    assert lanes_of(app).health().span == 0


async def test_what_runs_below_the_cut_holds_the_mark_until_it_has_ended(settings: Settings) -> None:
    work = Held()
    await send(settings, 12)
    begun = await values(settings)
    app = app_for(settings, work)
    async with operator_of(settings) as operator, running(app):
        await until(lambda: len(work.begun) == 12)
        await cut(operator, ends_of(begun))
        await send(settings, 6)
        await until(lambda: len(work.begun) == 18)
        await lanes_of(app).commit_now()
        assert {commit.offset for commit in (await operator.committed()).values()} <= {0, -1}
        work.go.set()
        await until_committed(operator, ends_of(begun | await values(settings)))
    assert len(work.ended) == len(work.begun) == 18


async def test_what_was_running_when_its_worker_died_and_is_gone_is_told_and_nothing_else_runs_again(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    work, done = Held(), Held()
    done.go.set()

    async def one_hangs(record: Any) -> None:
        await (work if record.value == b"0" else done)(record)

    await send(settings, 30)
    places = await values(settings)
    crashed = app_for(settings, one_hangs)
    await crashed.start()
    await until(lambda: len(done.ended) == 29)
    await lanes_of(crashed).commit_now()
    await _crash(crashed, lanes_of(crashed))
    async with operator_of(settings) as operator:
        await cut(operator, ends_of(places))
        again = Held()
        again.go.set()
        async with running(app_for(settings, again)):
            await until_committed(operator, ends_of(places))
            await send(settings, 3)
            await until(lambda: len(again.ended) == 3)
    assert [places[place] for place in told_gone(caplog)] == [b"0"]
    assert len(again.begun) == 3


async def test_a_log_that_ends_before_what_is_to_be_read_of_it_ends_the_worker_with_the_reason(settings: Settings) -> None:
    """As after a broker has lost the end of its log: what comes next has offsets that were done."""
    work = Held()
    work.go.set()
    await send(settings, 30)
    ends = ends_of(await values(settings))
    app = app_for(settings, work)
    assert isinstance(app, WorkerApp)
    await app.start()
    await until(lambda: len(work.ended) == 30)
    consumer = lanes_of(app)._consumer()
    partition = next(iter(consumer.assignment()))
    consumer.seek(partition, 1_000)
    async with asyncio.timeout(60):
        await app.broken.wait()
    await app.stop()
    assert isinstance(app.failure, LogLost)
    number = partition.partition
    assert f"partition {number} ends at {ends.get(number, 0)}, before offset 1000 that is to be read" in str(app.failure)
    async with running(app_for(settings, work)):
        await send(settings, 6)
        await until(lambda: len(work.ended) == 36)
    assert len(work.begun) == 36
