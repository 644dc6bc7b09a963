"""What happens to work that fails, waits, is held back or is called off: nothing is lost, nothing counts twice."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rollstream.environments import registry
from rollstream.environments.math import MathEnvironment, MathTask
from rollstream.environments.protocol import Episode, GraderCrashed, Services, Verdict
from rollstream.settings import RetrySettings, Settings
from rollstream.testing.model_server import Hang, Reply, Request, ScriptedModelServer, Status, always
from schemas.episode import EpisodeCompleted
from schemas.retry import RetryScheduled
from schemas.run import RunCancelled, RunPaused, RunResumed
from schemas.session import SessionReady
from tests.environments import load_anew
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

QUICK = RetrySettings(agent_attempts=3, verification_attempts=3, first_delay_s=0.2, factor=1.0)
FOUR = always(r"\boxed{4}")


def impatient(settings: Settings, base_url: str, **changes: object) -> Settings:
    retries = QUICK.model_copy(update=changes)
    return with_model(settings, base_url, max_retries=0).model_copy(update={"retries": retries})


def fails_first(times: int, reply: Reply) -> Callable[[Request], Reply]:
    """Each prompt fails so many times, then is answered."""
    asked: Counter[str] = Counter()

    def script(request: Request) -> Reply:
        asked[request.last_text] += 1
        return reply if asked[request.last_text] <= times else FOUR(request)

    return script


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_failure_that_a_retry_can_help_is_tried_again_in_a_new_session(settings: Settings) -> None:
    async with ScriptedModelServer(fails_first(2, Status(500))) as server:
        settings = impatient(settings, server.base_url)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4"))
            (scored,) = await terminal(settings, 1)
    assert (scored.status, scored.reward, scored.round, scored.try_) == ("completed", 1.0, 0, 2)
    sessions = await read_events(settings, SessionReady)
    assert [session.try_ for session in sessions] == [0, 1, 2]
    assert len({session.ticket for session in sessions}) == 3
    assert [retry.failures for retry in await read_events(settings, RetryScheduled)] == [1, 2]


async def test_when_every_try_failed_the_attempt_is_errored_and_never_a_zero(settings: Settings) -> None:
    async with ScriptedModelServer(always(Status(500))) as server:
        settings = impatient(settings, server.base_url, agent_attempts=2)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4"))
            (scored,) = await terminal(settings, 1)
    assert (scored.status, scored.reward, scored.try_) == ("errored", None, 1)
    assert scored.error is not None
    assert (scored.error.kind, scored.error.retryable) == ("model_unavailable", True)


async def test_a_waiting_retry_survives_a_restart_and_does_not_hold_up_the_stop(settings: Settings) -> None:
    async with ScriptedModelServer(fails_first(1, Status(500))) as server:
        settings = impatient(settings, server.base_url, first_delay_s=8.0)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4"))
            async with asyncio.timeout(30):
                while not await read_events(settings, RetryScheduled):
                    await asyncio.sleep(0.1)
        async with pipeline(settings):
            (scored,) = await terminal(settings, 1)
    assert (scored.reward, scored.try_) == (1.0, 1)


class CrashingGrader(MathEnvironment):
    """`math`, whose grader crashes on its first verdict."""

    name = "crashing"
    crashes = 1

    async def verify(self, task: MathTask, episode: Episode, services: Services) -> Verdict:
        if CrashingGrader.crashes > 0:
            CrashingGrader.crashes -= 1
            raise GraderCrashed("the grader died")
        return await super().verify(task, episode, services)


@pytest.fixture
def crashing() -> Iterator[str]:
    registry.ENVIRONMENTS["crashing"] = CrashingGrader
    CrashingGrader.crashes = 1
    yield "crashing"
    del registry.ENVIRONMENTS["crashing"]
    load_anew()


async def test_verification_is_repeated_without_running_the_agent_again(settings: Settings, crashing: str) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = impatient(settings, server.base_url)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4", environment=crashing))
            (scored,) = await terminal(settings, 1)
        assert len(server.requests) == 1
    assert (scored.reward, scored.try_) == (1.0, 0)
    assert len(await read_events(settings, EpisodeCompleted)) == 1


async def test_a_refused_key_pauses_its_run_once_and_holds_up_nobody_else(settings: Settings) -> None:
    locked = True

    def script(request: Request) -> Reply:
        return Status(401) if locked and "locked" in request.last_text else FOUR(request)

    async with ScriptedModelServer(script) as server:
        settings = impatient(settings, server.base_url)
        async with pipeline(settings):
            await publish(settings, task("locked 0", "4", run="locked"))
            (first,) = await terminal(settings, 1)
            await publish(settings, *(task(f"locked {n}", "4", run="locked") for n in range(1, 30)))
            await publish(settings, *(task(f"open {n}", "4", run="open") for n in range(30)))
            assert len(await terminal(settings, 31)) == 31
            asked = len(server.requests)
            locked = False
            await publish(settings, RunResumed.create(run="locked"))
            scored = await terminal(settings, 60)
    assert first.status == "errored"
    (pause,) = await read_events(settings, RunPaused)
    assert pause.cause == "model_unauthorized"
    assert "rollstream resume locked" in pause.reason
    assert asked == 31
    assert Counter(rollout.status for rollout in scored) == {"completed": 59, "errored": 1}
    assert all(rollout.reward == 1.0 for rollout in scored if rollout.status == "completed")


async def test_a_cancelled_run_stops_within_seconds_whatever_it_was_doing(settings: Settings) -> None:
    def script(request: Request) -> Reply:
        return Hang() if "endless" in request.last_text else FOUR(request)

    async with ScriptedModelServer(script) as server:
        settings = impatient(settings, server.base_url)
        settings = settings.model_copy(update={"limits": settings.limits.model_copy(update={"max_concurrent_episodes": 4})})
        # No lane frees itself before the test gives up.
        settings = with_model(settings, server.base_url, timeout_s=600)
        async with pipeline(settings):
            await publish(settings, *(task(f"endless {n}", "4", run="endless") for n in range(40)))
            await server.wait_for_requests(4)
            await publish(settings, RunCancelled.create(run="endless"))
            await publish(settings, task("2 + 2", "4", run="other"))
            scored = await terminal(settings, 1)
        assert len(server.requests) <= 9
    assert scored[0].run == "other"


async def test_a_second_record_of_a_session_is_acked_unrun(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = impatient(settings, server.base_url)
        async with pipeline(settings, ["env_worker"]):
            await publish(settings, task("2 + 2", "4"))
            async with asyncio.timeout(30):
                while not (sessions := await read_events(settings, SessionReady)):
                    await asyncio.sleep(0.1)
        async with pipeline(settings, ["agent_worker", "verifier_worker"]):
            await publish(settings, *sessions * 3, task("unrelated", "4"))
            await terminal(settings, 1)
        assert len(server.requests) == 1


async def test_an_endpoint_that_is_down_is_left_alone_and_asked_again_by_itself(settings: Settings) -> None:
    down = True

    def script(request: Request) -> Reply:
        return Status(503) if down else FOUR(request)

    async with ScriptedModelServer(script) as server:
        settings = impatient(settings, server.base_url, agent_attempts=20)
        async with pipeline(settings):
            await publish(settings, *(task(f"{n} + 2", "4") for n in range(40)))
            async with asyncio.timeout(30):
                while not any(r.cause.kind == "model_circuit_open" for r in await read_events(settings, RetryScheduled)):
                    await asyncio.sleep(0.1)
            down = False
            scored = await terminal(settings, 40)
    assert {rollout.status for rollout in scored} == {"completed"}
