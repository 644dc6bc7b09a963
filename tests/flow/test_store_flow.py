"""The store_worker's part on a real broker: from the log to SQL."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from rollstream.errors import StoreUnavailable, UsageError
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.reading import Record
from rollstream.settings import Settings, StoreSettings
from rollstream.store.feed import Feed
from rollstream.store.reader import ask, open_snapshot
from services.store_worker.handler import Projector
from tests.events import Attempt, attempts, run_published, task_submitted
from tests.flow.flows import publish, publish_bare

pytestmark = pytest.mark.kafka

DEADLINE_S = 30.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"store": StoreSettings(publish_interval_s=0.2)})


@asynccontextmanager
async def projecting(settings: Settings) -> AsyncIterator[Projector]:
    projector = Projector(settings)
    await projector.start()
    running = asyncio.create_task(projector.run())
    try:
        yield projector
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await projector.close()


def published(settings: Settings, query: str) -> list[tuple[object, ...]]:
    with open_snapshot(settings.data_dir) as connection:
        return list(ask(connection, query).rows)


async def eventually(settings: Settings, query: str, *expected: tuple[object, ...]) -> None:
    """Wait until the published store gives `expected`."""
    found: object = None

    def agrees() -> bool:
        nonlocal found
        with suppress(StoreUnavailable):
            found = published(settings, query)
        return found == list(expected)

    await until(agrees, lambda: f"{query} gave {found}")


async def until(condition: Callable[[], bool], describe: Callable[[], str] = lambda: "") -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_S} s: {describe()}")


async def fetched(feed: Feed) -> list[Record]:
    """The next records that arrive."""
    async with asyncio.timeout(DEADLINE_S):
        while not (records := await feed.fetch(0.2, max_records=10)):
            pass
    return records


async def with_admin(settings: Settings, name: str, call: str) -> None:
    assert settings.bootstrap_servers is not None
    admin: AIOKafkaAdminClient = await connect_admin(settings.bootstrap_servers)
    topic = settings.kafka.topic_prefix + name
    try:
        if call == "delete":
            await admin.delete_topics([topic])
            # Deletion is asynchronous: until it is done the topic still shows, and nobody leads its partitions.
            async with asyncio.timeout(DEADLINE_S):
                while topic in await admin.list_topics():
                    await asyncio.sleep(0.05)
        else:
            await admin.create_topics([NewTopic(topic, num_partitions=3, replication_factor=1)])
    finally:
        await admin.close()


async def test_events_become_rows_that_sql_can_read_while_the_log_goes_on(settings: Settings, topics: None) -> None:
    task = task_submitted(attempts=2)
    first, second = attempts(task, 1.0, 0.0)
    count = "SELECT environment, count(*), avg(reward) FROM rollouts GROUP BY 1"
    async with projecting(settings) as projector:
        await publish(settings, run_published(attempts=2), task, *first.events())
        await eventually(settings, count, ("math", 1, 1.0))
        await publish(settings, *second.events())
        await eventually(settings, count, ("math", 2, 0.5))
        assert projector.last_apply is not None
        assert projector.behind == 0


async def test_close_publishes_what_was_stored(settings: Settings, topics: None) -> None:
    rarely = settings.model_copy(update={"store": StoreSettings(publish_interval_s=3600)})
    async with projecting(rarely) as projector:
        await until((rarely.data_dir / "trajectories.duckdb").exists)
        await publish(settings, Attempt().scored())
        await until(lambda: projector.last_apply is not None)
    assert published(settings, "SELECT count(*) FROM rollouts") == [(1,)]


async def test_a_restarted_worker_goes_on_where_the_store_ends(settings: Settings, topics: None) -> None:
    async with projecting(settings):
        await publish(settings, *Attempt().events())
        await eventually(settings, "SELECT count(*) FROM events", (5,))
    await publish(settings, *Attempt(index=1, task=task_submitted(attempts=2)).events())
    async with projecting(settings):
        await eventually(settings, "SELECT count(*), count(DISTINCT event_id) FROM events", (10, 10))


async def test_a_store_rebuilt_from_the_log_answers_the_same(settings: Settings, topics: None) -> None:
    everything = "SELECT * FROM rollouts ORDER BY rollout_id"
    task = task_submitted(attempts=3)
    first, second = attempts(task, 1.0, 0.0)
    await publish(settings, task, *first.events(), *second.events(), second.scored(revision=1), *first.events())
    rebuilt = settings.model_copy(update={"data_dir": settings.data_dir.with_name("rebuilt")})
    for each in (settings, rebuilt):
        async with projecting(each):
            await eventually(each, "SELECT sum(next_offset) FROM lag", (17,))
    assert published(settings, everything) == published(rebuilt, everything)


async def test_a_topic_that_appears_later_is_read_too(settings: Settings, topics: None) -> None:
    await with_admin(settings, "verdicts", "delete")
    assert settings.bootstrap_servers is not None
    feed = await Feed.open(settings.bootstrap_servers, settings.kafka, {}, look_again_s=0.5)
    try:
        await publish(settings, Attempt().ready())
        assert [record.topic for record in await fetched(feed)] == ["sessions.ready"]
        await with_admin(settings, "verdicts", "create")
        await publish(settings, Attempt().verdict())
        assert [record.topic for record in await fetched(feed)] == ["verdicts"]
    finally:
        await feed.close()


async def test_a_topic_made_anew_stops_the_store_with_one_sentence(settings: Settings, topics: None) -> None:
    async with projecting(settings):
        await publish(settings, *Attempt().events())
        await eventually(settings, "SELECT count(*) FROM events", (5,))
    await with_admin(settings, "verdicts", "delete")
    await with_admin(settings, "verdicts", "create")
    again = Projector(settings)
    await again.start()
    with pytest.raises(UsageError, match=r"has read verdicts/\d up to offset 1, but the log ends at 0"):
        await asyncio.wait_for(again.run(), DEADLINE_S)
    await again.close()


async def test_a_broker_that_is_away_is_waited_for(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    nobody = settings.model_copy(update={"bootstrap_servers": "127.0.0.1:9"})
    async with projecting(nobody):
        await until(lambda: "no Kafka broker answers at 127.0.0.1:9" in caplog.text)
    assert published(nobody, "SELECT count(*) FROM rollouts") == [(0,)]


async def test_what_cannot_be_read_is_counted_and_blocks_nothing(settings: Settings, topics: None) -> None:
    async with projecting(settings):
        await publish_bare(settings, b"\xff\xfe", b'{"question": "1 + 1"}', b"[]")
        await publish(settings, *Attempt().events())
        await eventually(settings, "SELECT count(*) FROM rollouts", (1,))
        await eventually(settings, "SELECT count(*) FROM dead_letters", (2,))
        await eventually(settings, "SELECT count(*) FROM task_submitted WHERE group_id IS NULL", (1,))
