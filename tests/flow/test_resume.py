"""Runs that go on: what was errored or cancelled gets another round, what was paused is told and released."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from rollstream.cli.progress import Snapshot
from rollstream.cli.watch import follow
from rollstream.settings import Settings
from rollstream.testing.model_server import Reply, Request, ScriptedModelServer, Status
from schemas.retry import RetryScheduled
from schemas.run import RunPaused, RunResumed
from tests.flow.commands import command
from tests.flow.flows import pipeline, publish, read_events, terminal
from tests.flow.operations import FOUR, served, tasks, until
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(240)]


async def test_errored_attempts_get_another_round_and_scored_ones_are_left_alone(settings: Settings) -> None:
    broken = True

    def script(request: Request) -> Reply:
        return Status(500) if broken and request.last_text.startswith(("0", "1")) else FOUR(request)

    async with ScriptedModelServer(script) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, *tasks(5))
            await terminal(settings, 5)
        asked, broken = len(server.requests), False
        first, second = await command(settings, "resume", "r"), await command(settings, "resume", "r")
        assert first.out == "2 attempts are driven again in a new round\n"
        assert second.out == "2 were driven again before, and are under way\n"
        async with pipeline(settings):
            scored = await terminal(settings, 7)
        assert len(server.requests) == asked + 2
    assert Counter((record.round, record.try_, record.status) for record in scored) == {
        (0, 0, "completed"): 3,
        (0, 0, "errored"): 2,
        (1, 0, "completed"): 2,
    }
    assert {(retry.cause.kind, retry.failures) for retry in await read_events(settings, RetryScheduled)} == {("resumed", 0)}
    third = await command(settings, "resume", "r")
    assert third.out == "no attempt is errored\n"
    assert (await command(settings, "audit", "r")).code == 0


async def test_attempts_that_were_refused_before_they_had_a_session_are_resumed_from_their_task(
    settings: Settings, late: Callable[[], None]
) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4", attempts=2, environment="late"))
            refused = await terminal(settings, 2)
        late()
        assert {record.error.kind for record in refused if record.error} == {"unknown_environment"}
        resumed = await command(settings, "resume", "r")
        assert resumed.out == "2 attempts are driven again in a new round, 2 of them from their tasks\n"
        assert "2 were driven again before" in (await command(settings, "resume", "r")).out
        async with pipeline(settings):
            scored = await terminal(settings, 4)
    assert [(record.round, record.status) for record in scored[2:]] == [(1, "completed")] * 2


async def test_a_paused_run_goes_on_where_it_was(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, RunPaused.create(run="r", reason="the key is refused", cause="model_unauthorized", by="w"))
        async with pipeline(settings):
            await publish(settings, *tasks(3))
            async with asyncio.timeout(30):
                while len(await read_events(settings, RetryScheduled)) < 3:
                    await asyncio.sleep(0.1)
            assert server.requests == []
            resumed = await command(settings, "resume", "r")
            scored = await terminal(settings, 3)
    assert "run r goes on (it was paused: the key is refused)" in resumed.out
    assert {(record.status, record.round, record.reward) for record in scored} == {("completed", 0, 1.0)}


async def test_whoever_watches_is_told_within_seconds_that_a_run_is_paused_and_why(settings: Settings) -> None:
    assert settings.bootstrap_servers is not None
    told: list[tuple[Snapshot, Sequence[str]]] = []
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, *tasks(2))
        watching = asyncio.create_task(
            follow(str(settings.bootstrap_servers), settings, "r", lambda snapshot, lines: told.append((snapshot, lines)))
        )
        await until(lambda: bool(told))
        await publish(settings, RunPaused.create(run="r", reason="the key is refused", cause="k", by="w"))
        await until(lambda: "run r is paused: the key is refused" in told[-1][1], 5)
        async with pipeline(settings):
            await until(lambda: told[-1][0].waiting == 2)
            doctor = await command(settings, "doctor")
            await publish(settings, RunResumed.create(run="r"))
            async with asyncio.timeout(30):
                final = await watching
    assert (final.done, final.waiting) == (2, 0)
    assert "paused: the key is refused" in doctor.out
    assert "rollstream resume r" in doctor.out
    assert "2 retries waiting or under way" in doctor.out
