"""The traps of the clients we build on, that we measured, by their numbers in the notes on the technique."""

import asyncio

import pytest
from aiokafka.errors import KafkaTimeoutError

from rollstream.eventlog import lanes as lanes_module
from rollstream.eventlog.commits import Commit
from rollstream.eventlog.connection import consumer_options, producer_options
from rollstream.eventlog.ownership import WorkerStuck
from rollstream.eventlog.producer import EventProducer
from rollstream.settings import KafkaSettings
from tests.chaos.group import Member, drain, group_of, partition, rebalance, record, settle_loop
from tests.events import task_submitted

P = partition(0)

pytestmark = pytest.mark.usefixtures("impatient")


async def test_trap_1_records_that_arrive_before_the_assignment_is_complete_are_fetched_again() -> None:
    group = group_of(5)
    a = Member("a", group)
    await a.assigned([P], 1, early=True)
    await drain(a)
    assert sorted(offset for _, offset in a.started) == list(range(5))


async def test_trap_2_a_record_fetched_before_a_rebalance_is_not_registered_after_it() -> None:
    """Registered, it would let a commit pass over those before it that the new generation has not been given."""
    group = group_of(6)
    a, b = Member("a", group, lanes=2), Member("b", group)
    await rebalance(group, {a: [P]})
    for _ in range(2):
        await a.deliver(P)
    waiting = asyncio.create_task(a.deliver(P))
    await asyncio.sleep(0)
    await rebalance(group, {a: [], b: [P]})
    await rebalance(group, {a: [P], b: []})
    await waiting
    assert a.lanes.ownership.parts[P].running == frozenset()
    await a.lanes.commit_now()
    assert group.known_done(P) == set()
    await drain(a)
    assert group.known_done(P) == set(range(6))


async def test_trap_3_a_handler_cancelled_before_its_first_step_frees_its_lane() -> None:
    group = group_of(3)
    a = Member("a", group, lanes=1)
    await rebalance(group, {a: [P]})
    await a.lanes.consume_one(record(P, 0))
    assert a.lanes.busy == 1
    await a.lanes.on_assigned(set())
    await settle_loop()
    assert a.lanes.busy == 0
    assert a.started == []


async def test_trap_4_intake_never_waits_long_for_a_lane_and_resumes_when_enough_are_free() -> None:
    group = group_of(30)
    a = Member("a", group, lanes=10)
    await rebalance(group, {a: [P]})
    for _ in range(10):
        await a.deliver(P)
    async with asyncio.timeout(1):
        await a.deliver(P)
    assert a.consumer.paused == {P}
    assert a.consumer.positions[P] == 10
    await a.finish(P, 0)
    assert a.consumer.paused == set()


async def test_trap_5_a_broker_that_is_away_delays_a_rebalance_by_seconds_only() -> None:
    group = group_of(3)
    a = Member("a", group)
    await rebalance(group, {a: [P]})
    await a.deliver(P)
    await a.finish(P, 0)
    group.away = True
    async with asyncio.timeout(4):
        await a.revoked()
    async with asyncio.timeout(6):
        await a.assigned([P], 2)
    group.away = False
    await drain(a)
    assert group.known_done(P) == {0, 1, 2}


async def test_trap_5_a_member_that_was_thrown_out_commits_nothing_and_asks_to_join_anew() -> None:
    group = group_of(3)
    a, b = Member("a", group), Member("b", group)
    await rebalance(group, {a: [P]})
    await a.deliver(P)
    await rebalance(group, {b: [P]})
    await a.finish(P, 0)
    await a.lanes.commit_now()
    assert P not in group.committed
    assert a.consumer._coordinator.asked_to_join_anew == 1
    await a.deliver(P)
    assert [offset for _, offset in a.started] == [0], "it begins nothing before it is back"


@pytest.mark.parametrize("how", ["away", "unreadable"])
async def test_trap_6_when_it_cannot_be_read_what_is_finished_everything_runs_again_and_nothing_is_skipped(how: str) -> None:
    group = group_of(4)
    a, b = Member("a", group), Member("b", group)
    await rebalance(group, {a: [P]})
    for _ in range(4):
        await a.deliver(P)
    for offset in (0, 2):
        await a.finish(P, offset)
    await a.lanes.commit_now()
    setattr(group, how, True)
    await rebalance(group, {b: [P]})
    setattr(group, how, False)
    await drain(b)
    assert sorted(offset for _, offset in b.started) == [1, 2, 3]
    assert group.known_done(P) == {0, 1, 2, 3}


async def test_trap_7_a_stop_during_a_rebalance_still_commits() -> None:
    group = group_of(2)
    a = Member("a", group)
    await rebalance(group, {a: [P]})
    await a.deliver(P)
    await a.deliver(P)
    await a.finish(P, 0)
    await a.revoked()
    await a.finish(P, 1)
    await a.lanes.drain()
    assert group.committed[P] == Commit(2, "")


async def test_trap_9_a_worker_whose_membership_has_ended_says_so_and_ends() -> None:
    group = group_of(1)
    a = Member("a", group)
    await rebalance(group, {a: [P]})
    a.consumer._coordinator._coordination_task.set_exception(RuntimeError("boom"))
    with pytest.raises(WorkerStuck, match="boom"):
        a.lanes.ownership.watch()


async def test_trap_9_a_bug_in_intake_ends_the_worker_instead_of_passing_over_a_record() -> None:
    group = group_of(3)
    a = Member("a", group)
    await rebalance(group, {a: [P]})

    def wants(record: object) -> bool:
        raise RuntimeError("boom")

    a.lanes.hooks = lanes_module.Hooks(a._settle, wants, a.lanes.hooks.offsets, a.broke.append)
    await a.deliver(P)
    a.lanes.hooks = lanes_module.Hooks(a._settle, lambda record: True, a.lanes.hooks.offsets, a.broke.append)
    await a.deliver(P)
    await a.lanes.commit_now()
    assert [str(error) for error in a.broke] == ["boom"]
    assert P not in group.committed


async def test_a_worker_that_stood_still_begins_nothing_that_others_have_by_now() -> None:
    group = group_of(3)
    a = Member("a", group, session_timeout_s=0.05)
    await rebalance(group, {a: [P]})
    await a.deliver(P)
    await asyncio.sleep(0.1)
    await a.deliver(P)
    assert [offset for _, offset in a.started] == [0]
    assert a.consumer._coordinator.asked_to_join_anew == 1
    await rebalance(group, {a: [P]})
    await drain(a)
    assert sorted(offset for _, offset in a.started) == [0, 1, 2]


def test_trap_10_only_assignors_without_memory_are_used_and_no_idempotent_producer() -> None:
    assert "partition_assignment_strategy" not in consumer_options(KafkaSettings())  # round robin, aiokafka's default
    assert producer_options(KafkaSettings())["enable_idempotence"] is False


def test_trap_11_no_client_runs_on_a_default_that_loses_records() -> None:
    consumer, producer = consumer_options(KafkaSettings()), producer_options(KafkaSettings())
    assert consumer["auto_offset_reset"] == "earliest"
    assert consumer["enable_auto_commit"] is False
    assert consumer["rebalance_timeout_ms"] > consumer["session_timeout_ms"] >= 30_000
    assert producer["acks"] == "all"
    assert producer["max_batch_size"] >= 256 * 1024


class FullProducer:
    """An aiokafka producer whose buffer is full, as after half a minute without a broker."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.sent: list[bytes] = []

    async def send(self, topic: str, *, value: bytes, key: bytes, headers: object) -> "asyncio.Future[None]":
        if self.refusals:
            self.refusals -= 1
            raise KafkaTimeoutError
        self.sent.append(key)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def test_a_full_buffer_of_the_producer_is_waited_for_like_a_broker_that_is_away() -> None:
    producer = EventProducer("localhost:1", KafkaSettings())
    full = producer._producer = FullProducer(refusals=2)
    events = [task_submitted(f"t{number}") for number in range(3)]
    await producer.publish(events)
    assert full.sent == [event.key() for event in events]
