"""Clocks that jump or disagree: nothing waits longer, ends earlier or is lost for it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import time_machine
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from rollstream.errors import BrokerRefuses
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.provisioning import describe
from rollstream.eventlog.retries import schedule
from rollstream.settings import RetrySettings, Settings
from rollstream.testing.model_server import Held, ScriptedModelServer, Text, always
from schemas.failure import ErrorInfo
from schemas.retry import RetryScheduled
from schemas.session import SessionReady
from services.__main__ import build
from tests.events import run_published
from tests.flow.commands import command, until_nothing_is_open
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(180)]

ONLY_NOW = {"message.timestamp.before.max.ms": "0", "message.timestamp.after.max.ms": "0"}
"""A broker then refuses every record that is not of this very millisecond."""
FOUR = r"\boxed{4}"
JUMPS = pytest.mark.parametrize("jump", [timedelta(days=2), timedelta(days=-2)], ids=["forward", "backward"])


@contextmanager
def clock_off_by(jump: timedelta) -> Iterator[None]:
    """This process's wall clock is wrong, and goes on from there; the broker's is right."""
    with time_machine.travel(datetime.now(UTC) + jump, tick=True):
        yield


@JUMPS
async def test_a_clock_that_jumps_in_the_middle_of_a_run_costs_nothing(settings: Settings, jump: timedelta) -> None:
    """Queue timeout, commits, the episode's own limits and the audit's look-up by time all see it."""
    limits = settings.limits.model_copy(update={"queue_timeout_seconds": 60.0, "max_concurrent_episodes": 2})
    answer = asyncio.Event()
    async with ScriptedModelServer(lambda _: Held(Text(FOUR), answer)) as server:
        settings = with_model(settings, server.base_url).model_copy(update={"limits": limits})
        async with pipeline(settings):
            await publish(settings, run_published("r", groups=8), *(task(f"{number} + 0", "4") for number in range(8)))
            await server.wait_for_requests(2, timeout_s=30)
            with clock_off_by(jump):
                answer.set()
                scored = await terminal(settings, 8)
                await until_nothing_is_open(settings)
    assert {(record.status, record.try_) for record in scored} == {("completed", 0)}
    assert await read_events(settings, RetryScheduled) == []
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said
    assert "clean: each of 8 attempts" in audited.out


@JUMPS
async def test_a_retry_waits_as_long_as_was_planned_by_whatever_clock(settings: Settings, jump: timedelta) -> None:
    async with ScriptedModelServer(always(FOUR)) as server:
        settings = with_model(settings, server.base_url)
        async with pipeline(settings, ["env_worker"]):
            await publish(settings, task("2 + 2", "4"))
            (ready,) = await until_sessions(settings, 1)
            await publish(settings, planned(ready, datetime.now(UTC) + jump, timedelta(seconds=0.5)))
            # Within that function's patience, which is nothing beside the days by which the clocks differ.
            await until_sessions(settings, 2)


async def test_a_clock_that_jumps_while_a_retry_waits_changes_nothing(settings: Settings) -> None:
    retries = RetrySettings(first_delay_s=2.0, factor=1.0)
    async with ScriptedModelServer(always(FOUR)) as server:
        settings = with_model(settings, server.base_url).model_copy(update={"retries": retries})
        async with pipeline(settings, ["env_worker"]):
            await publish(settings, task("2 + 2", "4"))
            (ready,) = await until_sessions(settings, 1)
            await publish(settings, planned(ready, datetime.now(UTC), timedelta(seconds=2)))
            with clock_off_by(timedelta(days=-2)):
                opened = await until_sessions(settings, 2)
    assert sorted(session.try_ for session in opened) == [0, 1]


async def until_sessions(settings: Settings, count: int) -> list[SessionReady]:
    async with asyncio.timeout(30):
        while len(found := await read_events(settings, SessionReady)) < count:
            await asyncio.sleep(0.1)
    return found


def planned(session: SessionReady, at: datetime, wait: timedelta) -> RetryScheduled:
    """The retry of a session, planned by a machine whose clock says `at`."""
    cause = ErrorInfo(kind="model_unavailable", stage="agent", message="503", retryable=True)
    return schedule(session, cause, failures=1, delay_s=wait.total_seconds(), at=at, worker="agent_worker@elsewhere:1")


@JUMPS
async def test_what_a_machine_with_a_wrong_clock_publishes_is_played_and_found_again(
    settings: Settings, jump: timedelta
) -> None:
    async with ScriptedModelServer(always(FOUR)) as server:
        settings = with_model(settings, server.base_url)
        with clock_off_by(jump):
            await publish(settings, run_published("r", groups=2), task("2 + 2", "4"), task("1 + 3", "4"))
        async with pipeline(settings):
            scored = await terminal(settings, 2)
    assert {record.reward for record in scored} == {1.0}
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said


async def test_a_broker_that_refuses_records_for_their_time_ends_the_worker_with_one_sentence(settings: Settings) -> None:
    """As on a topic that somebody else made, where records carry the time of their writers."""
    async with ScriptedModelServer(always(FOUR)) as server:
        settings = with_model(settings, server.base_url)
        await publish(settings, task("2 + 2", "4"))
        await configure(settings, "sessions.ready", {"message.timestamp.type": "CreateTime", **ONLY_NOW})
        failure = await end_of(settings, "env_worker")
        assert isinstance(failure, BrokerRefuses)
        assert "does not take a SessionReady" in str(failure)
        assert "the clock of this machine is wrong" in str(failure)
        assert "\n" not in str(failure)
        await configure(settings, "sessions.ready", {"message.timestamp.type": "LogAppendTime"})
        async with pipeline(settings):
            (scored,) = await terminal(settings, 1)
    assert scored.status == "completed", "the record was not to be lost"


async def end_of(settings: Settings, worker: str) -> BaseException | None:
    """Run a worker until it breaks; returns what it broke of."""
    app = build(worker, settings)
    await app.start()
    try:
        async with asyncio.timeout(30):
            await app.broken.wait()
    finally:
        await app.stop()
    return app.failure


async def configure(settings: Settings, topic: str, config: dict[str, str]) -> None:
    """Give a topic another configuration, and wait until it holds."""
    assert settings.bootstrap_servers is not None
    name = settings.kafka.topic_prefix + topic
    admin = await connect_admin(settings.bootstrap_servers)
    try:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, configs=config)])
        async with asyncio.timeout(20):
            while config.items() - {state.name: state.config for state in await describe(admin, settings.kafka)}[name].items():
                await asyncio.sleep(0.1)
    finally:
        await admin.close()
