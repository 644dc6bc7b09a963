"""Idempotence of the producer is a setting that the broker sees, and nothing depends on it."""

import struct

import pytest

from rollstream.eventlog.producer import EventProducer, RecordTooLarge
from rollstream.settings import KafkaSettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, always
from schemas.run import RunCancelled, RunPublished
from tests.conftest import TestBroker
from tests.events import run_published
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.flow.test_spine import task

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

BATCH_HEADER = struct.Struct(">q i i b I h i q q q h i")
"""Of Kafka's record batch, version 2; the last three are the producer's id, its epoch and its first sequence number."""

both = pytest.mark.parametrize("idempotent", [False, True])


def asked_for(settings: Settings, idempotent: bool, **changes: int) -> Settings:
    kafka = settings.kafka.model_copy(update={"idempotent_producer": idempotent, **changes})
    return settings.model_copy(update={"kafka": kafka})


def producers(broker: TestBroker, topic: str) -> list[tuple[int, int]]:
    """Producer id (-1 for none) and first sequence number of every batch on partition 0, as the broker wrote them down."""
    (segment,) = broker.data_dir.glob(f"broker/data/{topic}-0/*.log")
    log, found, position = segment.read_bytes(), [], 0
    while position + BATCH_HEADER.size <= len(log):
        _, length, _, magic, *_, producer, _, sequence = BATCH_HEADER.unpack_from(log, position)
        if magic != 2:
            break  # a segment is longer than what was written to it
        found.append((producer, sequence))
        position += 12 + length
    return found


def test_the_producer_is_not_idempotent_unless_somebody_asks_for_it() -> None:
    assert KafkaSettings().idempotent_producer is False


@both
async def test_the_broker_numbers_what_it_takes_exactly_when_it_is_asked_for(
    broker: TestBroker, settings: Settings, idempotent: bool
) -> None:
    settings = asked_for(settings, idempotent)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        for number in range(3):
            await producer.publish([run_published(f"r{number}")])
    found = producers(broker, f"{settings.kafka.topic_prefix}runs.control")
    ids, sequences = {producer for producer, _ in found}, [sequence for _, sequence in found]
    assert (len(found), len(ids)) == (3, 1)
    if idempotent:
        assert min(ids) >= 0
        assert sequences == [0, 1, 2]
    else:
        assert ids == {-1}


@both
async def test_a_run_goes_the_whole_way_in_either_mode(settings: Settings, idempotent: bool) -> None:
    async with ScriptedModelServer(always(r"\boxed{4}")) as server:
        settings = asked_for(with_model(settings, server.base_url), idempotent)
        async with pipeline(settings):
            await publish(settings, *(task(f"{number} + 2", "4", attempts=2) for number in range(10)))
            scored = await terminal(settings, 20)
    assert len({record.rollout for record in scored}) == 20
    assert {record.status for record in scored} == {"completed"}


@both
async def test_a_record_over_the_limit_is_a_typed_failure_and_the_next_one_goes_through(
    settings: Settings, idempotent: bool
) -> None:
    settings = asked_for(settings, idempotent, max_record_bytes=2**20)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        long = run_published("long").model_copy(update={"versions": {"x": "y" * 2**21}})
        with pytest.raises(RecordTooLarge, match="RunPublished does not fit a record of 1048576 bytes"):
            await producer.publish([long])
        await producer.publish([run_published("short"), RunCancelled.create(run="short")])
    assert [event.run for event in await read_events(settings, RunPublished)] == ["short"]
