"""Loss and races that others have reported of the same technique, on a real broker.

They are named by their numbers at Confluent's Parallel Consumer. Schedules that no broker can be made to follow are in
`tests/chaos`, on a group in memory.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from aiokafka.errors import OffsetMetadataTooLargeError

from rollstream.eventlog import ownership
from rollstream.eventlog.commits import METADATA_LIMIT, Commit, decode_done, encode_done, tagged
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.settings import Settings
from tests.kafka.group_admin import NOBODY, Operator, operator_of
from tests.kafka.test_lanes import app_for, lanes_of, running, send, until
from topics.catalogue import TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(120)]

Place = tuple[int, int]


class Work:
    """Handlers that wait to be let go, and what they have really done."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: Counter[Place] = Counter()
        self.done: Counter[Place] = Counter()
        self.rng = random.Random(1)

    async def held(self, record: Record) -> None:
        self.begun[record.partition, record.offset] += 1
        await self.go.wait()
        self.done[record.partition, record.offset] += 1

    async def quick(self, record: Record) -> None:
        self.begun[record.partition, record.offset] += 1
        await asyncio.sleep(self.rng.random() * 0.05)
        self.done[record.partition, record.offset] += 1

    async def half(self, record: Record) -> None:
        """Every other record, by chance, at once."""
        await (self.quick if self.rng.random() < 0.5 else self.held)(record)


@asynccontextmanager
async def witnessed(operator: Operator, work: Work) -> AsyncIterator[list[int]]:
    """Meanwhile, no commit ever tells of a record that nobody has handled. Yields the lengths of metadata that were seen."""
    lengths: list[int] = []

    async def look() -> None:
        for tp, commit in (await operator.committed()).items():
            told = {*range(max(0, commit.offset)), *decode_done(commit.offset, commit.metadata)}
            unhandled = {offset for offset in told if not work.done[tp.partition, offset]}
            assert not unhandled, f"{tp} {commit}: {sorted(unhandled)} were never handled"
            lengths.append(len(commit.metadata))

    async def keep_looking() -> None:
        while True:
            await look()
            await asyncio.sleep(0.02)

    looking = asyncio.create_task(keep_looking())
    try:
        yield lengths
    finally:
        looking.cancel()
        (result,) = await asyncio.gather(looking, return_exceptions=True)
    if isinstance(result, AssertionError):
        raise result
    await look()


async def all_done(operator: Operator, count: int) -> None:
    """Wait until the group has committed `count` records and nothing beyond."""
    async with asyncio.timeout(60):
        while sum(max(0, commit.offset) for commit in (await operator.committed()).values()) < count:
            await asyncio.sleep(0.05)


async def test_826_what_is_in_flight_when_partitions_go_is_run_once_to_its_end_by_somebody(settings: Settings) -> None:
    work = Work()
    await send(settings, 90)
    async with operator_of(settings) as operator, witnessed(operator, work), running(app_for(settings, work.held, lanes=90)):
        await until(lambda: len(work.begun) == 90)
        async with running(app_for(settings, work.held, lanes=90)):
            await until(lambda: sum(work.begun.values()) > 100)
            work.go.set()
            await until(lambda: len(work.done) == 90)
            await all_done(operator, 90)
    assert set(work.done.values()) == {1}


async def test_827_what_was_fetched_and_not_begun_when_partitions_go_is_not_lost(settings: Settings) -> None:
    work = Work()
    await send(settings, 90)
    async with operator_of(settings) as operator, witnessed(operator, work):
        leaver = app_for(settings, work.held, lanes=5)
        await leaver.start()
        await until(lambda: len(work.begun) == 5)
        async with running(app_for(settings, work.held, lanes=5)):
            await until(lambda: sum(work.begun.values()) >= 10)
            work.go.set()
            await leaver.stop()
            await until(lambda: len(work.done) == 90)
            await all_done(operator, 90)
    assert set(work.done.values()) == {1}


async def test_894_offset_and_finished_set_of_every_commit_are_of_one_moment(settings: Settings) -> None:
    hasty = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"commit_interval_s": 0.005})})
    work = Work()
    await send(hasty, 900)
    async with operator_of(hasty) as operator, witnessed(operator, work) as lengths, running(app_for(hasty, work.quick)):
        await all_done(operator, 900)
    assert set(work.done.values()) == {1}
    assert len(set(lengths)) > 1, "no commit ever told of a record beyond its mark"


async def test_647_the_broker_takes_the_fullest_metadata_that_there_is_and_nothing_longer(settings: Settings) -> None:
    rng = random.Random(647)
    fullest = tagged(Commit(0, encode_done(0, {offset for offset in range(1, 200_000) if rng.random() < 0.5})), uuid4())
    assert METADATA_LIMIT - 400 < len(fullest.metadata) <= METADATA_LIMIT
    async with operator_of(settings) as operator:
        place = operator.partitions(TASKS_IN)[0]
        await operator.offsets.commit(operator.group, NOBODY, {place: fullest})
        assert (await operator.committed())[place] == fullest
        with pytest.raises(OffsetMetadataTooLargeError):
            await operator.offsets.commit(operator.group, NOBODY, {place: Commit(0, "x" * (METADATA_LIMIT + 1))})


async def test_647_a_partition_whose_metadata_fills_up_waits_alone_and_goes_on_when_it_has_room(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "SOFT_LIMIT", 200)
    work = Work()
    app = app_for(settings, work.half, lanes=10_000)
    async with operator_of(settings) as operator, witnessed(operator, work), running(app):
        await send_under(settings, [b"a"] * 3_000)
        await until(lambda: bool(lanes_of(app).ownership.crowded))
        (full,) = lanes_of(app).ownership.crowded
        await send_under(settings, [str(number).encode() for number in range(30)])
        others = [tp.partition for tp in operator.partitions(TASKS_IN) if tp != full]
        await until(lambda: {partition for partition, _ in work.begun} >= set(others))
        work.go.set()
        await until(lambda: len(work.done) == 3_030, 60)
        await all_done(operator, 3_030)
        await until(lambda: not lanes_of(app).ownership.crowded)
    assert set(work.done.values()) == {1}


async def send_under(settings: Settings, keys: Sequence[bytes]) -> None:
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await asyncio.gather(*(producer.publish_raw(TASKS_IN.name, key, b"x") for key in keys))


async def test_857_work_that_waited_for_a_lane_flows_on_after_rebalances(settings: Settings) -> None:
    work = Work()
    await send(settings, 60)
    app = app_for(settings, work.held, lanes=4)
    async with operator_of(settings) as operator, witnessed(operator, work), running(app):
        await until(lambda: lanes_of(app)._held)
        owned = lanes_of(app).ownership
        for _ in range(2):
            rebalances = owned.rebalances
            async with running(app_for(settings, work.held, lanes=4)):
                await until(lambda: owned.rebalances != rebalances and owned.opened.is_set())  # noqa: B023
            await until(lambda: len(owned.parts) == 3)
        work.go.set()
        await until(lambda: len(work.done) == 60)
        await all_done(operator, 60)
    assert len(work.done) == 60
