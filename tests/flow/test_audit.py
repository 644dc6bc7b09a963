"""What the log alone proves about a run, and what is driven again because it was lost."""

import json

import pytest

from rollstream.settings import Settings
from rollstream.testing.model_server import ScriptedModelServer
from schemas.failure import ErrorInfo
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored, terminal_event_id
from tests.events import Attempt, run_published
from tests.flow.commands import command, commit
from tests.flow.flows import pipeline, publish, publish_bare, read_events, terminal
from tests.flow.operations import FOUR, served, tasks, until_sessions
from tests.flow.test_spine import task
from topics.catalogue import SESSIONS_READY, TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(240)]


async def test_a_healthy_run_is_proved_clean_from_the_log_alone(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, run_published("r", groups=3, attempts=2), *tasks(3, attempts=2))
            await terminal(settings, 6)
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said
    assert "clean: each of 6 attempts has exactly one terminal record that counts" in audited.out
    found = json.loads((await command(settings, "audit", "r", "--json")).out)
    assert (found["clean"], found["attempts"], found["counting"]) == (True, 6, {"completed": 6})


async def test_a_doctored_log_is_found_out_with_every_finding_named(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, run_published("r", groups=3), *tasks(2))
            first, _ = await terminal(settings, 2)
        other = Attempt(task("nobody published this", "4"))
        rival = first.model_copy(update={"session": "another", "event_id": terminal_event_id("another"), "try_": 7})
        await publish(settings, rival, first, other.failed())
    audited = await command(settings, "audit", "r")
    assert audited.code == 1
    assert "1 groups were promised and never published" in audited.out
    assert f"ended twice: rollout {first.rollout}" in audited.out
    assert f"rollout {other.rollout}" in audited.out
    assert audited.out.splitlines()[-1] == "not clean"
    found = json.loads((await command(settings, "audit", "r", "--json")).out)
    assert (found["missing_groups"], len(found["double"]), len(found["strays"]), found["repeated"]) == (1, 1, 1, 1)


async def test_what_a_worker_still_has_before_it_is_late_and_not_lost(settings: Settings) -> None:
    async with pipeline(settings, ["env_worker"]):
        await publish(settings, *tasks(3))
        await until_sessions(settings, 3)
    audited = await command(settings, "audit", "r", "--repair")
    assert audited.code == 1
    assert "not finished: workers still have every attempt before them" in audited.out
    assert "nothing to repair: 3 attempts have not ended" in audited.err
    assert await read_events(settings, RetryScheduled) == []


async def test_what_was_lost_after_its_seeding_is_driven_again_from_its_session(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings, ["env_worker"]):
            await publish(settings, *tasks(4))
            await until_sessions(settings, 4)
        await commit(settings, "agent_worker", SESSIONS_READY, at_end=True)
        lost = await command(settings, "audit", "r", "--repair")
        assert lost.code == 1
        assert "driven again: 4 from their sessions, 0 from their tasks" in lost.err
        async with pipeline(settings):
            scored = await terminal(settings, 4)
        assert len(server.requests) == 4
    assert {(record.round, record.try_, record.status) for record in scored} == {(0, 1, "completed")}
    assert (await command(settings, "audit", "r")).code == 0


async def test_what_was_lost_before_its_seeding_is_driven_again_from_its_task_and_nothing_finished_is(
    settings: Settings,
) -> None:
    lost = task("2 + 2", "4", attempts=3)
    error = ErrorInfo(kind="k", stage="seed", message="m", retryable=False)
    (ended,) = [ids for ids in lost.sessions() if ids.group.index == 1]
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, lost, RolloutScored.of_failure(ended, error, lost.occurred_at))
        await publish_bare(settings, {"question": "1 + 3", "answer": "4", "run": "bare", "environment": "math"})
        await commit(settings, "env_worker", TASKS_IN, at_end=True)
        for run, count in (("r", 2), ("bare", 1)):
            repaired = await command(settings, "audit", run, "--repair")
            assert f"driven again: 0 from their sessions, {count} from their tasks" in repaired.err, repaired.said
        async with pipeline(settings):
            scored = await terminal(settings, 4)
        assert len(server.requests) == 3
    assert sorted((record.run, record.group.index, record.status) for record in scored) == [
        ("bare", 0, "completed"),
        ("r", 0, "completed"),
        ("r", 1, "errored"),
        ("r", 2, "completed"),
    ]
    for run in ("r", "bare"):
        audited = await command(settings, "audit", run)
        assert audited.code == 0, audited.said


async def test_a_run_that_nobody_knows_is_told_in_one_line(settings: Settings) -> None:
    await publish(settings, run_published("nightly"))
    for name in ("audit", "cancel", "resume"):
        done = await command(settings, name, "nigthly")
        assert (done.code, done.out) == (2, "")
        assert done.err == "error: no run is named 'nigthly'; recent runs: nightly\n"
