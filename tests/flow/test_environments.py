"""Every environment that answers back, on the real broker: its solution scores 1.0, doing nothing 0, and SQL has the steps."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollstream.errors import StoreUnavailable
from rollstream.settings import ModelSettings, RetrySettings, Settings
from rollstream.store.reader import open_snapshot
from rollstream.testing.model_server import Reply, Request, ScriptedModelServer, Status, Text
from schemas.action import EnvironmentCalled, ObservationReturned, StepRewarded
from schemas.rollout import RolloutScored
from schemas.task import TaskSubmitted
from schemas.values import ChatMessage, Composition, JsonObject, TaskRef
from schemas.verdict import VerdictReached
from tests.flow.flows import PIPELINE, pipeline, publish, read_events, terminal
from tests.servers import example_server

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED: list[ChatMessage] = [{"role": "user", "content": "Count."}]
PLUGIN = """
from typing import ClassVar
from rollstream.environments.counter import CounterEnvironment
class Own(CounterEnvironment):
    name: ClassVar[str] = "own_counter"
"""
HARNESS = """
from typing import ClassVar
from services.agent_worker.harnesses.noop import NoopHarness
class Idle(NoopHarness):
    name: ClassVar[str] = "idle"
"""


def rows(name: str) -> list[JsonObject]:
    return [json.loads(line) for line in (EXAMPLES / f"{name}.jsonl").read_text().splitlines()]


def tasks(row: JsonObject, harnesses: Sequence[str] = ("oracle", "noop"), **models: str) -> list[TaskSubmitted]:
    """One task for each harness, which is its dataset too."""
    return [
        TaskSubmitted.create(
            run="r",
            environment=str(row["environment"]),
            task=TaskRef(id=str(row["task_id"]), dataset=harness),
            row={key: value for key, value in row.items() if key not in ("task_id", "environment")},
            composition=Composition(harness=harness, models={"policy": "default", **models}),
        )
        for harness in harnesses
    ]


async def played(settings: Settings, submitted: Sequence[TaskSubmitted]) -> dict[tuple[str, str], RolloutScored]:
    """By harness (which is the dataset) and task."""
    async with pipeline(settings):
        await publish(settings, *submitted)
        scored = await terminal(settings, len(submitted), deadline_s=120)
    return {(one.task.dataset, one.task.id): one for one in scored if one.task}


@pytest.mark.parametrize("name", ["gymnasium", "conversation", "self_play", "workplace"])
async def test_every_example_scores_one_by_its_solution_and_nothing_by_doing_nothing(settings: Settings, name: str) -> None:
    found = await played(settings, [task for row in rows(name) for task in tasks(row)])
    told = {key: (one.status, one.reward, one.success, str(one.error)) for key, one in found.items()}
    assert told == {
        (harness, str(row["task_id"])): ("completed", reward, success, "None")
        for row in rows(name)
        for harness, reward, success in (("oracle", 1.0, True), ("noop", 0.0, False))
    }


async def test_the_rewards_of_frozen_lake_sum_to_one_in_the_log_and_in_sql(settings: Settings) -> None:
    lake = rows("gymnasium")[0]
    settings = settings.model_copy(update={"store": settings.store.model_copy(update={"publish_interval_s": 0.2})})
    async with pipeline(settings, (*PIPELINE, "store_worker")):
        await publish(settings, *tasks(lake, ["oracle"]))
        (scored,) = await terminal(settings, 1)
        stepped = await read_events(settings, StepRewarded)
        assert sorted((one.index, one.reward) for one in stepped) == [(index, float(index == 5)) for index in range(6)]
        assert [one.reward for one in scored.steps] == [0.0] * 5 + [1.0]
        question = f"SELECT count(*), sum(reward) FROM step_rewards WHERE session_id = '{scored.session}'"
        assert await asked_until(settings, question, (6, 1.0)) == (6, 1.0)


async def asked_until(settings: Settings, question: str, wanted: object, deadline_s: float = 60.0) -> object:
    """The answer of the published store, as soon as it is the wanted one."""
    found: object = None
    try:
        async with asyncio.timeout(deadline_s):
            while found != wanted:
                await asyncio.sleep(0.1)
                try:
                    with open_snapshot(settings.data_dir) as connection:
                        found = connection.execute(question).fetchone()
                except StoreUnavailable as error:
                    found = str(error)
    except TimeoutError:
        pass
    return found


def with_models(settings: Settings, url: str) -> Settings:
    models = {name: ModelSettings(base_url=url, max_retries=0, timeout_s=20) for name in ("default", "user", "judge")}
    return settings.model_copy(update={"models": models})


def everybody(request: Request) -> Reply:
    """Plays the agent, the user and the judge, told apart by their models."""
    model, said = request.body["model"], str(request.body["messages"])
    if model == "judge":
        return Text("Apologised and offered a lamp. SCORE: 8")
    if model == "user":
        return Text("Thank you. [[GOAL]]" if "new lamp" in said.split("It arrived")[-1] and "sorry" in said else "Well?")
    return Text("I am sorry. We send you a new lamp.")


async def test_a_model_plays_the_user_and_another_judges_and_both_are_recorded(settings: Settings) -> None:
    row = rows("conversation_models")[1]
    async with ScriptedModelServer(everybody) as server:
        settings = with_models(settings, server.base_url)
        found = await played(settings, tasks(row, ["chat"], user="user", judge="judge"))
    (scored,) = found.values()
    assert (scored.status, scored.reward) == ("completed", pytest.approx(0.9))
    assert scored.reward_components == {"end": 1.0, "facts": 1.0, "rubric": 0.8}
    (observed,) = await read_events(settings, ObservationReturned)
    (verdict,) = await read_events(settings, VerdictReached)
    called = {one.stage: (one.role, one.cause) for one in await read_events(settings, EnvironmentCalled)}
    assert called == {"agent": ("user", observed.action), "verification": ("judge", verdict.episode)}
    # Its mark for the goal reached is the simulated user's own.
    assert b"[[GOAL]]" not in observed.to_json()


@pytest.mark.parametrize("broken", ["user", "judge"])
async def test_a_user_or_judge_that_is_away_is_no_zero(settings: Settings, broken: str) -> None:
    row = rows("conversation_models")[1]

    def reply(request: Request) -> Reply:
        return Status(503) if request.body["model"] == broken else everybody(request)

    retries = RetrySettings(agent_attempts=2, verification_attempts=2, first_delay_s=0.05)
    async with ScriptedModelServer(reply) as server:
        settings = with_models(settings.model_copy(update={"retries": retries}), server.base_url)
        found = await played(settings, tasks(row, ["chat"], user="user", judge="judge"))
    (scored,) = found.values()
    assert (scored.status, scored.reward, scored.success) == ("errored", None, None)
    assert scored.error is not None
    assert scored.error.stage == ("agent" if broken == "user" else "verification")


async def test_a_role_that_the_run_does_not_bind_is_refused_before_anything_is_played(settings: Settings) -> None:
    found = await played(settings, tasks(rows("conversation_models")[0], ["chat"]))
    (scored,) = found.values()
    assert scored.error is not None
    assert (scored.status, scored.error.kind) == ("errored", "role_unbound")
    assert "add --role user=MODEL" in scored.error.message


async def test_an_opponent_that_is_a_model_plays_against_the_agent(settings: Settings) -> None:
    def reply(request: Request) -> Reply:
        """The agent fills the first row; its opponent, told apart by its model, takes the last square of the others."""
        board = "".join(str(request.body["messages"][-1]["content"]).split("\n")[-4:-1])
        agent = request.body["model"] == "default"
        return Text(next(square for square in ("123" if agent else "9876") if square in board))

    row: JsonObject = {"task_id": "t", "environment": "self_play", "opponent": "model"}
    async with ScriptedModelServer(reply) as server:
        found = await played(with_models(settings, server.base_url), tasks(row, ["chat"], opponent="user"))
    (scored,) = found.values()
    assert (scored.status, scored.reward) == ("completed", 1.0)


async def test_an_environment_on_a_server_runs_like_any_other(settings: Settings) -> None:
    with example_server() as url:
        declared = {"environments": {"http": {"lift": {"url": url, "public_fields": ["start", "wish"]}}}}
        settings = settings.model_copy(update={"environments": Settings.model_validate(declared).environments})
        found = await played(settings, [task for row in rows("lift") for task in tasks(row)])
    assert {key: one.reward for key, one in found.items()} == {
        ("oracle", "lift-up"): 1.0,
        ("noop", "lift-up"): 0.0,
        ("oracle", "lift-down"): 1.0,
        ("noop", "lift-down"): 0.0,
    }


async def test_an_environments_server_that_is_away_is_no_zero(settings: Settings) -> None:
    declared = {"environments": {"http": {"lift": {"url": "http://127.0.0.1:9", "public_fields": ["start", "wish"]}}}}
    retries = RetrySettings(agent_attempts=2, first_delay_s=0.05)
    settings = settings.model_copy(update={"environments": Settings.model_validate(declared).environments, "retries": retries})
    found = await played(settings, tasks(rows("lift")[0], ["oracle"]))
    (scored,) = found.values()
    assert scored.error is not None
    assert (scored.status, scored.reward, scored.error.kind) == ("errored", None, "http_unreachable")


async def test_an_environment_and_a_harness_by_path_run_like_any_other(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "own_counter_plugin.py").write_text(PLUGIN)
    (tmp_path / "own_idle_plugin.py").write_text(HARNESS)
    plugins = {
        "environments": {"own_counter": f"{tmp_path}/own_counter_plugin.py:Own"},
        "harnesses": {"idle": f"{tmp_path}/own_idle_plugin.py:Idle"},
    }
    settings = settings.model_copy(update={"plugins": Settings.model_validate({"plugins": plugins}).plugins})
    row: JsonObject = {"task_id": "t", "environment": "own_counter", "messages": ASKED, "expected_count": 3}
    found = await played(settings, tasks(row, ["oracle", "idle"]))
    assert {key[0]: one.reward for key, one in found.items()} == {"oracle": 1.0, "idle": 0.0}


async def test_a_path_in_a_record_is_a_name_that_nobody_knows(settings: Settings, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil_plugin.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n{PLUGIN}")
    path = f"{tmp_path}/evil_plugin.py:Own"
    by_environment: JsonObject = {"task_id": "a", "environment": path, "messages": ASKED, "expected_count": 1}
    by_harness: JsonObject = {"task_id": "b", "environment": "counter", "messages": ASKED, "expected_count": 1}
    found = await played(settings, [*tasks(by_environment, ["oracle"]), *tasks(by_harness, [path])])
    assert {one.error.kind for one in found.values() if one.error} == {"unknown_environment", "unknown_harness"}
    assert not ran.exists()
