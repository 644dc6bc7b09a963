"""Lanes on a real broker: concurrency, commits, restarts, failures."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from faststream import FastStream

from rollstream.eventlog.apps import Clients, Route, Wiring, worker_app
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.lanes import LaneSubscriber
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record, open_reader
from rollstream.eventlog.running import only_waiting
from rollstream.settings import Settings
from schemas.events import decode
from schemas.failure import DeadLettered
from schemas.rollout import RolloutScored
from schemas.run import RunCancelled
from tests.events import Attempt
from topics.catalogue import DEAD_LETTERS, ROLLOUTS_SCORED, TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]

Handler = Callable[[Record], Awaitable[None]]


def app_for(settings: Settings, handler: Handler, lanes: int = 50, **choices: Any) -> FastStream:
    async def handle(record: Record) -> None:
        await handler(record)

    route = Route(TASKS_IN, handle, lanes, read=lambda record: record, **choices)
    wiring = Wiring(Boundary("tester", "seed"), [route], (ROLLOUTS_SCORED, DEAD_LETTERS))
    return worker_app(settings, wiring, Clients.of(settings, "tester"))


@asynccontextmanager
async def running(app: FastStream) -> Any:
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


def lanes_of(app: FastStream) -> LaneSubscriber:
    (found,) = [sub for sub in app.brokers[0].subscribers if isinstance(sub, LaneSubscriber)]
    return found


def owns(app: FastStream) -> int:
    return len(lanes_of(app).ownership.parts)


async def send(settings: Settings, count: int, headers: list[tuple[str, bytes]] | None = None) -> None:
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await asyncio.gather(
            *(producer.publish_raw("tasks.in", str(n).encode(), str(n).encode(), headers or []) for n in range(count))
        )


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


async def read_all(settings: Settings, topic: Any) -> list[Record]:
    assert settings.bootstrap_servers is not None
    async with open_reader(settings.bootstrap_servers, settings.kafka, [topic]) as reader:
        return [record async for batch in reader.to_end() for record in batch]


async def test_records_run_concurrently_up_to_the_number_of_lanes(settings: Settings) -> None:
    at_once, most = 0, 0
    seen: list[bytes | None] = []

    async def handler(record: Record) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        seen.append(record.value)

    await send(settings, 60)
    async with running(app_for(settings, handler, lanes=8)):
        await until(lambda: len(seen) == 60)
    assert most == 8
    assert len(set(seen)) == 60


async def test_handlers_longer_than_any_poll_do_not_lose_membership_and_everything_runs_once(settings: Settings) -> None:
    seen: list[bytes | None] = []

    async def handler(record: Record) -> None:
        await asyncio.sleep(3)
        seen.append(record.value)

    await send(settings, 9)
    async with running(app_for(settings, handler, lanes=3)):
        await until(lambda: len(seen) == 9, 40)
    assert len(set(seen)) == 9


async def test_what_finished_behind_a_straggler_is_not_run_again_after_a_crash(settings: Settings) -> None:
    first: list[bytes | None] = []

    async def one_hangs(record: Record) -> None:
        if record.value == b"0":
            await asyncio.sleep(3600)
        first.append(record.value)

    await send(settings, 40)
    crashed = app_for(settings, one_hangs)
    await crashed.start()
    await until(lambda: len(first) == 39)
    subscriber = lanes_of(crashed)
    await subscriber.commit_now()
    await _crash(crashed, subscriber)

    second: list[bytes | None] = []

    async def all_pass(record: Record) -> None:
        second.append(record.value)

    async with running(app_for(settings, all_pass)):
        await until(lambda: bool(second))
        await asyncio.sleep(0.5)
    assert second == [b"0"]


async def _crash(app: FastStream, subscriber: LaneSubscriber) -> None:
    """End without a drain or a last commit, but leave the group, so that the test need not wait for its session."""
    assert subscriber._committer is not None
    subscriber._committer.cancel()
    subscriber.running = False
    subscriber._draining = True
    subscriber.work.cancel_all()
    subscriber.commit_now = _nothing  # type: ignore[method-assign]
    await app.stop()


async def _nothing() -> None:
    return None


async def test_stopping_waits_for_what_runs_and_commits_it(settings: Settings) -> None:
    seen: list[bytes | None] = []

    async def handler(record: Record) -> None:
        await asyncio.sleep(0.5)
        seen.append(record.value)

    await send(settings, 10)
    app = app_for(settings, handler)
    subscriber = lanes_of(app)
    async with running(app):
        await until(lambda: subscriber.busy == 10)
    assert len(seen) == 10
    again: list[bytes | None] = []

    async def handler_again(record: Record) -> None:
        again.append(record.value)

    async with running(app_for(settings, handler_again)):
        await asyncio.sleep(1)
    assert again == []


async def test_a_bug_is_dead_lettered_with_its_traceback_and_gives_the_attempt_its_terminal_record(settings: Settings) -> None:
    async def handler(record: Record) -> None:
        raise RuntimeError("boom")

    ids = {
        "run_id": "r", "group_id": "5f5bd9b4-4b43-5b8c-9a37-3b6c1c0d8a11", "rollout_id": "x", "session_id": "s",
        "round": "0", "try": "0", "group_index": "1", "group_size": "4", "environment": "math",
    }  # fmt: skip
    await send(settings, 1, [(name, value.encode()) for name, value in ids.items()])
    async with running(app_for(settings, handler)):
        async with asyncio.timeout(20):
            while not (letters := await read_all(settings, DEAD_LETTERS)):
                pass
    letter = decode(letters[0].value, DeadLettered)
    assert letter.original_bytes() == b"0"
    assert "boom" in letter.reason
    assert "RuntimeError" in (letter.traceback or "")
    (terminal,) = [decode(record.value, RolloutScored) for record in await read_all(settings, ROLLOUTS_SCORED)]
    assert terminal.status == "errored"
    assert terminal.reward is None
    assert terminal.group.index == 1
    assert terminal.mask.loss
    assert terminal.mask.baseline


async def test_two_workers_share_the_work_and_a_leaver_hands_its_part_over(settings: Settings) -> None:
    seen: list[bytes | None] = []
    by: dict[str, int] = {"a": 0, "b": 0}

    def handler_of(name: str) -> Handler:
        async def handler(record: Record) -> None:
            await asyncio.sleep(0.05)
            by[name] += 1
            seen.append(record.value)

        return handler

    stayer, leaver = (app_for(settings, handler_of(name), lanes=4) for name in "ab")
    async with running(stayer):
        await leaver.start()
        # What is cut short when partitions go runs again, and may have been at its end.
        await until(lambda: all(lanes_of(app).ownership.opened.is_set() and owns(app) < 3 for app in (stayer, leaver)))
        await send(settings, 200)
        await until(lambda: by["b"] > 5)
        await leaver.stop()
        await until(lambda: len(set(seen)) == 200, 60)
    assert len(seen) == 200


async def test_a_record_that_nobody_here_wants_is_acked_undecoded(settings: Settings) -> None:
    seen: list[bytes | None] = []

    async def handler(record: Record) -> None:
        seen.append(record.value)

    await send(settings, 20, [("stage", b"other")])
    app = app_for(settings, handler, wants=lambda headers: headers.get("stage") != "other")
    async with running(app):
        await send(settings, 3)
        await until(lambda: len(seen) == 3)
        await until_nothing_is_open(settings)
    assert len(seen) == 3


async def until_nothing_is_open(settings: Settings) -> None:
    """Wait until the group of these tests has committed all there is."""
    assert settings.bootstrap_servers is not None
    group = f"{settings.kafka.topic_prefix}tester"
    admin = await connect_admin(settings.bootstrap_servers)
    try:
        ends = Counter(record.partition for record in await read_all(settings, TASKS_IN))
        async with asyncio.timeout(20):
            while True:
                found = await admin.list_consumer_group_offsets(group)
                if {tp.partition: entry.offset for tp, entry in found.items() if entry.offset > 0} == ends:
                    return
                await asyncio.sleep(0.1)
    finally:
        await admin.close()


async def test_a_second_record_under_a_key_is_acked_unrun_where_a_topic_is_read_once(settings: Settings) -> None:
    seen: list[bytes | None] = []

    async def handler(record: Record) -> None:
        seen.append(record.value)

    async with running(app_for(settings, handler, once=True)):
        for _ in range(3):
            await send(settings, 10)
        await until_nothing_is_open(settings)
    assert sorted(seen) == sorted(str(number).encode() for number in range(10))


async def test_records_without_a_key_are_each_run_even_where_a_topic_is_read_once(settings: Settings) -> None:
    seen: list[bytes | None] = []

    async def handler(record: Record) -> None:
        seen.append(record.value)

    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        for _ in range(4):
            await producer.publish_raw("tasks.in", None, b"same")
    async with running(app_for(settings, handler, once=True)):
        await until(lambda: len(seen) == 4)


async def test_a_record_that_waited_too_long_for_a_lane_fails_with_a_name_of_its_own(settings: Settings) -> None:
    held = asyncio.Event()
    begun: list[bytes | None] = []

    async def handler(record: Record) -> None:
        begun.append(record.value)
        await held.wait()

    ids = Attempt().ready().headers()
    await send(settings, 2, ids)
    async with running(app_for(settings, handler, lanes=1, queue_timeout_s=1.0)):
        async with asyncio.timeout(30):
            while not (ended := await read_all(settings, ROLLOUTS_SCORED)):
                await asyncio.sleep(0.1)
        held.set()
    terminal = decode(ended[0].value, RolloutScored)
    assert terminal.error is not None
    assert (terminal.error.kind, terminal.error.stage, terminal.error.retryable) == ("queue_timeout", "admission", True)
    assert "waited longer than 1 s for one of the lanes" in terminal.error.message
    assert len(begun) == 1


async def test_work_that_only_waits_is_handed_back_at_once_when_the_worker_stops(settings: Settings) -> None:
    patient = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"drain_timeout_s": 60.0})})
    begun: list[bytes | None] = []

    async def handler(record: Record) -> None:
        with only_waiting():
            begun.append(record.value)
            await asyncio.sleep(3_600)

    await send(patient, 5)
    app = app_for(patient, handler)
    async with asyncio.timeout(20):
        async with running(app):
            await until(lambda: len(begun) == 5, 10)
    again: list[bytes | None] = []

    async def handler_again(record: Record) -> None:
        again.append(record.value)

    async with running(app_for(patient, handler_again)):
        await until(lambda: len(again) == 5)


async def test_the_running_work_of_a_cancelled_run_is_stopped_and_counts_as_done(settings: Settings) -> None:
    begun: list[bytes | None] = []

    async def handler(record: Record) -> None:
        begun.append(record.value)
        await asyncio.sleep(3_600)

    await send(settings, 5, [("run_id", b"r")])
    app = app_for(settings, handler)
    async with running(app):
        await until(lambda: len(begun) == 5)
        async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
            await producer.publish([RunCancelled.create(run="r")])
        await until_nothing_is_open(settings)
        await send(settings, 5, [("run_id", b"r")])
        await until_nothing_is_open(settings)
    assert len(begun) == 5


@pytest.mark.parametrize("when", ["before it hears of it", "as it is stopped"])
async def test_what_fails_while_its_partition_goes_is_left_to_whoever_gets_it(settings: Settings, when: str) -> None:
    """Whoever gets a partition may know of it first, and take away what the last owner still works with."""
    kafka = settings.kafka.model_copy(update={"commit_interval_s": 30.0, "session_timeout_s": 60.0})
    late = settings.model_copy(update={"kafka": kafka})
    taken_away, begun, done = asyncio.Event(), 0, set[bytes | None]()

    async def fails(record: Record) -> None:
        nonlocal begun
        begun += 1
        try:
            await taken_away.wait()
        finally:
            raise RuntimeError("somebody took away what this needs")

    async def passes(record: Record) -> None:
        done.add(record.value)

    await send(settings, 30)
    losing = app_for(late, fails)
    subscriber = lanes_of(losing)
    revoked = subscriber.on_revoked

    async def slowly_revoked(partitions: Any) -> None:
        await revoked(partitions)
        if partitions and when == "before it hears of it":
            taken_away.set()
            with suppress(TimeoutError):
                await until(lambda: subscriber.busy == 0, 2)

    subscriber.on_revoked = slowly_revoked  # type: ignore[method-assign]
    async with running(losing):
        await until(lambda: begun == 30)
        async with running(app_for(late, passes)):
            await until(lambda: bool(done))
            taken_away.set()
            failed: set[bytes | None] = set()
            async with asyncio.timeout(30):
                while len(done | failed) < 30:
                    letters = await read_all(settings, DEAD_LETTERS)
                    failed = {decode(letter.value, DeadLettered).original_bytes() for letter in letters}
    assert done
    assert failed
    assert not done & failed
