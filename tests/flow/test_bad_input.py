"""Whatever stands in the log or in its offsets, workers start, go on, and end every attempt exactly once."""

import asyncio
from collections import Counter

import orjson
import pytest
from aiokafka.admin import NewPartitions

from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.provisioning import TopicMismatch
from rollstream.settings import RetrySettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, always
from schemas.envelope import Event, Headers
from schemas.failure import DeadLettered
from schemas.rollout import RolloutScored
from schemas.session import SessionReady
from tests.events import Attempt
from tests.flow.commands import command, commit, until_nothing_is_open
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.flow.test_spine import task
from topics.catalogue import BY_EVENT, EPISODES_COMPLETED, ROLLOUTS_RETRIES, SESSIONS_READY, TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(180)]

FOUR = always(r"\boxed{4}")
READERS = [
    ("env_worker", TASKS_IN),
    ("env_worker", ROLLOUTS_RETRIES),
    ("agent_worker", SESSIONS_READY),
    ("verifier_worker", EPISODES_COMPLETED),
    ("verifier_worker", ROLLOUTS_RETRIES),
]


def served(settings: Settings, server: ScriptedModelServer) -> Settings:
    retries = RetrySettings(agent_attempts=1, verification_attempts=1)
    return with_model(settings, server.base_url, max_retries=0).model_copy(update={"retries": retries})


async def raw(
    settings: Settings, event: Event, value: bytes | None, headers: Headers | None = None, keyed: bool = True
) -> None:
    """A record in the place of `event`, with another body, and with its headers unless told otherwise."""
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        topic = BY_EVENT[type(event)].name
        await producer.publish_raw(
            topic, event.key() if keyed else None, value, event.headers() if headers is None else headers
        )


def attempts(count: int) -> list[Attempt]:
    group = task("2 + 2", "4", attempts=count)
    return [Attempt(group, index=index) for index in range(count)]


async def test_undecodable_bytes_on_every_topic_of_sessions_end_their_attempt_from_the_headers(settings: Settings) -> None:
    ready, completed, to_seed, to_verify = attempts(4)
    async with pipeline(settings):
        await raw(settings, ready.ready(), b"\xff\xfe garbage")
        await raw(settings, completed.completed(), None)
        await raw(settings, to_seed.retry(), b"{")
        await raw(settings, to_verify.verification_retry(), b"[]")
        scored = await terminal(settings, 4)
        await until_nothing_is_open(settings)
    assert {record.rollout for record in scored} == {one.rollout for one in (ready, completed, to_seed, to_verify)}
    assert {(record.status, record.stop_reason, record.reward) for record in scored} == {("errored", "undecodable", None)}
    assert len(await read_events(settings, RolloutScored)) == 4
    boundaries = Counter(letter.boundary for letter in await read_events(settings, DeadLettered))
    assert boundaries == {"agent_worker": 1, "verifier_worker": 2, "env_worker": 1}


async def test_an_event_of_the_wrong_kind_or_of_a_later_version_ends_its_attempt(settings: Settings) -> None:
    wrong, later = attempts(2)
    future = orjson.dumps({**orjson.loads(later.ready().to_json()), "schema_version": 9})
    async with pipeline(settings, ["agent_worker"]):
        await raw(settings, wrong.ready(), wrong.verdict().to_json())
        await raw(settings, later.ready(), future)
        scored = await terminal(settings, 2)
    told = {record.rollout: record.error.message for record in scored if record.error}
    assert told[wrong.rollout] == "expected an event of kind SessionReady, found kind 'VerdictReached'"
    assert "found version 9: upgrade this worker" in told[later.rollout]


async def test_a_record_without_a_key_or_with_garbage_for_headers_is_played_like_any_other(settings: Settings) -> None:
    garbage: Headers = [("run_id", b"\xff\xfe"), ("round", b"many"), ("", b""), ("group_index", b"-1"), ("ce_id", b"\x00")]
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings, ["env_worker"]):
            await publish(settings, task("2 + 2", "4", attempts=2))
            async with asyncio.timeout(30):
                while len(sessions := await read_events(settings, SessionReady)) < 2:
                    await asyncio.sleep(0.1)
        await commit(settings, "agent_worker", SESSIONS_READY, at_end=True)
        await raw(settings, sessions[0], sessions[0].to_json(), keyed=False)
        await raw(settings, sessions[1], sessions[1].to_json(), headers=garbage)
        async with pipeline(settings):
            scored = await terminal(settings, 2)
    assert {(record.status, record.reward) for record in scored} == {("completed", 1.0)}
    assert await read_events(settings, DeadLettered) == []


async def test_what_is_larger_than_a_record_may_be_is_a_typed_failure_and_no_loop(settings: Settings) -> None:
    kafka = settings.kafka.model_copy(update={"max_record_bytes": 2**20})
    async with ScriptedModelServer(always("x" * 900_000)) as server:
        settings = served(settings.model_copy(update={"kafka": kafka}), server)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4"))
            (scored,) = await terminal(settings, 1)
            await until_nothing_is_open(settings)
    assert scored.error is not None
    assert (scored.status, scored.error.kind, scored.error.retryable) == ("errored", "record_too_large", False)
    assert "does not fit a record of 1048576 bytes" in scored.error.message


async def test_commit_metadata_that_somebody_else_wrote_means_nothing(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, *(task(f"{number} + 2", "4") for number in range(10)))
        for (worker, topic), metadata in zip(
            READERS, ["a note", "rs1z!!!", "rs1rAAAA", "rs1" + "A" * 4_000, "\u00e9"], strict=True
        ):
            await commit(settings, worker, topic, metadata=metadata)
        async with pipeline(settings):
            scored = await terminal(settings, 10)
    assert {record.status for record in scored} == {"completed"}


async def test_offsets_that_an_operator_set_back_run_work_again_and_count_nothing_twice(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, *(task(f"{number} + 2", "4", attempts=2) for number in range(5)))
            first = await terminal(settings, 10)
        for worker, topic in READERS:
            await commit(settings, worker, topic)
        async with pipeline(settings):
            await until_nothing_is_open(settings)
    every = await read_events(settings, RolloutScored)
    assert len(every) > len(first)
    assert len({record.event_id for record in every}) == 10
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said
    assert "clean: each of 10 attempts" in audited.out


async def test_a_changed_partition_count_stops_a_worker_with_one_sentence(settings: Settings) -> None:
    assert settings.bootstrap_servers is not None
    admin = await connect_admin(settings.bootstrap_servers)
    name = f"{settings.kafka.topic_prefix}sessions.ready"
    try:
        await admin.create_partitions({name: NewPartitions(total_count=4)})
        async with asyncio.timeout(60):
            while (await admin.describe_topics([name]))[0]["partitions"][3:] == []:
                await asyncio.sleep(0.1)
    finally:
        await admin.close()
    with pytest.raises(TopicMismatch, match=f"topic {name}: expected 3 partitions, found 4") as caught:
        async with pipeline(settings, ["agent_worker"]):
            pass
    assert "\n" not in str(caught.value)
