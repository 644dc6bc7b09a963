"""The broker dies in the middle of a run and comes back: work goes on, and nothing is lost."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rollstream.broker import EmbeddedBroker
from rollstream.settings import KafkaSettings, Settings
from rollstream.testing.model_server import Held, ScriptedModelServer, Text
from tests.flow.flows import pipeline, publish, terminal, with_model
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]

OUTAGE_S = 20
EPISODES = 60


async def test_a_broker_that_is_gone_for_twenty_seconds_costs_no_rollout(tmp_path: Path) -> None:
    embedded = EmbeddedBroker(tmp_path)
    running = await asyncio.to_thread(embedded.start)
    settings = Settings(
        data_dir=tmp_path,
        bootstrap_servers=running.bootstrap,
        kafka=KafkaSettings(partitions=3, session_timeout_s=6, commit_interval_s=0.1),
    )
    answer = asyncio.Event()
    try:
        async with (
            ScriptedModelServer(lambda _: Held(Text(r"\boxed{4}"), answer)) as server,
            pipeline(with_model(settings, server.base_url, timeout_s=120)),
        ):
            await publish(settings, *(task(f"{number} + 0", "4") for number in range(EPISODES)))
            await server.wait_for_requests(EPISODES, timeout_s=60)
            assert running.pid is not None
            os.kill(running.pid, signal.SIGKILL)
            answer.set()
            await asyncio.sleep(OUTAGE_S)
            await asyncio.to_thread(embedded.start)
            scored = await terminal(settings, EPISODES, deadline_s=120)
    finally:
        await asyncio.to_thread(embedded.stop)
    assert {rollout.status for rollout in scored} == {"completed"}
    assert len({rollout.rollout for rollout in scored}) == EPISODES
    assert {rollout.reward for rollout in scored} == {1.0}
