"""The example subscriber, as a trainer would start it, while a run goes on."""

import asyncio
import sys
from pathlib import Path

import pytest

from rollstream.settings import KafkaSettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, always
from tests.flow.flows import pipeline, publish, with_model
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "subscribe.py"


async def test_the_subscriber_prints_each_group_once_when_it_is_complete(settings: Settings) -> None:
    # The example speaks to an installation without a prefix, as a trainer would.
    settings = settings.model_copy(update={"kafka": KafkaSettings(partitions=3, session_timeout_s=6)})
    subscriber = None
    async with ScriptedModelServer(always(r"\boxed{4}")) as server:
        try:
            async with pipeline(with_model(settings, server.base_url)):
                subscriber = await asyncio.create_subprocess_exec(
                    sys.executable, str(EXAMPLE), str(settings.bootstrap_servers), "r", stdout=asyncio.subprocess.PIPE
                )
                await publish(settings, task("2 + 2", "4", attempts=3), task("2 + 3", "5", attempts=2))
                assert subscriber.stdout is not None
                async with asyncio.timeout(60):
                    lines = sorted([(await subscriber.stdout.readline()).decode() for _ in range(2)], key=len)
        finally:
            if subscriber is not None:
                subscriber.kill()
                await subscriber.wait()
    assert "math: 2 rollouts, rewards [0.0, 0.0]" in lines[0]
    assert "math: 3 rollouts, rewards [1.0, 1.0, 1.0]" in lines[1]
