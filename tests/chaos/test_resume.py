"""Ten-step episodes while agents and environments are killed: each ends once, and no step that is in the log is made again."""

import asyncio
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from rollstream.broker import EmbeddedBroker
from schemas.episode import EpisodeCompleted
from schemas.events import decode
from schemas.rollout import RolloutScored
from schemas.step import AgentStepped
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from schemas.verdict import VerdictReached
from tests.chaos import model
from tests.chaos.ledger import Ledger, read_all, show
from tests.chaos.plan import FULL, SEED
from tests.chaos.stack import RUN, Installation, all_ended, installed, publish, raw_task
from topics.catalogue import AGENT_STEPS, ENV_ACTIONS, ENV_OBSERVATIONS, EPISODES_COMPLETED, ROLLOUTS_SCORED, VERDICTS

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS = 10
EPISODES = 200 if FULL else 60
LANES = 32 if FULL else 16
MORTAL = ["agent_worker-1", "agent_worker-2", "agent_worker-3", "env_worker-1", "env_worker-2"]
DEADLINE_S = 600.0 if FULL else 240.0


def count_to_ten(number: int) -> TaskSubmitted:
    return TaskSubmitted.create(
        run=RUN,
        environment="counter",
        task=TaskRef(id=f"e{number}", dataset=RUN, index=number),
        row={
            "messages": [{"role": "user", "content": f"Episode e{number}: add 1 to the counter ten times."}],
            "initial_count": number,
            "expected_count": number + STEPS,
        },
        composition=Composition(harness="tools", models={"policy": "default"}),
    )


@pytest.mark.timeout(DEADLINE_S + 180)
async def test_every_episode_ends_once_where_it_would_have_and_no_recorded_step_is_made_again(
    mortal_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    tasks = [count_to_ten(number) for number in range(EPISODES)]
    options = {"lanes": LANES, "max_latency_s": 1.5, "flaky": 0.0, "tool_steps": STEPS}
    async with installed(mortal_broker, tmp_path, **options) as here:  # type: ignore[arg-type]
        for name in (*MORTAL, "verifier_worker-1"):
            here.workers.start(name)
        await here.workers.ready()
        here.workers.keep()
        here.diary.began = began = time.time()
        harm = asyncio.create_task(kill_at_random(here))
        try:
            await publish(here.settings, [raw_task(task) for task in tasks], per_second=1_000, at_once=EPISODES)
            ended = await all_ended(here.settings, EPISODES, DEADLINE_S)
        finally:
            harm.cancel()
            await asyncio.wait([harm])
        took_s = time.time() - began
        await here.workers.whole()
        codes = await here.workers.stop()
        ledger = await Ledger.read(here.settings)
        records = {topic: await read_all(here.settings, topic) for topic in (AGENT_STEPS, ENV_ACTIONS, ENV_OBSERVATIONS)}
        episodes = {record.header_map()["session_id"] for record in await read_all(here.settings, EPISODES_COMPLETED)}
    print(f"\nseed {SEED}\n{here.diary}")
    steps = [decode(record.value, AgentStepped) for record in records[AGENT_STEPS]]
    in_the_log: dict[tuple[str, int], float] = {}
    for step, record in zip(steps, records[AGENT_STEPS], strict=True):
        assert step.task is not None
        key, at = (step.task.id, step.index), record.timestamp_ms / 1000
        in_the_log[key] = min(at, in_the_log.get(key, at))
    calls = model.step_calls(here.journal)
    again = [(name, step) for at, name, step in calls if at > in_the_log.get((name, step), float("inf")) + 0.01]
    executions: dict[str, set[str]] = defaultdict(set)
    for step in steps:
        executions[step.session].add(step.execution.id)
    kills = sum("SIGKILL" in text for _, text in here.diary.entries)
    show(
        f"resume: {EPISODES} episodes of {STEPS} actions, {took_s:.0f} s, seed {SEED}",
        {
            "workers killed": kills,
            "attempts with a terminal record that counts": sum(ledger.audit.counting.values()),
            "sessions that more than one execution played": sum(len(found) > 1 for found in executions.values()),
            "model calls": len(calls),
            "model calls without a crash": EPISODES * (STEPS + 1),
            "model calls for a step that was in the log": len(again),
            "steps in the log": len(records[AGENT_STEPS]),
            "actions asked for": len(records[ENV_ACTIONS]),
            "observations": len(records[ENV_OBSERVATIONS]),
            "retries": len(ledger.records["rollouts.retries"]),
            "workers that ended by themselves": here.workers.ended_by_themselves,
        },
    )
    assert ended == EPISODES
    assert ledger.audit.missing == []
    assert ledger.audit.double == {}
    assert ledger.audit.counting["completed"] == EPISODES
    assert len(episodes) == EPISODES
    assert again == []
    assert kills >= 3
    assert sum(len(found) > 1 for found in executions.values()) > 0, "nothing was resumed, so nothing was shown"
    assert_ends_are_those_of_an_undisturbed_run(ledger, {step.event_id: step for step in steps})
    # One that was started again a moment ago may not know SIGTERM yet.
    assert set(codes.values()) <= {0, -15}


def assert_ends_are_those_of_an_undisturbed_run(ledger: Ledger, steps: dict[str, AgentStepped]) -> None:
    for record in ledger.records[ROLLOUTS_SCORED.name]:
        scored = decode(record.value, RolloutScored)
        assert (scored.reward, scored.status, len(scored.steps)) == (1.0, "completed", STEPS)
        assert [message["role"] for message in scored.messages] == ["user", *["assistant", "tool"] * STEPS, "assistant"]
        assert len(scored.calls) == STEPS + 1
    for record in ledger.records[VERDICTS.name]:
        verdict = decode(record.value, VerdictReached)
        assert verdict.task is not None
        assert verdict.diagnostics == {"count": int(verdict.task.id[1:]) + STEPS, "actions": STEPS}
    for record in ledger.records[EPISODES_COMPLETED.name]:
        assert [steps[name].index for name in decode(record.value, EpisodeCompleted).steps] == list(range(STEPS + 1))


async def kill_at_random(here: Installation) -> None:
    """Kill an agent or an environment now and then; the role that was hit last is spared, so that its group gets somewhere."""
    rng = random.Random(SEED)
    last = ""
    while True:
        await asyncio.sleep(rng.uniform(3, 6))
        name = rng.choice([name for name in MORTAL if name.rpartition("-")[0] != last])
        last = name.rpartition("-")[0]
        here.workers.kill(name)
