"""Traps of the clients we build on that only a real broker, or the whole code, can show. The others are in `tests/chaos`."""

import re
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.partitioner import DefaultPartitioner
from faststream import AckPolicy

from rollstream.eventlog.apps import parse_record
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.settings import Settings
from services.__main__ import WORKERS, build
from tests.chaos.group import partition, record
from tests.events import Attempt, task_submitted
from tests.kafka.test_lanes import app_for, read_all, running, send, until, until_nothing_is_open
from topics.catalogue import EPISODES_COMPLETED, SESSIONS_READY, VERDICTS

pytestmark = [pytest.mark.kafka]

SOURCE = [path for folder in ("rollstream", "services") for path in (Path(__file__).parents[2] / folder).rglob("*.py")]


@pytest.mark.usefixtures("topics")
async def test_trap_8_a_consumer_commits_nothing_by_itself_whether_handlers_return_or_raise(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def commit(*arguments: Any) -> None:
        raise AssertionError("the position of every partition was committed")

    monkeypatch.setattr(AIOKafkaConsumer, "commit", commit)
    seen: list[bytes | None] = []

    async def handler(record: Record) -> None:
        seen.append(record.value)
        if record.value in (b"3", b"7"):
            raise RuntimeError("boom")

    await send(settings, 12)
    async with running(app_for(settings, handler)):
        await until(lambda: len(seen) == 12)
        await until_nothing_is_open(settings)
    assert len(seen) == 12, "what raised was handled again"


@pytest.mark.parametrize("worker", WORKERS)
def test_trap_8_no_subscriber_acks_by_itself(settings: Settings, worker: str) -> None:
    for subscriber in build(worker, settings).brokers[0].subscribers:
        assert subscriber.ack_policy is AckPolicy.MANUAL  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["ack", "nack", "reject"])
async def test_trap_8_a_message_cannot_be_acked(way: str) -> None:
    message = await parse_record(record(partition(), 0))
    with pytest.raises(AssertionError, match="lanes"):
        await getattr(message, way)()


@pytest.mark.usefixtures("topics")
async def test_trap_12_events_published_together_go_to_the_partition_of_each_ones_key(settings: Settings) -> None:
    attempts = [Attempt(task_submitted(f"t{number}")) for number in range(40)]
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        for make in (Attempt.ready, Attempt.completed, Attempt.verdict):
            await producer.publish([make(attempt) for attempt in attempts])
    places = []
    for topic in (SESSIONS_READY, EPISODES_COMPLETED, VERDICTS):
        found = await read_all(settings, topic)
        assert len(found) == 40
        places.append({record.key: record.partition for record in found})
    assert places[0] == places[1] == places[2], "a session's history is in more than one partition number"
    assert len(set(places[0].values())) == 3
    numbers = list(range(settings.kafka.partitions))
    assert all(DefaultPartitioner()(key, numbers, numbers) == partition for key, partition in places[0].items())


@pytest.mark.parametrize(
    "shortcut",
    [r"\bpublish_batch\b", r"\bTestKafkaBroker\b", r"\bbroker\.request\(", r"\bmax_workers=", r"\.(n?ack|reject)\(\)"],
)
def test_trap_12_nobody_takes_a_shortcut_that_does_something_else_on_kafka(shortcut: str) -> None:
    assert [path.name for path in SOURCE if re.search(shortcut, path.read_text())] == []
