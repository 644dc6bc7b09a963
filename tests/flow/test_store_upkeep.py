"""Rebuilding the store from the log and comparing it with the log, on a real broker."""

import asyncio
import re
from pathlib import Path

import duckdb
import pytest

from rollstream.errors import UsageError
from rollstream.settings import Settings, StoreSettings
from rollstream.store.database import StoreFiles
from rollstream.store.reader import ask, open_snapshot
from rollstream.store.rebuild import rebuild
from rollstream.store.verification import Verified, verify
from schemas.envelope import Event
from tests.events import Attempt, run_published, task_submitted
from tests.flow.flows import publish, publish_bare
from tests.flow.test_store_flow import eventually, projecting
from tests.stores import answer
from tests.unit.test_store_docs import INTERNAL, QUERIES
from tests.unit.test_store_views import two_groups

pytestmark = pytest.mark.kafka

VIEWS = "SELECT view_name FROM duckdb_views() WHERE NOT internal AND view_name <> 'lag' ORDER BY 1"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"store": StoreSettings(publish_interval_s=0.2)})


async def rebuilt(settings: Settings) -> int:
    assert settings.bootstrap_servers is not None
    return await rebuild(settings.bootstrap_servers, settings.kafka, settings.data_dir, settings.store)


async def verified(settings: Settings) -> Verified:
    assert settings.bootstrap_servers is not None
    with open_snapshot(settings.data_dir) as connection:
        return await verify(settings.bootstrap_servers, settings.kafka, connection)


async def project_all(settings: Settings, count: int) -> None:
    async with projecting(settings):
        await eventually(settings, "SELECT sum(next_offset) FROM lag", (count,))


def everything() -> list[Event]:
    again = [Attempt(task_submitted(name, run="run-2", attempts=1), reward=1.0) for name in ("a", "b")]
    long = Attempt(task_submitted("long"), answer='é"\n' * 40_000)
    events = [event for attempt in (*again, long) for event in (attempt.task, *attempt.events())]
    return [*two_groups(), run_published("run-2", groups=2), *events, long.scored(), *again[0].events()]


async def fill(settings: Settings) -> int:
    """A log of everything that bites a store; returns how many records it has."""
    events = everything()
    await publish(settings, *events)
    await publish_bare(settings, b"\xff", b'{"question": "1 + 1"}', b"[]", b'{"a": "\\ud800", "a": 1e999}')
    return len(events) + 4


def answers(data_dir: Path) -> dict[str, object]:
    """What every view and every documented query gives, as far as it is determined."""
    with open_snapshot(data_dir) as connection:
        views = [str(name) for (name,) in ask(connection, VIEWS).rows if name not in INTERNAL]
        # Which of many that are equal come first is not determined, so nothing is cut off.
        whole = [re.sub(r"LIMIT \d+\s*$", "", query) for _, query in QUERIES if "published_at" not in query]
        queries = [f"FROM {name}" for name in views] + whole
        return {query: sorted(map(repr, ask(connection, query).rows)) for query in queries}


async def test_a_rebuilt_store_answers_every_view_and_every_documented_query_alike(settings: Settings, topics: None) -> None:
    count = await fill(settings)
    await project_all(settings, count)
    before = answers(settings.data_dir)
    assert sum(map(bool, before.values())) > 25
    assert await rebuilt(settings) == count
    assert answers(settings.data_dir) == before
    assert not StoreFiles(settings.data_dir, "store.rebuilding").folder.exists()
    found = await verified(settings)
    assert (found.is_clean, found.records) == (True, count)
    # The store_worker goes on where the rebuilt store ends.
    await publish(settings, Attempt(task_submitted("new")).scored())
    await project_all(settings, count + 1)


async def test_a_rebuild_is_refused_while_a_store_worker_runs(settings: Settings, topics: None) -> None:
    async with projecting(settings):
        with pytest.raises(UsageError, match=r"is being written by process \d+; stop it"):
            await rebuilt(settings)


async def test_an_interrupted_rebuild_changes_nothing(settings: Settings, topics: None) -> None:
    count = await fill(settings)
    await project_all(settings, count)
    before = answers(settings.data_dir)
    begun = asyncio.Event()
    assert settings.bootstrap_servers is not None

    def begin(records: int) -> object:
        begun.set()
        return lambda count: None

    task = asyncio.create_task(
        rebuild(settings.bootstrap_servers, settings.kafka, settings.data_dir, settings.store, begin=begin)  # type: ignore[arg-type]
    )
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answers(settings.data_dir) == before
    await project_all(settings, count)


async def test_a_store_that_the_log_was_projected_into_is_verified(settings: Settings, topics: None) -> None:
    count = await fill(settings)
    await project_all(settings, count)
    found = await verified(settings)
    assert (found.is_clean, found.records, found.differences) == (True, count, [])


@pytest.mark.parametrize(
    ("damage", "differs"),
    [
        ("UPDATE verdict_reached SET reward = 0.25 WHERE kafka_offset = 0", r"verdicts/\d"),
        ("DELETE FROM agent_stepped WHERE event_id = (SELECT min(event_id) FROM agent_stepped)", r"agent.steps/\d"),
        ("UPDATE long_payloads SET text = 'x' || text WHERE kind = 'RolloutScored' AND part = 0", r"rollouts.scored/\d"),
        ("INSERT INTO dead_rows BY NAME SELECT 'verdicts' AS topic, 7 AS kafka_partition, 0 AS kafka_offset", "verdicts/7"),
        ("DELETE FROM duplicate_records WHERE topic = 'verdicts'", r"verdicts/\d"),
    ],
)
async def test_what_differs_from_the_log_is_named(settings: Settings, topics: None, damage: str, differs: str) -> None:
    await project_all(settings, await fill(settings))
    published = StoreFiles(settings.data_dir).published
    published.chmod(0o644)
    with duckdb.connect(str(published)) as connection:
        connection.execute(damage)
    found = await verified(settings)
    places = sorted({f"{one.topic}/{one.partition}" for one in found.differences})
    assert not found.is_clean
    assert all(re.fullmatch(differs, place) for place in places)
    assert places


def test_verify_needs_a_published_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trajectories yet"):
        answer(tmp_path, "SELECT 1")
