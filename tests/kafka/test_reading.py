"""Reading the log by position and time, on the real broker."""

from datetime import UTC, datetime, timedelta

import pytest
from aiokafka import AIOKafkaProducer

from rollstream.eventlog.reading import open_reader
from rollstream.settings import KafkaSettings, Settings
from tests.flow.flows import publish_bare
from topics.catalogue import TASKS_IN

pytestmark = pytest.mark.kafka


@pytest.mark.usefixtures("topics")
async def test_the_time_of_a_record_is_the_brokers_whatever_its_writer_says(settings: Settings) -> None:
    assert settings.bootstrap_servers is not None
    written = datetime.now(UTC)
    producer = AIOKafkaProducer(bootstrap_servers=settings.bootstrap_servers)
    await producer.start()
    try:
        for days in (-10_000, 0, 10_000):
            claimed = round((written + timedelta(days=days)).timestamp() * 1000)
            await producer.send_and_wait(f"{settings.kafka.topic_prefix}tasks.in", b"x", timestamp_ms=claimed)
    finally:
        await producer.stop()
    async with open_reader(settings.bootstrap_servers, settings.kafka, [TASKS_IN]) as reader:
        await reader.seek_to_time(written - timedelta(seconds=1))
        found = [record async for batch in reader.to_end() for record in batch]
    assert len(found) == 3
    assert all(abs(record.timestamp_ms / 1000 - written.timestamp()) < 60 for record in found)


@pytest.mark.usefixtures("topics")
async def test_a_record_that_arrives_after_seeking_to_a_time_is_read_from_partitions_that_were_empty(
    settings: Settings,
) -> None:
    assert settings.bootstrap_servers is not None
    async with open_reader(settings.bootstrap_servers, settings.kafka, [TASKS_IN]) as reader:
        await reader.seek_to_time(datetime.now(UTC) - timedelta(hours=1))
        await publish_bare(settings, *(b"%d" % number for number in range(20)))
        values = {record.value async for batch in reader.to_end() for record in batch}
    assert len(values) == 20


async def test_topics_that_do_not_exist_read_as_empty(settings: Settings) -> None:
    nothing = KafkaSettings(topic_prefix="nobody-made-this.")
    assert settings.bootstrap_servers is not None
    async with open_reader(settings.bootstrap_servers, nothing, [TASKS_IN]) as reader:
        await reader.seek_to_end()
        await reader.seek_to_time(datetime.now(UTC))
        assert [batch async for batch in reader.to_end()] == []
