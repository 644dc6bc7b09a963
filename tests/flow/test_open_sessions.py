"""What an environment opened for a session is closed though the agent's last word is no action, on the real broker."""

import asyncio
from datetime import timedelta
from typing import ClassVar

import pytest

from rollstream.environments import registry
from rollstream.environments.counter import Counter, CounterEnvironment
from rollstream.environments.protocol import OpenServices
from rollstream.settings import Settings
from rollstream.testing.model_server import (
    Call,
    Hang,
    Held,
    Reply,
    Request,
    Script,
    ScriptedModelServer,
    Status,
    Text,
    ToolCalls,
)
from schemas.run import RunCancelled
from schemas.task import TaskSubmitted
from schemas.values import Composition, EpisodeLimits, TaskRef
from tests.flow.flows import pipeline, publish, terminal, with_model

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

open_now: set[str] = set()
"""Sessions for which something is open."""
opened: list[str] = []
resumed: list[str] = []


class HeldCounter(CounterEnvironment):
    """A counter that holds something for each of its sessions."""

    name: ClassVar[str] = "held_counter"

    async def open(self, world: Counter, services: OpenServices) -> Counter:
        open_now.add(services.session)
        opened.append(services.session)
        return world

    async def close(self, world: Counter, services: OpenServices) -> None:
        open_now.remove(services.session)


class LeasedCounter(HeldCounter):
    """One whose resources another worker can go on with."""

    name: ClassVar[str] = "leased_counter"

    async def resume(self, world: Counter, services: OpenServices) -> Counter:
        assert services.session in open_now
        resumed.append(services.session)
        return world


@pytest.fixture(autouse=True)
def held_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now.clear()
    opened.clear()
    resumed.clear()
    monkeypatch.setitem(registry.ENVIRONMENTS, "leased_counter", LeasedCounter)
    monkeypatch.setitem(registry.ENVIRONMENTS, "held_counter", HeldCounter)


def task(how: str, run: str = "r", environment: str = "held_counter") -> TaskSubmitted:
    ask = [{"role": "user", "content": f"Add 3, then {how}."}]
    return TaskSubmitted.create(
        run=run,
        environment=environment,
        task=TaskRef(id=how, dataset="d"),
        row={"initial_count": 0, "expected_count": 3, "messages": ask},
        composition=Composition(harness="tools", models={"policy": "default"}),
    )


def adds_then(last: Reply) -> Script:
    def script(request: Request) -> Reply:
        acted = any(message["role"] == "tool" for message in request.messages)
        return last if acted else ToolCalls([Call("increment_counter", {"count": 3}, "c")])

    return script


async def until(opened_in_all: int, still_open: int) -> None:
    async with asyncio.timeout(30):
        while (len(opened), len(open_now)) != (opened_in_all, still_open):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("last", "status", "sessions"), [(Text("Done."), "completed", 1), (Status(400), "errored", 1)], ids=["hands in", "fails"]
)
async def test_an_agent_that_hands_in_or_fails_ends_what_was_opened(
    settings: Settings, last: Reply, status: str, sessions: int
) -> None:
    async with ScriptedModelServer(adds_then(last)) as server:
        settings = with_model(settings, server.base_url)
        async with pipeline(settings):
            await publish(settings, task("stop"))
            (scored,) = await terminal(settings, 1)
            assert scored.status == status
            await until(sessions, 0)


async def test_a_run_that_is_cancelled_and_a_worker_that_stops_close_what_is_open(settings: Settings) -> None:
    async with ScriptedModelServer(adds_then(Hang())) as server:
        kafka = settings.kafka.model_copy(update={"drain_timeout_s": 0.5})
        settings = with_model(settings.model_copy(update={"kafka": kafka}), server.base_url)
        async with pipeline(settings):
            await publish(settings, task("wait"))
            await until(1, 1)
            # The event alone: `cancel` writes terminal records besides, which would be read too.
            await publish(settings, RunCancelled.create(run="r"))
            await until(1, 0)
            await publish(settings, task("wait", run="other"))
            await until(2, 1)
    assert open_now == set()


@pytest.mark.parametrize(("environment", "sessions", "resumes"), [("held_counter", 2, 0), ("leased_counter", 1, 1)])
async def test_a_worker_that_is_replaced_costs_a_session_of_what_cannot_be_resumed_and_none_of_what_can(
    settings: Settings, environment: str, sessions: int, resumes: int
) -> None:
    replaced = asyncio.Event()

    def script(request: Request) -> Reply:
        acted = sum(message["role"] == "tool" for message in request.messages)
        if acted == 2:
            return Text("Done.")
        answer = ToolCalls([Call("increment_counter", {"count": 1 + acted}, f"c{acted}")])
        return Held(answer, replaced) if acted == 1 else answer

    async with ScriptedModelServer(script) as server:
        settings = with_model(settings, server.base_url)
        async with pipeline(settings, ["agent_worker", "verifier_worker"]):
            async with pipeline(settings, ["env_worker"]):
                await publish(settings, task("stop", environment=environment))
                await server.wait_for_requests(2, timeout_s=60)
            assert len(open_now) == resumes
            async with pipeline(settings, ["env_worker"]):
                replaced.set()
                (scored,) = await terminal(settings, 1)
                await until(sessions, 0)
    assert (scored.status, scored.reward, scored.try_, len(resumed)) == ("completed", 1.0, sessions - 1, resumes)


async def test_what_is_opened_for_an_action_whose_session_ended_while_it_waited_is_closed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.eventlog.endings.CLOCK_SKEW", timedelta(0))
    nobody_acts = asyncio.Event()
    retries = settings.retries.model_copy(update={"agent_attempts": 1})
    answer = Held(ToolCalls([Call("increment_counter", {"count": 3}, "c")]), nobody_acts)
    async with ScriptedModelServer(lambda _: answer) as server:
        settings = with_model(settings.model_copy(update={"retries": retries}), server.base_url)
        impatient = task("stop").model_copy(update={"limits": EpisodeLimits(episode_timeout_s=10.0)})
        async with pipeline(settings, ["agent_worker"]):
            async with pipeline(settings, ["env_worker"]):
                await publish(settings, impatient)
                await server.wait_for_requests(1, timeout_s=60)
            nobody_acts.set()
            (scored,) = await terminal(settings, 1)
            assert scored.error is not None
            assert (scored.error.kind, scored.error.stage) == ("timeout", "agent")
            async with pipeline(settings, ["env_worker"]):
                await until(1, 0)
