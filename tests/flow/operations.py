"""What tests share of what people do to runs while they go on."""

import asyncio
from collections.abc import Callable

from rollstream.environments.math import MathEnvironment, MathTask
from rollstream.environments.protocol import Episode, Services, Verdict
from rollstream.settings import RetrySettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, always
from schemas.rollout import RolloutScored
from schemas.session import SessionReady
from schemas.task import TaskSubmitted
from tests.flow.flows import read_events, with_model
from tests.flow.test_spine import task

FOUR = always(r"\boxed{4}")
NEVER_AGAIN = RetrySettings(agent_attempts=1, verification_attempts=1)


def tasks(count: int, attempts: int = 1, **changes: str) -> list[TaskSubmitted]:
    return [task(f"{number} + 2", "4", attempts=attempts, **changes) for number in range(count)]


def served(settings: Settings, server: ScriptedModelServer, retries: RetrySettings = NEVER_AGAIN) -> Settings:
    return with_model(settings, server.base_url, max_retries=0, timeout_s=300).model_copy(update={"retries": retries})


async def records(settings: Settings, status: str = "", round_: int | None = None) -> list[RolloutScored]:
    """Terminal records in the log now, chosen by status and round."""
    found = await read_events(settings, RolloutScored)
    return [record for record in found if status in ("", record.status) and round_ in (None, record.round)]


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


async def until_sessions(settings: Settings, count: int) -> None:
    async with asyncio.timeout(30):
        while len(await read_events(settings, SessionReady)) < count:
            await asyncio.sleep(0.1)


class LateEnvironment(MathEnvironment):
    """`math`, installed only after its tasks were published, and with a bug in its first verdict."""

    name = "late"
    bugs = 0

    async def verify(self, task: MathTask, episode: Episode, services: Services) -> Verdict:
        if LateEnvironment.bugs > 0:
            LateEnvironment.bugs -= 1
            raise RuntimeError("a bug in the environment")
        return await super().verify(task, episode, services)
