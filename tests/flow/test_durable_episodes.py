"""A session goes on where it stopped, on the real broker: after a hand-over, after a restart, and never after its end."""

import asyncio
import json

import pytest

from rollstream.settings import Settings
from rollstream.testing.model_server import Call, Held, Reply, Request, ScriptedModelServer, Text, ToolCalls
from schemas.action import ActionRequested
from schemas.episode import EpisodeCompleted
from schemas.session import SessionReady
from schemas.step import AgentStepped
from services.__main__ import build
from tests.flow.commands import commit, until_nothing_is_open
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.flow.test_interaction import task
from topics.catalogue import SESSIONS_READY

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

ENDS = ("env_worker", "verifier_worker")


class Counting:
    """Adds 1 three times, one call an answer; the answer to a given step is held until somebody lets it go."""

    def __init__(self, held_step: int | None = None) -> None:
        self.held_step = held_step
        self.let_go = asyncio.Event()
        self.asked: list[int] = []

    def __call__(self, request: Request) -> Reply:
        seen = sum(message["role"] == "tool" for message in request.body["messages"])
        self.asked.append(seen)
        reply: Reply = ToolCalls([Call("increment_counter", {"count": 1}, f"c{seen}")]) if seen < 3 else Text("Done.")
        return Held(reply, self.let_go) if seen == self.held_step and not self.let_go.is_set() else reply


async def test_a_session_that_a_stopping_worker_handed_back_goes_on_and_asks_nothing_twice(settings: Settings) -> None:
    kafka = settings.kafka.model_copy(update={"drain_timeout_s": 0.5})
    script = Counting(held_step=2)
    async with ScriptedModelServer(script) as server:
        settings = with_model(settings.model_copy(update={"kafka": kafka}), server.base_url)
        async with pipeline(settings, ENDS):
            async with pipeline(settings, ["agent_worker"]):
                await publish(settings, task({"initial_count": 0, "expected_count": 3, "messages": ASK}))
                await server.wait_for_requests(3, timeout_s=60)
            script.let_go.set()
            async with pipeline(settings, ["agent_worker"]):
                (scored,) = await terminal(settings, 1)
    assert (scored.reward, scored.try_, len(scored.steps)) == (1.0, 0, 3)
    # The call that was under way when the worker stopped is the only one that is made again.
    assert script.asked == [0, 1, 2, 2, 3]
    (episode,) = await read_events(settings, EpisodeCompleted)
    steps = {step.event_id: step for step in await read_events(settings, AgentStepped)}
    assert [steps[name].index for name in episode.steps] == [0, 1, 2, 3]
    assert len({steps[name].execution.id for name in episode.steps}) == 2
    actions = await read_events(settings, ActionRequested)
    assert sorted(action.index for action in actions) == [0, 1, 2]


async def test_a_completed_session_is_not_played_again_though_its_record_is_read_again(settings: Settings) -> None:
    script = Counting()
    async with ScriptedModelServer(script) as server:
        settings = with_model(settings, server.base_url)
        async with pipeline(settings):
            await publish(settings, task({"initial_count": 0, "expected_count": 3, "messages": ASK}))
            await terminal(settings, 1)
            await until_nothing_is_open(settings)
        # As after a crash before any commit, and with a second record of the same session besides.
        await commit(settings, "agent_worker", SESSIONS_READY)
        await publish(settings, *await read_events(settings, SessionReady))
        async with pipeline(settings):
            await until_nothing_is_open(settings)
    assert script.asked == [0, 1, 2, 3]
    assert len(await read_events(settings, EpisodeCompleted)) == 1


async def test_two_agent_workers_each_see_the_answers_of_their_own_sessions_across_a_rebalance(settings: Settings) -> None:
    script = Counting()
    async with ScriptedModelServer(script) as server:
        settings = with_model(settings, server.base_url)
        second = build("agent_worker", settings)
        async with pipeline(settings, (*ENDS, "agent_worker")):
            tasks = [
                task({"initial_count": 0, "expected_count": 3, "messages": ASK}, name=f"t{number}") for number in range(30)
            ]
            await publish(settings, *tasks[:15])
            await second.start()
            try:
                await publish(settings, *tasks[15:])
                scored = await terminal(settings, 30, deadline_s=120)
            finally:
                await second.stop()
    assert {(rollout.reward, rollout.status) for rollout in scored} == {(1.0, "completed")}
    assert len({rollout.rollout for rollout in scored}) == 30
    assert {json.dumps([step.reward for step in rollout.steps]) for rollout in scored} == {"[null, null, null]"}


ASK = [{"role": "user", "content": "Add 1 three times."}]
