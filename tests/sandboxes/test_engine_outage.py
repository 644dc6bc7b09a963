"""The engine goes away while an agent works in a box: the attempt is tried again, scored once, and no box is left."""

import asyncio
from pathlib import Path

import pytest

from rollstream.eventlog.connection import installation_of
from rollstream.sandboxes.docker import DockerProvider
from rollstream.settings import CommandSettings, HarnessSettings, PluginSettings, RetrySettings, SandboxSettings, Settings
from schemas.retry import RetryScheduled
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from tests.flow.flows import pipeline, publish, read_events, terminal
from tests.sandboxes.test_docker import engine_through
from tests.sandboxes.test_kill import BOXED, own_boxes

pytestmark = [pytest.mark.docker, pytest.mark.kafka, pytest.mark.slow]
DEADLINE_S = 120.0
AGENT = "sleep 4; cp word answer.txt"


async def test_an_engine_that_stops_under_an_agent_is_waited_for_and_the_attempt_ends_once(
    topics: None, settings: Settings, sandbox_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")
    settings = settings.model_copy(
        update={
            "harnesses": HarnessSettings(command=CommandSettings(argv=["sh", "-c", AGENT])),
            "plugins": PluginSettings(environments={"boxed": BOXED}),
            "retries": RetrySettings(agent_attempts=20, first_delay_s=0.5, factor=1.2, most_delay_s=2),
            "sandboxes": SandboxSettings(image=sandbox_image, lease_seconds=5, reap_interval_seconds=0.5),
        }
    )
    task = TaskSubmitted.create(
        run="outage",
        environment="boxed",
        task=TaskRef(id="t", dataset="outage", index=0),
        row={"word": "w", "box": {"files": {"word": "w"}}},
        composition=Composition(harness="command", sandbox="docker"),
    )
    installation = await installation_of(settings.bootstrap_servers or "", settings.kafka)
    direct = DockerProvider("cleanup", host="unix:///var/run/docker.sock")
    async with pipeline(settings), asyncio.timeout(DEADLINE_S):
        async with engine_through(tmp_path / "engine"):
            await publish(settings, task)
            while not (boxes := await own_boxes(direct, installation)):
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)
        while not (retries := await read_events(settings, RetryScheduled)):
            await asyncio.sleep(0.2)
        async with engine_through(tmp_path / "engine"):
            (scored,) = await terminal(settings, 1)
            while await own_boxes(direct, installation):
                await asyncio.sleep(0.2)
    await direct.close()
    assert len(boxes) == 1
    assert "engine" in retries[0].cause.message
    assert (scored.status, scored.reward) == ("completed", 1.0)
