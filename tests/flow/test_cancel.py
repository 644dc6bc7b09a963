"""Runs that are called off: their end is written at once, and stays."""

import asyncio
import time
from collections import Counter

import pytest

from rollstream.settings import Settings
from rollstream.testing.model_server import Hang, Reply, Request, ScriptedModelServer, Status, always
from schemas.run import RunCancelled, RunResumed
from tests.flow.commands import command, until_nothing_is_open
from tests.flow.flows import pipeline, publish, read_events, terminal
from tests.flow.operations import FOUR, records, served, tasks
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(240)]


async def test_a_run_with_a_backlog_of_thousands_ends_within_seconds(settings: Settings) -> None:
    def script(request: Request) -> Reply:
        return Hang() if "wait" in request.last_text else FOUR(request)

    async with ScriptedModelServer(script) as server:
        settings = served(settings, server)
        limits = settings.limits.model_copy(update={"max_concurrent_episodes": 8})
        settings = settings.model_copy(update={"limits": limits})
        ended, endless = tasks(5), [task(f"wait {number}", "4") for number in range(3_000)]
        async with pipeline(settings):
            await publish(settings, *ended)
            await terminal(settings, 5)
            await publish(settings, *endless)
            await server.wait_for_requests(5 + 8)
            begun = time.monotonic()
            cancelled = await command(settings, "cancel", "r")
            took_s = time.monotonic() - begun
            assert cancelled.code == 0, cancelled.said
            assert "3000 of 3005 attempts had not ended, and are recorded as cancelled" in cancelled.out
            assert Counter(record.status for record in await records(settings)) == {"completed": 5, "cancelled": 3_000}
            await publish(settings, task("2 + 2", "4", run="other"))
            async with asyncio.timeout(30):
                while not [record for record in await records(settings) if record.run == "other"]:
                    await asyncio.sleep(0.1)
            await until_nothing_is_open(settings)
        # A lane that frees itself while the cancellation is on its way takes another episode.
        assert len(server.requests) <= 5 + 8 + 8 + 1
    assert took_s < settings.models["default"].timeout_s / 10, "no call that hangs was waited for"
    again = await command(settings, "cancel", "r")
    assert "all 3005 attempts had ended before" in again.out
    assert len(await records(settings)) == 3_006
    assert len(await read_events(settings, RunCancelled)) == 1
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said
    one = next(iter(await records(settings, "cancelled")))
    assert (one.reward, one.success, one.mask.loss, one.mask.baseline) == (None, None, True, True)


async def test_a_cancelled_attempt_stays_so_until_somebody_asks_for_another_round(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, *tasks(4))
        assert "4 of 4 attempts" in (await command(settings, "cancel", "r")).out
        too_soon = asyncio.create_task(command(settings, "resume", "r"))
        async with pipeline(settings):
            resumed = await too_soon
            assert resumed.code == 0, resumed.said
            assert "goes on (it was cancelled)" in resumed.out
            assert "4 attempts stay cancelled" in resumed.out
            assert len(server.requests) == 0
            again = await command(settings, "resume", "r", "--cancelled")
            assert "4 attempts are driven again in a new round, 4 of them from their tasks" in again.out
            scored = await terminal(settings, 8)
    assert Counter((record.round, record.status) for record in scored) == {(0, "cancelled"): 4, (1, "completed"): 4}
    assert (await command(settings, "audit", "r")).code == 0


async def test_a_cancelled_run_is_not_resumed_over_a_backlog_that_would_then_run(settings: Settings) -> None:
    await publish(settings, *tasks(2))
    await command(settings, "cancel", "r")
    resumed = await command(settings, "resume", "r")
    assert resumed.code == 2
    assert "workers have not yet passed what it left behind (2 records)" in resumed.err
    assert await read_events(settings, RunResumed) == []


async def test_a_resumed_attempt_that_is_cancelled_ends_in_its_new_round(settings: Settings) -> None:
    async with ScriptedModelServer(always(Status(500))) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4"))
            await terminal(settings, 1)
    await command(settings, "resume", "r")
    assert "1 of 1 attempts" in (await command(settings, "cancel", "r")).out
    assert [(record.round, record.status) for record in await records(settings)] == [(0, "errored"), (1, "cancelled")]
    assert (await command(settings, "audit", "r")).code == 0
