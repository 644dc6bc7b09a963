"""Health of workers on a real broker: it tells what is in hand, and turns when a loop is blocked or a membership has ended."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollstream.eventlog.apps import WorkerApp
from rollstream.eventlog.ownership import WorkerStuck
from rollstream.eventlog.reading import Record
from rollstream.settings import Settings
from tests.flow.commands import environment_of
from tests.kafka.test_lanes import app_for, lanes_of, running, send, until

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(120)]


async def test_trap_13_what_is_in_hand_and_how_long_the_mark_has_stood_still_is_told(settings: Settings) -> None:
    go = asyncio.Event()

    async def handler(record: Record) -> None:
        if record.value == b"0":
            await go.wait()

    await send(settings, 60)
    app = app_for(settings, handler)
    assert isinstance(app, WorkerApp)
    async with running(app):
        await until(lambda: lanes_of(app)._started == 60 and lanes_of(app).busy == 1)
        await until(lambda: app.health().lanes[0].mark_age_s > 0.5)
        (busy,) = app.health().lanes
        go.set()
        await until(lambda: app.health().lanes[0].span == 0)
        await until(lambda: app.health().lanes[0].commit_age_s == 0)
        (idle,) = app.health().lanes
    assert (busy.partitions, busy.in_flight, busy.out_for_s) == (3, 1, 0.0)
    assert busy.span > 5
    assert (idle.in_flight, idle.mark_age_s) == (0, 0.0)


async def test_a_membership_that_has_ended_breaks_the_worker_which_says_so(settings: Settings) -> None:
    async def handler(record: Record) -> None: ...

    app = app_for(settings, handler)
    assert isinstance(app, WorkerApp)
    async with running(app):
        assert app.health().failure is None
        lanes_of(app)._consumer()._coordinator._coordination_task.cancel()
        async with asyncio.timeout(60):
            await app.broken.wait()
        assert isinstance(app.failure, WorkerStuck)
        assert "has ended" in (app.health().failure or "")


@asynccontextmanager
async def process(settings: Settings, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    made = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *words,
        env=environment_of(settings),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.send_signal(signal.SIGCONT)
            made.terminate()
            await made.communicate()


async def asked(settings: Settings, *words: str) -> tuple[int, str]:
    """Exit code and words of the health check."""
    async with process(settings, "services.health", *words) as check:
        out, err = await check.communicate()
    return check.returncode or 0, (out + err).decode()


async def test_a_health_check_finds_a_worker_well_then_stopped_then_well_again_then_gone(settings: Settings) -> None:
    assert await asked(settings) == (1, "error: no worker runs here with this data directory\n")
    async with process(settings, "services", "env_worker") as worker:
        assert worker.stderr is not None
        async with asyncio.timeout(60):
            while b'"ready"' not in await worker.stderr.readline():
                pass
        code, said = await asked(settings, "--live", "env_worker")
        assert (code, said.splitlines()[0]) == (0, f"env_worker (pid {worker.pid})"), said
        assert f"{settings.kafka.topic_prefix}env_worker: " in said
        code, said = await asked(settings, "agent_worker")
        assert (code, said.splitlines()[-1]) == (1, "error: no agent_worker answers")
        worker.send_signal(signal.SIGSTOP)
        code, said = await asked(settings, "--live")
        assert (code, "its event loop is blocked, or it is stopped" in said) == (1, True), said
        worker.send_signal(signal.SIGCONT)
        assert (await asked(settings, "--live"))[0] == 0
    assert (await asked(settings))[0] == 1
