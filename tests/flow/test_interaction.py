"""Episodes in which the environment answers back, on the real broker: what is in the log, and what it is worth."""

import json
from pathlib import Path

import pytest

from rollstream.settings import Settings
from rollstream.testing.model_server import Call, Reply, Request, ScriptedModelServer, Text, ToolCalls
from schemas.action import ActionRequested, ObservationReturned, StepRewarded
from schemas.episode import EpisodeCompleted
from schemas.rollout import RolloutScored
from schemas.step import AgentStepped
from schemas.task import TaskSubmitted
from schemas.values import Composition, JsonObject, TaskRef
from tests.flow.flows import pipeline, publish, publish_bare, read_events, terminal, with_model

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

ROWS = Path(__file__).parents[2].parent / "shared" / "data" / "nemo_gym_rows"


def task(
    row: JsonObject, environment: str = "counter", harness: str = "tools", name: str = "t", attempts: int = 1
) -> TaskSubmitted:
    return TaskSubmitted.create(
        run="r",
        environment=environment,
        task=TaskRef(id=name, dataset="d"),
        row=row,
        attempts=attempts,
        composition=Composition(harness=harness),
    )


COUNT: JsonObject = {
    "messages": [{"role": "user", "content": "Add 1, then 2, and say where the counter stands."}],
    "initial_count": 3,
    "expected_count": 6,
}


def adds_up(request: Request) -> Reply:
    """Adds 1 and 2 at once, reads the counter, and says so."""
    told = [message for message in request.body["messages"] if message["role"] == "tool"]
    if not told:
        return ToolCalls([Call("increment_counter", {"count": 1}, "a"), Call("increment_counter", {"count": 2}, "b")])
    if len(told) == 2:
        return ToolCalls([Call("get_counter_value", {}, "c")])
    return Text(f"It stands at {json.loads(told[-1]['content'])['count']}.")


async def test_every_action_and_what_came_of_it_is_in_the_log_and_the_world_decides_the_reward(settings: Settings) -> None:
    async with ScriptedModelServer(adds_up) as server:
        settings = with_model(settings, server.base_url)
        async with pipeline(settings):
            await publish(settings, task(COUNT))
            (scored,) = await terminal(settings, 1)
    assert (scored.reward, scored.success, scored.status) == (1.0, True, "completed")
    assert [message["role"] for message in scored.messages] == [
        "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert scored.submission is not None
    assert scored.submission.text == "It stands at 6."
    steps = {step.event_id: step for step in await read_events(settings, AgentStepped)}
    actions = await read_events(settings, ActionRequested)
    observations = {seen.action: seen for seen in await read_events(settings, ObservationReturned)}
    (episode,) = await read_events(settings, EpisodeCompleted)
    assert [action.index for action in actions] == [0, 1, 2]
    assert episode.actions == [action.event_id for action in actions]
    assert [steps[action.step].index for action in actions if action.step] == [0, 0, 1]
    assert [observations[action.event_id].messages[0].get("tool_call_id") for action in actions] == ["a", "b", "c"]
    assert [steps[name].previous for name in episode.steps] == [None, *episode.steps[:-1]]
    assert actions[0].receipt is None
    assert [action.receipt for action in actions[1:]] == [observations[one.event_id].receipt for one in actions[:-1]]
    assert episode.receipt == observations[actions[-1].event_id].receipt
    assert [step.reward for step in scored.steps] == [None, None, None]
    assert await read_events(settings, StepRewarded) == []


@pytest.mark.skipif(not ROWS.exists(), reason="the shared data folder is not beside the project")
@pytest.mark.parametrize(
    ("environment", "file"),
    [("counter", "example_session_state_mgmt.jsonl"), ("weather_tools", "example_single_tool_call.jsonl")],
)
@pytest.mark.parametrize(("harness", "reward"), [("oracle", 1.0), ("noop", 0.0)])
async def test_nemo_gym_rows_run_unmodified_and_the_oracle_earns_all_and_the_idle_nothing(
    settings: Settings, environment: str, file: str, harness: str, reward: float
) -> None:
    rows = [json.loads(line) for line in (ROWS / file).read_text().splitlines()]
    settings = settings.model_copy(update={"defaults": settings.defaults.model_copy(update={"harness": harness})})
    async with pipeline(settings):
        await publish_bare(settings, *rows, headers=[("environment", environment.encode())])
        scored: list[RolloutScored] = await terminal(settings, len(rows))
    assert {(rollout.reward, rollout.status) for rollout in scored} == {(reward, "completed")}
