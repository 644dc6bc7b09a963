"""The main job: tasks in, scored rollouts out, on the real broker with a scripted model."""

import json
from pathlib import Path

import pytest

from rollstream.settings import RetrySettings, Settings
from rollstream.testing.model_server import (
    EMPTY_CHOICES,
    LONE_SURROGATE,
    Hang,
    Request,
    ScriptedModelServer,
    Status,
    always,
    big_text,
)
from schemas.episode import EpisodeCompleted
from schemas.failure import DeadLettered
from schemas.rollout import RolloutScored
from schemas.session import SessionReady
from schemas.step import AgentStepped
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from schemas.verdict import VerdictReached
from tests.flow.flows import pipeline, publish, publish_bare, read_events, terminal, with_model

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def task(
    question: str, answer: str, attempts: int = 1, harness: str = "chat", environment: str = "math", run: str = "r"
) -> TaskSubmitted:
    return TaskSubmitted.create(
        run=run,
        environment=environment,
        task=TaskRef(id=question, dataset="d"),
        row={"question": question, "answer": answer},
        attempts=attempts,
        composition=Composition(harness=harness),
    )


async def test_every_attempt_of_every_task_becomes_one_scored_rollout_with_its_whole_record(settings: Settings) -> None:
    async with ScriptedModelServer(always(r"The answer is \boxed{4}.")) as server:
        settings = with_model(settings, server.base_url)
        async with pipeline(settings):
            await publish(settings, task("What is 2 + 2?", "4", attempts=3), task("What is 2 + 3?", "5", attempts=2))
            scored = await terminal(settings, 5)
    assert len({rollout.rollout for rollout in scored}) == 5
    by_task = {rollout.task.id: rollout for rollout in scored if rollout.task}
    right, wrong = by_task["What is 2 + 2?"], by_task["What is 2 + 3?"]
    assert (right.reward, right.success, right.status) == (1.0, True, "completed")
    assert (wrong.reward, wrong.success, wrong.status) == (0.0, False, "completed")
    assert [message["role"] for message in right.messages] == ["user", "assistant"]
    assert right.usage.completion_tokens > 0
    assert right.calls[0].finish_reason == "stop"
    assert right.group.size == 3
    steps = {step.event_id for step in await read_events(settings, AgentStepped)}
    for episode in await read_events(settings, EpisodeCompleted):
        assert set(episode.steps) <= steps
    assert len(await read_events(settings, SessionReady)) == 5
    assert {verdict.event_id for verdict in await read_events(settings, VerdictReached)} == {r.verdict for r in scored}


async def test_the_oracle_scores_full_reward_and_only_its_runs_carry_the_reference(settings: Settings) -> None:
    async with pipeline(settings):
        await publish(settings, task("q", "1/2", harness="oracle"))
        (scored,) = await terminal(settings, 1)
    assert scored.reward == 1.0
    assert scored.calls == []
    (session,) = await read_events(settings, SessionReady)
    assert session.reference is not None


async def test_a_bare_json_task_from_a_console_producer_runs_on_the_defaults(settings: Settings) -> None:
    defaults = settings.defaults.model_copy(update={"environment": "math", "attempts": 2})
    async with ScriptedModelServer(always("7")) as server:
        settings = with_model(settings.model_copy(update={"defaults": defaults}), server.base_url)
        async with pipeline(settings):
            await publish_bare(settings, {"question": "What is 3 + 4?", "answer": "7"})
            scored = await terminal(settings, 2)
    assert {rollout.reward for rollout in scored} == {1.0}
    assert scored[0].run.startswith("adhoc-")


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data folder is not beside the project")
async def test_unmodified_nemo_gym_rows_run(settings: Settings) -> None:
    choice = [json.loads(line) for line in (SHARED / "nemo_gym_rows/mcqa.jsonl").read_text().splitlines()]
    maths = [json.loads(line) for line in (SHARED / "nemo_gym_rows/math_with_judge.jsonl").read_text().splitlines()]
    async with ScriptedModelServer(always(r"\boxed{B}")) as server:
        settings = with_model(settings, server.base_url)
        async with pipeline(settings):
            await publish_bare(settings, *choice, headers=[("environment", b"multiple_choice")])
            await publish_bare(settings, *maths, headers=[("environment", b"math")])
            scored = await terminal(settings, len(choice) + len(maths))
    assert {rollout.status for rollout in scored} == {"completed"}
    chosen = {
        rollout.task.id: rollout.reward for rollout in scored if rollout.environment == "multiple_choice" and rollout.task
    }
    assert chosen == {row["uuid"]: float(row["expected_answer"] == "B") for row in choice}


async def test_what_cannot_be_understood_is_dead_lettered_and_blocks_nothing(settings: Settings) -> None:
    async with pipeline(settings):
        await publish_bare(settings, b"not json", b"\xff\xfe", [1, 2], {"question": "no environment", "answer": "1"})
        await publish_bare(settings, {"task_id": "t", "run": "r", "environment": "nowhere", "question": "q", "attempts": 2})
        await publish_bare(settings, {"task_id": "u", "run": "r", "environment": "math", "question": "no answer"})
        await publish(settings, task("q", "1", harness="oracle"))
        scored = await terminal(settings, 4)
    letters = await read_events(settings, DeadLettered)
    assert len(letters) == 4
    assert all(letter.reason and letter.traceback is None for letter in letters)
    errored = [rollout for rollout in scored if rollout.status == "errored"]
    assert sorted(rollout.task.id for rollout in errored if rollout.task) == ["t", "t", "u"]
    assert {rollout.reward for rollout in errored} == {None}
    assert {rollout.error.kind for rollout in errored if rollout.error} == {"unknown_environment", "invalid_task"}
    assert [rollout.reward for rollout in scored if rollout.status == "completed"] == [1.0]


def misbehave(request: Request) -> object:
    replies = {
        "401": Status(401),
        "429": Status(429),
        "500": Status(500),
        "hang": Hang(),
        "empty": EMPTY_CHOICES,
        "surrogate": LONE_SURROGATE,
        "huge": big_text(),
        "fine": None,
    }
    for word, reply in replies.items():
        if f"please {word}." in str(request.body):
            return reply
    raise AssertionError("unexpected request")


async def test_a_model_outage_is_never_a_zero_and_never_ends_the_run(settings: Settings) -> None:
    def script(request: Request) -> object:
        return misbehave(request) or always("4")(request)

    words = ["401", "429", "500", "hang", "empty", "surrogate", "huge", "fine"]
    async with ScriptedModelServer(script) as server:  # type: ignore[arg-type]
        settings = with_model(settings, server.base_url, timeout_s=1.0)
        settings = settings.model_copy(update={"retries": RetrySettings(agent_attempts=2, first_delay_s=0.1)})
        async with pipeline(settings):
            # A run of its own each: a refused key pauses its run.
            await publish(settings, *(task(f"please {word}.", "4", run=word) for word in words))
            scored = {
                rollout.task.id.split()[1].rstrip("."): rollout for rollout in await terminal(settings, 8) if rollout.task
            }
    kinds = {word: rollout.error.kind for word, rollout in scored.items() if rollout.error}
    assert kinds == {
        "401": "model_unauthorized",
        "429": "model_rate_limited",
        "500": "model_unavailable",
        "hang": "model_timeout",
        "empty": "model_bad_response",
    }
    for word in kinds:
        assert_masked(scored[word])
    assert (scored["fine"].reward, scored["surrogate"].reward, scored["huge"].reward) == (1.0, 0.0, 0.0)
    assert len(str(scored["huge"].messages)) < 1_100_000
    assert "5000000 bytes in all" in str(scored["huge"].messages)
    assert r"\ud800" in scored["surrogate"].messages[-1]["content"]  # type: ignore[operator]


def assert_masked(rollout: RolloutScored) -> None:
    assert rollout.status == "errored"
    assert rollout.reward is None
    assert rollout.success is None
    assert rollout.mask.loss
    assert rollout.mask.baseline
