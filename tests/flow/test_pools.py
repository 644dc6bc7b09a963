"""Several fleets on one log: each finishes its own work and no other's, and work that nobody serves waits and shows."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.environments import registry
from rollstream.environments.math import MathEnvironment
from rollstream.eventlog.groups import open_groups
from rollstream.eventlog.producer import EventProducer
from rollstream.settings import Defaults, PoolSettings, RetrySettings, Settings
from rollstream.testing.model_server import Reply, Request, ScriptedModelServer, Status, always
from schemas.failure import DeadLettered
from schemas.retry import RetryScheduled
from schemas.session import SessionReady
from tests.environments import load_anew
from tests.events import run_published
from tests.flow.commands import command
from tests.flow.flows import pipeline, publish, publish_bare, read_events, terminal, with_model
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics", "swe"), pytest.mark.timeout(240)]

FOUR = always(r"\boxed{4}")
QUICK = RetrySettings(agent_attempts=3, first_delay_s=0.2, factor=1.0)


class SweEnvironment(MathEnvironment):
    """`math` under the name that a pool claims."""

    name = "swe"


@pytest.fixture
def swe() -> Iterator[None]:
    registry.ENVIRONMENTS["swe"] = SweEnvironment
    load_anew()
    yield
    del registry.ENVIRONMENTS["swe"]
    load_anew()


def fleet(settings: Settings, server: ScriptedModelServer, pool: str = "default", retries: RetrySettings = QUICK) -> Settings:
    """Settings of one fleet: the same pools for all, its own model server, so that it shows who played what."""
    pools = {"gpu": PoolSettings(environments=["swe"]), "oracles": PoolSettings(harnesses=["oracle"])}
    changes = {"pools": pools, "pool": pool, "retries": retries, "defaults": Defaults(environment="math", run="r")}
    return with_model(settings, server.base_url, max_retries=0).model_copy(update=changes)


def asked(server: ScriptedModelServer) -> list[str]:
    return sorted(request.last_text.split()[0] for request in server.requests)


async def until_passed(settings: Settings, *pools: str) -> None:
    """Wait until the workers of these pools are done with every record there is, be it their own or another's."""
    async with asyncio.timeout(60), open_groups(str(settings.bootstrap_servers), settings) as groups:
        while any(state.lag for state in await groups.describe(pools)):
            await asyncio.sleep(0.1)


async def publish_raw(settings: Settings, value: bytes, headers: list[tuple[str, bytes]]) -> None:
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish_raw("sessions.ready", b"another", value, headers)


async def test_each_fleet_finishes_its_own_and_never_touches_the_others(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as here, ScriptedModelServer(FOUR) as there:
        default, gpu = fleet(settings, here), fleet(settings, there, "gpu")
        await publish(settings, *(task(f"math{n} is", "4") for n in range(6)))
        await publish(settings, *(task(f"swe{n} is", "4", attempts=2, environment="swe") for n in range(6)))
        async with pipeline(default), pipeline(gpu):
            scored = await terminal(settings, 18)
            await until_passed(default, "default", "gpu")
    assert {(record.status, record.reward) for record in scored} == {("completed", 1.0)}
    assert asked(here) == [f"math{n}" for n in range(6)]
    assert asked(there) == sorted([f"swe{n}" for n in range(6)] * 2)
    assert len(await read_events(settings, SessionReady)) == 18


async def test_work_of_a_pool_that_nobody_serves_waits_shows_and_is_done_when_somebody_does(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as here, ScriptedModelServer(FOUR) as there:
        default, gpu = fleet(settings, here), fleet(settings, there, "gpu")
        async with pipeline(default):
            await publish(settings, run_published("r", groups=3, environment="swe"))
            await publish(settings, *(task(f"swe{n} is", "4", environment="swe") for n in range(3)))
            await publish(settings, task("math is", "4", run="other"))
            await terminal(settings, 1)
            await until_passed(default, "default")
            doctor = await command(default, "doctor")
            watched = await command(default, "watch", "r", "--timeout", "6")
            audited = await command(default, "audit", "r", "--repair")
        assert await read_events(settings, SessionReady) != []
        assert {session.environment for session in await read_events(settings, SessionReady)} == {"math"}
        async with pipeline(gpu):
            scored = await terminal(settings, 4)
            served = await command(default, "doctor")
        audited_again = await command(default, "audit", "r")
    assert "nobody serves it, 3 records wait (environment swe)" in doctor.out
    assert "rollstream up --pool gpu" in doctor.out
    assert "pool gpu: nobody serves it, 3 attempts wait (environment swe)" in watched.out
    assert "nobody consumes" not in watched.out
    assert "nothing to repair: 3 attempts have not ended, and workers have all of them before them" in audited.err
    assert {record.status for record in scored} == {"completed"}
    assert asked(there) == ["swe0", "swe1", "swe2"]
    assert "3 workers, 0 records open (environment swe)" in served.out
    assert audited_again.code == 0, audited_again.said


async def test_a_task_without_headers_is_served_by_one_pool_and_what_is_no_task_is_dead_lettered_once(
    settings: Settings,
) -> None:
    async with ScriptedModelServer(FOUR) as here, ScriptedModelServer(FOUR) as there:
        default, gpu = fleet(settings, here), fleet(settings, there, "gpu")
        async with pipeline(default), pipeline(gpu), pipeline(fleet(settings, here, "oracles")):
            await publish_bare(settings, {"question": "swe is", "answer": "4", "environment": "swe"})
            await publish_bare(settings, {"question": "math is", "answer": "4"}, b"not json", [1])
            # A header is but a default, and what the body says holds.
            misleading = {"question": "mine is", "answer": "4", "environment": "math"}
            await publish_bare(settings, misleading, headers=[("environment", b"swe")])
            await publish_bare(settings, {"question": "solved is", "answer": "4", "harness": "oracle"})
            scored = await terminal(settings, 4)
            await until_passed(default, "default", "gpu", "oracles")
    assert {record.status for record in scored} == {"completed"}
    assert (asked(here), asked(there)) == (["math", "mine"], ["swe"])
    assert len(await read_events(settings, SessionReady)) == 4
    letters = await read_events(settings, DeadLettered)
    assert len(letters) == 2
    assert {letter.boundary for letter in letters} == {"env_worker"}


async def test_a_retry_is_handled_by_the_pool_of_its_task(settings: Settings) -> None:
    failed = False

    def fails_once(request: Request) -> Reply:
        nonlocal failed
        if failed:
            return FOUR(request)
        failed = True
        return Status(500)

    async with ScriptedModelServer(FOUR) as here, ScriptedModelServer(fails_once) as there:
        # Due when those who scheduled it have long stopped.
        patient = QUICK.model_copy(update={"first_delay_s": 10.0})
        default, gpu = fleet(settings, here), fleet(settings, there, "gpu", patient)
        async with pipeline(gpu):
            await publish(settings, task("swe is", "4", environment="swe"))
            async with asyncio.timeout(30):
                while not await read_events(settings, RetryScheduled):
                    await asyncio.sleep(0.05)
        async with pipeline(default):
            await until_passed(default, "default")
        assert len(await read_events(settings, SessionReady)) == 1
        async with pipeline(default), pipeline(gpu):
            (scored,) = await terminal(settings, 1)
    assert (scored.status, scored.try_) == ("completed", 1)
    assert (asked(here), asked(there)) == ([], ["swe", "swe"])


async def test_a_new_pool_begins_where_the_default_pool_stood_and_runs_nothing_again(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as here, ScriptedModelServer(FOUR) as there:
        default, gpu = fleet(settings, here), fleet(settings, there, "gpu")
        async with pipeline(default.model_copy(update={"pools": {}})):
            await publish(settings, *(task(f"old{n} is", "4", environment="swe") for n in range(4)))
            await terminal(settings, 4)
            await until_passed(settings, "default")
        async with pipeline(default):
            await publish(settings, task("new is", "4", environment="swe"))
            await until_passed(default, "default")
        async with pipeline(gpu):
            await terminal(settings, 5)
            await until_passed(gpu, "gpu")
    assert asked(here) == ["old0", "old1", "old2", "old3"]
    assert asked(there) == ["new"]
    assert len(await read_events(settings, SessionReady)) == 5


async def test_garbage_on_a_topic_of_sessions_ends_its_attempt_once_by_the_pool_that_its_headers_name(
    settings: Settings,
) -> None:
    async with ScriptedModelServer(FOUR) as here, ScriptedModelServer(FOUR) as there:
        default, gpu = fleet(settings, here), fleet(settings, there, "gpu")
        async with pipeline(gpu, ["env_worker"]):
            await publish(settings, task("swe is", "4", environment="swe"))
            async with asyncio.timeout(30):
                while not (sessions := await read_events(settings, SessionReady)):
                    await asyncio.sleep(0.1)
        (session,) = sessions
        other = session.model_copy(update={"session": "another"})
        await publish_raw(settings, b"\xff garbage", other.headers())
        async with pipeline(default), pipeline(gpu):
            scored = await terminal(settings, 2)
            await until_passed(default, "default", "gpu")
    assert sorted((record.status, record.session == "another") for record in scored) == [
        ("completed", False),
        ("errored", True),
    ]
    assert len(await read_events(settings, DeadLettered)) == 1


async def test_a_sandbox_that_a_task_does_not_take_keeps_nobody_from_it(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as here:
        asks = task("boxed is", "4")
        boxed = asks.model_copy(update={"composition": asks.composition.model_copy(update={"sandbox": "nowhere"})})
        async with pipeline(fleet(settings, here)):
            await publish(settings, boxed)
            (scored,) = await terminal(settings, 1)
    assert (scored.status, scored.reward) == ("completed", 1.0)


async def test_publishing_for_a_pool_whose_plug_in_is_not_here_is_accepted_with_a_note(
    settings: Settings, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"issue": "fix it", "tests": ["a"]}) + "\n")
    settings = settings.model_copy(update={"pools": {"gpu": PoolSettings(environments=["swe"])}})
    accepted = await command(settings, "publish", str(rows), "-e", "swe", "--run", "r")
    refused = await command(settings, "publish", str(rows), "-e", "nowhere", "--run", "s")
    assert accepted.code == 0, accepted.said
    assert "run r: published 1 tasks x 1 attempts = 1 rollouts" in accepted.out
    assert "note: environment swe is not installed here" in accepted.err
    assert refused.code == 2
    assert "found 'nowhere'" in refused.err
    assert "3 records" not in (await command(settings, "doctor")).out
    assert "nobody serves it, 1 records wait (environment swe)" in (await command(settings, "doctor")).out
