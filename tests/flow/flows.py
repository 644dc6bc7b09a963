"""What flow tests share: the pipeline in this process, and reading what it wrote."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from rollstream.eventlog.apps import WorkerApp
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record, open_reader
from rollstream.settings import ModelSettings, Settings
from schemas.envelope import Event
from schemas.events import decode, decode_any
from schemas.rollout import RolloutScored
from services.__main__ import build
from topics.catalogue import BY_EVENT, ROLLOUTS_SCORED

E = TypeVar("E", bound=Event)
PIPELINE = ("env_worker", "agent_worker", "verifier_worker")


def with_model(settings: Settings, base_url: str, **changes: object) -> Settings:
    """The settings with `default` served at `base_url`, impatient enough for tests."""
    model = ModelSettings.model_validate({"base_url": base_url, "max_retries": 1, "timeout_s": 20, **changes})
    return settings.model_copy(update={"models": {"default": model}})


@asynccontextmanager
async def pipeline(settings: Settings, workers: Sequence[str] = PIPELINE) -> AsyncIterator[None]:
    """Workers, running in this process. One that breaks ends the test with its reason."""
    apps = [build(name, settings) for name in workers]
    try:
        for app in apps:
            await app.start()
        with _ended_by(apps):
            yield
    finally:
        await asyncio.gather(*(app.stop() for app in apps))


@contextmanager
def _ended_by(apps: Sequence[WorkerApp]) -> Iterator[None]:
    """End what runs here as soon as a worker breaks: what it waits for would never come."""
    here = asyncio.current_task()
    assert here is not None

    async def watch(app: WorkerApp) -> None:
        await app.broken.wait()
        here.cancel()

    watching = [asyncio.create_task(watch(app)) for app in apps]
    try:
        yield
    except asyncio.CancelledError:
        if not (broken := next((app for app in apps if app.failure is not None), None)):
            raise
        here.uncancel()
        raise AssertionError(f"{broken.worker} broke: {broken.failure!r}") from broken.failure
    finally:
        for task in watching:
            task.cancel()


async def publish(settings: Settings, *events: Event) -> None:
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish(events)


async def publish_bare(settings: Settings, *tasks: object, headers: Sequence[tuple[str, bytes]] = ()) -> None:
    """Records as a console producer writes them: bytes as they are, anything else as JSON; no key."""
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        for task in tasks:
            raw = task if isinstance(task, bytes) else json.dumps(task).encode()
            await producer.publish_raw("tasks.in", None, raw, headers)


async def read_events(settings: Settings, kind: type[E]) -> list[E]:
    """Everything of one kind that is in the log now."""
    assert settings.bootstrap_servers is not None
    async with open_reader(settings.bootstrap_servers, settings.kafka, [BY_EVENT[kind]]) as reader:
        found = [decode_any(record.value, BY_EVENT[kind].events) async for batch in reader.to_end() for record in batch]
    return [event for event in found if isinstance(event, kind)]


async def terminal_records(settings: Settings, count: int, deadline_s: float = 60.0) -> list[Record]:
    """The first `count` records of `rollouts.scored`, as they come."""
    assert settings.bootstrap_servers is not None
    found: list[Record] = []
    async with asyncio.timeout(deadline_s):
        async with open_reader(settings.bootstrap_servers, settings.kafka, [ROLLOUTS_SCORED]) as reader:
            while len(found) < count:
                found += await reader.poll()
    return found


async def terminal(settings: Settings, count: int, deadline_s: float = 60.0) -> list[RolloutScored]:
    """The first `count` terminal records."""
    return [decode(record.value, RolloutScored) for record in await terminal_records(settings, count, deadline_s)]
