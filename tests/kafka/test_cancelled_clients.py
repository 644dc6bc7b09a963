"""Whoever is cancelled just when it closes a client of the broker ends, and does not go on with what comes next."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiokafka.client import AIOKafkaClient

from rollstream.eventlog.connection import installation_of
from rollstream.eventlog.groups import open_groups
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import open_reader
from rollstream.reaping import lease_events
from rollstream.settings import Settings
from schemas.envelope import now
from topics.catalogue import RUNS_CONTROL

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]


async def ask(settings: Settings) -> None:
    await installation_of(settings.bootstrap_servers or "", settings.kafka)


async def read(settings: Settings) -> None:
    async with open_reader(settings.bootstrap_servers or "", settings.kafka, [RUNS_CONTROL]):
        pass


async def produce(settings: Settings) -> None:
    async with EventProducer(settings.bootstrap_servers, settings.kafka):
        pass


async def look_at_groups(settings: Settings) -> None:
    async with open_groups(settings.bootstrap_servers or "", settings):
        pass


async def look_at_leases(settings: Settings) -> None:
    async for _ in lease_events(settings.bootstrap_servers or "", settings.kafka, now()):
        pass


@pytest.mark.parametrize("use", [ask, read, produce, look_at_groups, look_at_leases])
async def test_who_is_cancelled_while_it_closes_a_client_ends_and_leaves_none_open(
    use: Callable[[Settings], Awaitable[None]], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = asyncio.Event()
    close = AIOKafkaClient.close
    closed: list[AIOKafkaClient] = []

    async def watched(self: AIOKafkaClient) -> None:
        # The client cancels a task of its own, and waits for it: here, a cancellation is taken for that one's.
        asyncio.get_running_loop().call_soon(closing.set)
        await close(self)
        closed.append(self)

    async def use_it_and_go_on() -> None:
        await use(settings)
        await asyncio.sleep(600)

    monkeypatch.setattr(AIOKafkaClient, "close", watched)
    before = asyncio.all_tasks()
    task = asyncio.create_task(use_it_and_go_on())
    await closing.wait()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=20)
    assert done, "it went on"
    assert task.cancelled()
    assert closed
    left = {one for one in asyncio.all_tasks() - before if "aiokafka" in str(one.get_coro().__qualname__).lower()}
    assert not left
