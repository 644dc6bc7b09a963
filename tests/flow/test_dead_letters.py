"""Dead letters, listed, shown, replayed and discarded."""

import asyncio
from collections.abc import Callable

import pytest

from rollstream.eventlog.producer import EventProducer
from rollstream.settings import Settings
from rollstream.testing.model_server import ScriptedModelServer
from schemas.envelope import Headers
from schemas.failure import DeadLettered, DeadLetterSettled
from schemas.task import TaskSubmitted
from tests.events import Attempt
from tests.flow.commands import command, commit
from tests.flow.flows import pipeline, publish, publish_bare, read_events, terminal
from tests.flow.operations import FOUR, LateEnvironment, served
from tests.flow.test_spine import task
from topics.catalogue import TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(240)]


def headers_of(record: TaskSubmitted, index: int = 0) -> Headers:
    return Attempt(record, index=index).ready().headers()


async def raw(settings: Settings, topic: str, value: bytes | None, key: bytes | None, headers: Headers) -> None:
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish_raw(topic, key, value, headers)


async def letters(settings: Settings, count: int) -> list[DeadLettered]:
    async with asyncio.timeout(30):
        while len(found := await read_events(settings, DeadLettered)) < count:
            await asyncio.sleep(0.1)
    return found


async def test_a_bug_is_listed_shown_and_replayed_as_another_round(settings: Settings, late: Callable[[], None]) -> None:
    late()
    LateEnvironment.bugs = 1
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4", environment="late"))
            (failed,) = await terminal(settings, 1)
            (letter,) = await letters(settings, 1)
            listed = await command(settings, "dead-letters", "list")
            shown = await command(settings, "dead-letters", "show", "0")
            replayed = await command(settings, "dead-letters", "replay", "0")
            _, scored = await terminal(settings, 2)
    assert failed.status == "errored"
    assert letter.subject() in listed.out
    assert "RuntimeError: a bug in the environment" in listed.out
    assert "Traceback (most recent call last)" in shown.out
    assert '"kind":"EpisodeCompleted"' in shown.out
    assert f"header rollout_id: {failed.rollout}" in shown.out
    assert replayed.out == "0: 1 attempts that ended with it are driven again in a new round\n", replayed.said
    assert (scored.status, scored.round, scored.reward) == ("completed", 1, 1.0)
    assert (await command(settings, "dead-letters", "list")).out == "no dead letter waits for a decision\n"
    assert "replayed" in (await command(settings, "dead-letters", "list", "--settled")).out
    assert "has been scored since" in (await command(settings, "dead-letters", "replay", "0")).out
    assert (await command(settings, "audit", "r")).code == 0


async def test_garbage_in_place_of_a_session_is_replayed_from_the_task(settings: Settings) -> None:
    lost = task("2 + 2", "4", attempts=2)
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, lost)
        await commit(settings, "env_worker", TASKS_IN, at_end=True)
        await raw(settings, "sessions.ready", b"\xff\x00 garbage", b"k", headers_of(lost, 1))
        async with pipeline(settings):
            (failed,) = await terminal(settings, 1)
            await letters(settings, 1)
            shown = await command(settings, "dead-letters", "show", "0")
            await command(settings, "dead-letters", "replay", "--run", "r")
            _, scored = await terminal(settings, 2)
    assert (failed.group.index, failed.status) == (1, "errored")
    assert "value: hex ff 00 20 67" in shown.out
    assert (scored.group.index, scored.round, scored.status) == (1, 1, "completed")


async def test_a_record_of_nobodys_attempt_is_published_again_as_it_was_however_long(settings: Settings) -> None:
    long = b"\xff" * 300_000
    async with pipeline(settings, ["env_worker"]):
        await raw(settings, "tasks.in", long, b"the key", [("a", b"\x80"), ("a", b"2")])
        (first,) = await letters(settings, 1)
        assert first.omitted_bytes == len(long)
        replayed = await command(settings, "dead-letters", "replay", "--all")
        assert replayed.out == "0: published again on tasks.in\n"
        _, second = await letters(settings, 2)
        listed = await command(settings, "dead-letters", "list")
    assert (second.omitted_bytes, second.key(), second.original_headers) == (len(long), b"the key", first.original_headers)
    assert second.offset != first.offset or second.partition != first.partition
    assert second.subject() in listed.out
    assert first.subject() not in listed.out


async def test_what_is_discarded_is_off_the_list_and_stays_in_the_log(settings: Settings) -> None:
    async with pipeline(settings, ["env_worker"]):
        await publish_bare(settings, b"not json", b"[]")
        await letters(settings, 2)
    assert (await command(settings, "dead-letters", "discard", "0")).out == "1 discarded\n"
    assert (await command(settings, "dead-letters", "list")).out.count("tasks.in/") == 1
    assert (await command(settings, "dead-letters", "discard", "--all")).out == "1 discarded\n"
    assert (await command(settings, "dead-letters", "list")).out == "no dead letter waits for a decision\n"
    assert {event.how for event in await read_events(settings, DeadLetterSettled)} == {"discarded"}
    assert len(await read_events(settings, DeadLettered)) == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "7"], "no dead letter has the number 7"),
        (["replay"], "expected numbers of dead letters"),
        (["discard", "1", "2"], "no dead letter has the number 1, 2"),
    ],
)
async def test_a_dead_letter_that_is_not_there_is_told_in_one_line(settings: Settings, words: list[str], sentence: str) -> None:
    done = await command(settings, "dead-letters", *words)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
