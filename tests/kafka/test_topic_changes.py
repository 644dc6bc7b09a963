"""Topics that are deleted, made anew or given more partitions, under workers that run and between two of them."""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from rollstream.eventlog import topic_watch
from rollstream.eventlog.apps import WorkerApp
from rollstream.eventlog.commits import Commit
from rollstream.eventlog.metadata import TopicFound
from rollstream.eventlog.offsets import GroupOffsets
from rollstream.eventlog.reading import Record
from rollstream.eventlog.topic_watch import TopicsChanged, change
from rollstream.settings import Settings
from tests.kafka.group_admin import NOBODY, operator_of
from tests.kafka.test_lanes import app_for, running, send, until, until_nothing_is_open
from topics.catalogue import ROLLOUTS_SCORED, TASKS_IN, Topic

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(120)]

A, B = UUID(int=1), UUID(int=2)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at every few seconds is looked at all the time."""
    monkeypatch.setattr(topic_watch, "LOOK_EVERY_S", 0.3)
    monkeypatch.setattr(topic_watch, "LOOK_AGAIN_S", 0.1)


class Seen(list[bytes | None]):
    """What a worker has handled."""

    async def handle(self, record: Record) -> None:
        self.append(record.value)


async def end_of(app: Any) -> str:
    """Wait until a worker breaks; returns its last words, and stops it."""
    assert isinstance(app, WorkerApp)
    async with asyncio.timeout(30):
        await app.broken.wait()
    await app.stop()
    assert isinstance(app.failure, TopicsChanged)
    return str(app.failure)


async def run_until_broken(settings: Settings, what: Any) -> str:
    """Handle twenty records, then let `what` happen to the topics; returns the worker's last words."""
    seen = Seen()
    app = app_for(settings, seen.handle)
    await app.start()
    await send(settings, 20)
    await until(lambda: len(seen) == 20)
    await until_nothing_is_open(settings)
    await what()
    return await end_of(app)


@pytest.mark.parametrize("count", [5, 20, 60], ids=["shorter", "as long", "longer"])
async def test_a_topic_made_anew_ends_its_workers_and_the_next_handle_it_from_its_start(settings: Settings, count: int) -> None:
    async with operator_of(settings) as operator:

        async def make_anew() -> None:
            await operator.make_anew(TASKS_IN)
            await send(settings, count)

        said = await run_until_broken(settings, make_anew)
    # What it sees depends on when it looks.
    assert "was deleted and made anew: the worker ends; one that starts begins" in said or "is gone: the worker ends" in said
    seen = Seen()
    async with running(app_for(settings, seen.handle)):
        await until_nothing_is_open(settings)
    assert sorted(int(value or b"") for value in seen) == list(range(count))


async def test_what_was_committed_of_a_topic_says_nothing_of_its_successor(settings: Settings) -> None:
    """As when the last commit of a worker comes after the topic was made anew."""
    async with operator_of(settings) as operator:
        seen = Seen()
        async with running(app_for(settings, seen.handle)):
            await send(settings, 20)
            await until_nothing_is_open(settings)
            old = {tp: commit for tp, commit in (await operator.committed()).items() if commit.offset > 0}
        await operator.make_anew(TASKS_IN)
        await send(settings, 60)
        await GroupOffsets(operator._admin).commit(operator.group, NOBODY, old)
        seen.clear()
        async with running(app_for(settings, seen.handle)):
            await until_nothing_is_open(settings)
    assert all("@" in commit.metadata for commit in old.values())
    assert sorted(int(value or b"") for value in seen) == list(range(60))


async def test_a_topic_that_was_given_partitions_ends_the_workers_that_run(settings: Settings) -> None:
    async with operator_of(settings) as operator:
        said = await run_until_broken(settings, lambda: operator.add_partitions(ROLLOUTS_SCORED, 4))
    assert said.startswith(f"topic {settings.kafka.topic_prefix}rollouts.scored: expected 3 partitions, found 4")
    assert "\n" not in said


@pytest.mark.parametrize("topic", [TASKS_IN, ROLLOUTS_SCORED], ids=["read", "written"])
async def test_a_topic_that_is_gone_ends_the_workers_that_need_it(settings: Settings, topic: Topic) -> None:
    async with operator_of(settings) as operator:
        said = await run_until_broken(settings, lambda: operator.delete(topic))
    assert said.startswith(f"topic {settings.kafka.topic_prefix}{topic.name} is gone")


async def test_commits_of_an_operator_are_taken_at_their_word(settings: Settings) -> None:
    async with operator_of(settings) as operator:
        await send(settings, 20)
        await operator.set_offsets(dict.fromkeys(operator.partitions(TASKS_IN), 1))
        assert set((await operator.committed()).values()) == {Commit(1, "")}
        seen = Seen()
        async with running(app_for(settings, seen.handle)):
            await until_nothing_is_open(settings)
    assert len(seen) == 17


def found(partitions: int = 3, topic_id: UUID | None = A) -> TopicFound:
    return TopicFound(partitions, topic_id)


def test_only_what_a_worker_reads_need_be_the_same_log() -> None:
    assert change({"t": found()}, {"t": found(topic_id=B)}, read=["t"]) == (
        "topic t was deleted and made anew: the worker ends; one that starts begins at the new topic's start"
    )
    assert change({"t": found()}, {"t": found(topic_id=B)}, read=[]) is None
    assert change({"t": found()}, {"t": found()}, read=["t"]) is None


def test_a_broker_without_topic_ids_is_no_change() -> None:
    assert change({"t": found(topic_id=None)}, {"t": found(topic_id=None)}, read=["t"]) is None
    assert change({"t": found(topic_id=None)}, {"t": found(topic_id=A)}, read=["t"]) is None
