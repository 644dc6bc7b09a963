"""The process that reads the log for the store: it can die, and so can who started it, at any moment."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import psutil
import pytest

from rollstream.errors import BrokerUnavailable, RollstreamError, UsageError
from rollstream.settings import Settings, StoreSettings
from rollstream.store.planned import LogInterrupted, PlannedLog, Request, open_planned
from services.store_worker.handler import Projector
from tests.events import Attempt, attempts, task_submitted
from tests.flow.flows import publish
from tests.flow.test_store_flow import eventually, projecting

pytestmark = pytest.mark.kafka

DEADLINE_S = 60.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"store": StoreSettings(publish_interval_s=0.2)})


def request_of(settings: Settings, **more: object) -> Request:
    assert settings.bootstrap_servers is not None
    return Request(settings.bootstrap_servers, settings.kafka, **more)  # type: ignore[arg-type]


async def gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


def planners() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [one for one in found if "rollstream.store.planner" in one.cmdline()]


async def records_of(log: PlannedLog, wanted: int) -> int:
    count = 0
    async with asyncio.timeout(DEADLINE_S):
        while count < wanted:
            count += (await log.next()).batch.records
    return count


async def test_batches_go_on_where_the_positions_are(settings: Settings, topics: None) -> None:
    first, second = attempts(task_submitted(attempts=2), 1.0, 0.0)
    await publish(settings, *first.events())
    async with open_planned(request_of(settings)) as log:
        async with asyncio.timeout(DEADLINE_S):
            while not (planned := await log.next()).batch.records:
                pass
            batches = [planned.batch]
            while sum(batch.records for batch in batches) < 5:
                batches.append((await log.next()).batch)
    await publish(settings, *second.events())
    async with open_planned(request_of(settings, positions=batches[-1].offsets)) as log:
        assert await records_of(log, 5) == 5


async def test_an_end_is_kept_to_and_said(settings: Settings, topics: None) -> None:
    await publish(settings, *Attempt().events())
    async with open_planned(request_of(settings, until={}, most_records=2)) as log:
        assert [(one.batch.records, one.is_last) async for one in log.batches()] == [(0, True)]
    every = {(topic, partition): 1 for topic in ("verdicts", "rollouts.scored") for partition in range(3)}
    async with open_planned(request_of(settings)) as log:
        await records_of(log, 5)
    found = dict.fromkeys(every, 1)
    async with open_planned(request_of(settings, until=await _held(settings, found), most_records=1)) as log:
        planned = [one async for one in log.batches()]
    assert sum(one.batch.records for one in planned) == 2
    assert [one.is_last for one in planned] == [*[False] * (len(planned) - 1), True]


async def _held(settings: Settings, positions: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    """Those of `positions` that the log reaches to."""
    async with open_planned(request_of(settings)) as log:
        offsets: dict[tuple[str, int], int] = {}
        async with asyncio.timeout(DEADLINE_S):
            while sum(offsets.values()) < 5:
                offsets |= (await log.next()).batch.offsets
    return {position: end for position, end in positions.items() if offsets.get(position, 0) >= end}


async def test_a_killed_reader_is_replaced_and_nothing_is_missing(
    settings: Settings, topics: None, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_submitted(attempts=4)
    some = attempts(task, 1.0, 0.0, 1.0, 0.0)
    async with projecting(settings):
        for number, attempt in enumerate(some, 1):
            await publish(settings, *attempt.events())
            await eventually(settings, "SELECT count(*), count(DISTINCT event_id) FROM events", (5 * number, 5 * number))
            for planner in planners():
                planner.kill()
    assert "the process that reads the log was ended by signal 9" in caplog.text


async def test_closing_ends_the_reader_whatever_it_does(settings: Settings, topics: None) -> None:
    async with open_planned(request_of(settings, gather_s=3600.0)) as log:
        waiting = asyncio.create_task(log.next())
        await asyncio.sleep(2)
        assert not waiting.done()
        began = time.monotonic()
        await log.close()
        with pytest.raises(RollstreamError):
            await waiting
    assert not psutil.pid_exists(log.pid)
    assert time.monotonic() - began < 3600.0


async def test_a_reader_ends_with_who_started_it(settings: Settings, topics: None) -> None:
    program = """
        import asyncio, sys
        from rollstream.settings import KafkaSettings
        from rollstream.store.planned import Request, open_planned

        async def main():
            kafka = KafkaSettings.model_validate_json(sys.argv[2])
            async with open_planned(Request(sys.argv[1], kafka, gather_s=3600.0)) as log:
                print(log.pid, flush=True)
                await log.next()

        asyncio.run(main())
    """
    arguments = ["-c", textwrap.dedent(program), str(settings.bootstrap_servers), settings.kafka.model_dump_json()]
    starter = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    pid = int(await starter.stdout.readline())
    try:
        await asyncio.sleep(1)
        assert psutil.pid_exists(pid)
        starter.kill()
        await starter.wait()
        await gone(pid)
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


async def test_a_reader_that_stumbles_over_itself_is_no_outage(capfd: pytest.CaptureFixture[str]) -> None:
    async with open_planned("no request") as log:
        with pytest.raises(
            RollstreamError, match="the process that reads the log ended with 1: what it said stands above"
        ) as had:
            await log.next()
    assert not isinstance(had.value, LogInterrupted)
    assert "AttributeError" in capfd.readouterr().err


async def test_what_it_cannot_do_it_says(settings: Settings, topics: None) -> None:
    nobody = settings.model_copy(update={"bootstrap_servers": "127.0.0.1:9"})
    async with open_planned(request_of(nobody)) as log:
        with pytest.raises(BrokerUnavailable, match=r"no Kafka broker answers at 127\.0\.0\.1:9"):
            await log.next()
    async with open_planned(request_of(settings, positions={("verdicts", 0): 7})) as log:
        with pytest.raises(UsageError, match="has read verdicts/0 up to offset 7, but the log ends at 0"):
            await log.next()


async def test_a_worker_ends_its_reader(settings: Settings, topics: None) -> None:
    projector = Projector(settings)
    await projector.start()
    running = asyncio.create_task(projector.run())
    try:
        await _until(lambda: bool(planners()))
    finally:
        running.cancel()
        await asyncio.wait([running])
        await projector.close()
    assert planners() == []


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.05)
