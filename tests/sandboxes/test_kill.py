"""Every worker is killed while ten agents work in boxes: each episode ends once, no box is left, and others' boxes stay.

How long anything takes is the machine's affair. One that stands still for longer than a lease may cost a box that is in use:
its session then is followed by another, as the log says, and nothing else changes.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from rollstream.eventlog.connection import installation_of
from rollstream.sandboxes import registry
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.settings import SandboxSettings, Settings
from schemas.envelope import now
from schemas.events import decode
from schemas.identities import session_id
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxReleased
from schemas.session import SessionReady
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Ledger
from tests.chaos.stack import all_ended
from tests.flow.flows import publish, read_events
from tests.sandboxes.test_reaping import ids_of, made

pytestmark = [pytest.mark.docker, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
EPISODES = 10
AGENT = "sleep {}; cp word answer.txt"
UNTIL_IT_IS_KILLED_S = 900
AFTERWARDS_S = 12
"""Longer than a lease, which has to be renewed meanwhile."""
WORKERS = ("env_worker-1", "agent_worker-1", "agent_worker-2", "verifier_worker-1")
DEADLINE_S = 300.0
BOXED = f"{Path(__file__).parents[1]}/boxed.py:BoxedEnvironment"


@pytest.fixture(params=["docker", "bubblewrap"])
async def provider(request: pytest.FixtureRequest, sandbox_image: str, bubblewrap: None) -> AsyncIterator[SandboxProvider]:
    provider = registry.load(SandboxSettings(image=sandbox_image), "cleanup", request.param)
    yield provider
    await provider.close()


def agent_that_takes(seconds: int) -> dict[str, str]:
    return {"ROLLSTREAM_HARNESSES__COMMAND__ARGV": json.dumps(["sh", "-c", AGENT.format(seconds)])}


@pytest.fixture
async def fleet(settings: Settings, topics: None, sandbox_image: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Workers whose settings name no provider: runs do."""
    environment = {
        **os.environ,
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        "ROLLSTREAM_KAFKA": settings.kafka.model_dump_json(),
        "ROLLSTREAM_PLUGINS__ENVIRONMENTS": json.dumps({"boxed": BOXED}),
        **agent_that_takes(UNTIL_IT_IS_KILLED_S),
        "ROLLSTREAM_SANDBOXES__IMAGE": sandbox_image,
        "ROLLSTREAM_SANDBOXES__LEASE_SECONDS": "8",
        "ROLLSTREAM_SANDBOXES__REAP_INTERVAL_SECONDS": "1",
        "ROLLSTREAM_RETRIES__FIRST_DELAY_S": "0.2",
        "ROLLSTREAM_VERIFIER__GRADER_PROCESSES": "1",
    }
    fleet = Fleet(environment, tmp_path / "logs")
    yield fleet
    await fleet.stop(gracefully=False)


def task(number: int, backend: str) -> TaskSubmitted:
    word = f"word-{number}"
    return TaskSubmitted.create(
        run="killed",
        environment="boxed",
        task=TaskRef(id=f"t{number}", dataset="killed", index=number),
        row={"word": word, "box": {"files": {"word": word}}},
        composition=Composition(harness="command", sandbox=backend),
    )


async def own_boxes(provider: SandboxProvider, installation: str) -> dict[str, SandboxHolder]:
    return {box.id: box.tag.holder for box in await provider.found() if box.tag.installation == installation}


def sessions_of(boxes: Mapping[str, SandboxHolder]) -> set[str]:
    return {holder.session for holder in boxes.values() if holder.session is not None}


async def test_every_worker_is_killed_while_ten_boxes_run(provider: SandboxProvider, fleet: Fleet, settings: Settings) -> None:
    installation = await installation_of(settings.bootstrap_servers or "", settings.kafka)
    foreign = [await made(provider, "another-cluster/", expired=expired) for expired in (False, True)]
    for name in WORKERS:
        fleet.start(name)
    await fleet.ready()
    await publish(settings, *(task(number, provider.name) for number in range(EPISODES)))

    async with asyncio.timeout(DEADLINE_S):
        while len(sessions_of(await own_boxes(provider, installation))) < EPISODES:
            await asyncio.sleep(0.1)
    for name in WORKERS:
        fleet.kill(name)
    killed_at = time.monotonic()
    await fleet.stop(gracefully=False)
    held = await own_boxes(provider, installation)
    started_again = now()
    fleet.environment = {**fleet.environment, **agent_that_takes(AFTERWARDS_S)}
    for name in WORKERS:
        fleet.start(name)
    ended = await all_ended(settings, EPISODES, DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while await own_boxes(provider, installation):
            await asyncio.sleep(0.2)
    took_s = time.monotonic() - killed_at
    await fleet.stop()

    ledger = await Ledger.read(settings)
    scored = [decode(record.value, RolloutScored) for record in ledger.records["rollouts.scored"]]
    ready = await read_events(settings, SessionReady)
    lost = [retry for retry in await read_events(settings, RetryScheduled) if retry.stage == "agent"]
    released = await read_events(settings, SandboxReleased)
    leased = await read_events(settings, SandboxLeased)
    how = Counter(event.how for event in {event.sandbox: event for event in released}.values() if event.sandbox in held)
    print(f"\n{provider.name}: all over {took_s:.1f} s after the kill; of {len(held)} boxes: {how}; {len(lost)} lost")
    assert ended == EPISODES
    assert (ledger.audit.missing, ledger.audit.double) == ([], {})
    assert ledger.audit.counting["completed"] == EPISODES
    assert [one.reward for one in scored] == [1.0] * EPISODES
    assert {retry.cause.kind for retry in lost} <= {"sandbox_unavailable"}
    first = {one.session for one in ready if one.try_ == 0}
    assert len(first) == EPISODES
    assert {one.session for one in ready} - first == {
        session_id(retry.rollout, retry.next_round, retry.next_try) for retry in lost
    }
    assert held
    assert sessions_of(held) <= first
    assert {event.how for event in released if event.sandbox in held} <= {"fenced", "expired"}
    # What was on its way when its holder was killed may be a lease without a box; all else that was leased is released.
    since = {event.sandbox for event in leased if event.renewal == 0 and event.occurred_at >= started_again}
    assert {event.sandbox for event in released} >= since | held.keys()
    for box in foreign:
        assert box.id in await ids_of(provider)
        assert (await box.exec(["echo", "untouched"])).stdout.text == "untouched\n"
        await box.close()
