"""Loss and races that others have reported of the same technique, and the traps that we measured, each as a case.

Those of Confluent's Parallel Consumer are named by their numbers there.
"""

import asyncio
import random

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaTimeoutError

from rollstream.eventlog import lanes as lanes_module
from rollstream.eventlog.commits import METADATA_LIMIT, SOFT_LIMIT, Commit, decode_done, encode_done
from rollstream.eventlog.connection import consumer_options, producer_options
from rollstream.eventlog.lanes import WorkerStuck
from rollstream.eventlog.producer import EventProducer
from rollstream.settings import KafkaSettings
from tests.chaos.group import Group, Member, partition, rebalance, record, settle_loop
from tests.chaos.plan import FULL, SEED
from tests.events import task_submitted

P, Q = partition(0), partition(1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that are seconds on a real broker."""
    monkeypatch.setattr(lanes_module, "LANE_WAIT_S", 0.01)
    monkeypatch.setattr(lanes_module, "READ_SAVED_S", 0.05)


def group_of(*counts: int) -> Group:
    return Group({partition(number): list(range(count)) for number, count in enumerate(counts)})


# 826 and 827: records lost when partitions are revoked.


async def test_826_what_is_in_flight_when_a_partition_goes_is_run_by_its_next_owner() -> None:
    group = group_of(5)
    a, b = Member("a", group), Member("b", group)
    await rebalance(group, {a: [P]})
    for _ in range(5):
        await a.deliver(P)
    await a.finish(P, 1)
    await rebalance(group, {a: [], b: [P]})
    assert a.running == {}, "work on a lost partition goes on"
    while await b.deliver(P):
        pass
    assert [offset for _, offset in b.started] == [0, 2, 3, 4]


async def test_827_what_was_fetched_but_not_begun_when_a_partition_goes_is_not_committed() -> None:
    group = group_of(6)
    a = Member("a", group, lanes=2)
    await rebalance(group, {a: [P]})
    for _ in range(3):
        await a.deliver(P)
    for offset in (0, 1):
        await a.finish(P, offset)
    await a.revoked()
    assert group.committed[P] == Commit(2, "")


async def test_827_what_finishes_while_the_group_rebalances_is_not_run_again() -> None:
    group = group_of(3)
    a, b = Member("a", group), Member("b", group)
    await rebalance(group, {a: [P]})
    for _ in range(3):
        await a.deliver(P)
    await a.revoked()
    await a.finish(P, 2)
    await a.lanes.commit_now()
    group.generation += 1
    await a.assigned([], group.generation)
    await b.assigned([P], group.generation)
    while await b.deliver(P):
        pass
    assert [offset for _, offset in b.started] == [0, 1]


# 894: offset and set of finished records from two different moments.


async def test_894_offset_and_finished_set_of_a_commit_are_of_one_moment() -> None:
    group = group_of(40)
    a = Member("a", group, lanes=40)
    await rebalance(group, {a: [P]})
    for _ in range(40):
        await a.deliver(P)
    order = random.Random(894).sample(range(40), 40)
    for offset in order:
        commit = asyncio.create_task(a.lanes.commit_now())
        await asyncio.sleep(0)
        await a.finish(P, offset)  # while the commit is under way; `Group` checks what arrives
        await commit
        assert group.known_done(P) <= {done for _, done in group.handled}
    await a.lanes.commit_now()
    assert group.committed[P] == Commit(40, "")


async def test_894_what_finishes_during_a_commit_is_in_the_next_one() -> None:
    group = group_of(2)
    a = Member("a", group)
    await rebalance(group, {a: [P]})
    await a.deliver(P)
    await a.deliver(P)
    await a.finish(P, 0)
    commit = asyncio.create_task(a.lanes.commit_now())
    await asyncio.sleep(0)
    await a.finish(P, 1)
    await commit
    await a.lanes.commit_now()
    assert group.committed[P] == Commit(2, "")


# 647: metadata beyond the broker's limit.


async def test_647_a_partition_whose_metadata_fills_up_pauses_alone_and_goes_on_when_it_has_room() -> None:
    rng = random.Random(647)
    group = group_of(60_000, 10)
    a = Member("a", group, lanes=100_000)
    await rebalance(group, {a: [P, Q]})
    progress = a.lanes._parts[P]
    await a.deliver(P)
    for offset in range(1, 60_000):  # past the subscriber, whose tasks would be many
        progress.offer(offset)
        if rng.random() < 0.5:
            progress.complete(offset)
            group.handled.add((P, offset))
    await a.lanes.commit_now()
    assert a.consumer.paused == {P}
    assert SOFT_LIMIT < len(group.committed[P].metadata) <= METADATA_LIMIT
    assert await a.deliver(Q)
    await a.finish(P, 0)
    for offset in sorted(progress.running):
        progress.complete(offset)
        group.handled.add((P, offset))
    await a.lanes.commit_now()
    assert a.consumer.paused == set()
    assert group.committed[P] == Commit(60_000, "")


def test_647_what_does_not_fit_runs_again_and_nothing_else_does() -> None:
    rng = random.Random(647)
    done = {offset for offset in range(1, 300_000) if rng.random() < 0.5}
    kept = decode_done(0, encode_done(0, done))
    highest = max(kept)
    assert kept == {offset for offset in done if offset <= highest}


# 857: no progress after a rebalance.


async def test_857_partitions_that_were_paused_for_want_of_lanes_flow_after_a_rebalance() -> None:
    group = group_of(10, 10)
    a = Member("a", group, lanes=2)
    await rebalance(group, {a: [P]})
    for _ in range(3):
        await a.deliver(P)
    assert a.consumer.paused == {P}
    await rebalance(group, {a: [P, Q]})
    await drain(a)
    assert group.known_done(P) == set(range(10)) == group.known_done(Q)


async def test_857_a_rebalance_during_the_wait_for_a_lane_skips_nothing() -> None:
    group = group_of(4)
    a, b = Member("a", group, lanes=1), Member("b", group, lanes=4)
    await rebalance(group, {a: [P]})
    await a.deliver(P)
    waiting = asyncio.create_task(a.deliver(P))
    await asyncio.sleep(0)
    await rebalance(group, {a: [], b: [P]})
    await rebalance(group, {a: [P], b: []})
    await waiting
    await drain(a)
    assert group.known_done(P) == set(range(4))


async def test_857_a_partition_that_was_full_before_a_rebalance_is_looked_at_again_after_it() -> None:
    group = group_of(100)
    a = Member("a", group)
    await rebalance(group, {a: [P]})
    a.lanes._crowded.add(P)
    a.consumer.pause(P)
    await rebalance(group, {a: [P]})
    assert a.consumer.paused == set()
    await drain(a)
    assert group.known_done(P) == set(range(100))


# The traps, by their numbers in the notes on the technique.


async def test_trap_1_records_that_arrive_before_the_assignment_is_complete_are_fetched_again() -> None:
    group = group_of(5)
    a = Member("a", group)
    await a.assigned([P], 1, early=True)
    await drain(a)
    assert sorted(offset for _, offset in a.started) == list(range(5))


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
    a.lanes._watch_membership()
    (failure,) = a.broke
    assert isinstance(failure, WorkerStuck)
    assert "boom" in str(failure)


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


# All of it together: schedules that nobody would think of.


@pytest.mark.parametrize("seed", range(SEED, SEED + (300 if FULL else 15)))
async def test_whatever_the_schedule_nothing_is_lost_and_what_was_committed_is_not_run_again(seed: int) -> None:
    rng = random.Random(seed)
    logs = {partition(number): [offset for offset in range(60) if rng.random() > 0.15] for number in range(4)}
    group = Group(logs)
    made, blind = 0, False

    def new_member() -> Member:
        nonlocal made
        made += 1
        return Member(f"m{made}", group, lanes=rng.choice([2, 5, 50]))

    members = [new_member(), new_member()]
    frozen: list[Member] = []
    again: list[tuple[TopicPartition, int]] = []

    async def deal() -> None:
        """A rebalance, with completions and commits in the middle of it, and sometimes commits that cannot be read."""
        nonlocal blind
        shares: dict[Member, list[TopicPartition]] = {member: [] for member in members}
        for one in logs:
            shares[rng.choice(members)].append(one)
        for member in members:
            await member.revoked()
        for member in members:
            await some_finish(member, 3)
            if rng.random() < 0.5:
                await member.lanes.commit_now()
        group.generation += 1
        group.members = {member.name: group.members.get(member.name, -1) for member in members}
        blind = group.unreadable = rng.random() < 0.1
        for member in members:
            await member.assigned(shares[member], group.generation, early=rng.random() < 0.3)
        group.unreadable = False

    async def some_finish(member: Member, most: int) -> None:
        for place in rng.sample(sorted(member.running), min(len(member.running), rng.randint(0, most))):
            if place in member.running:
                await member.finish(*place, error=RuntimeError("boom") if rng.random() < 0.1 else None)

    await deal()
    for _ in range(250):
        member = rng.choice(members)
        action = rng.random()
        if action < 0.45:
            one = rng.choice(list(logs))
            known, before = group.known_done(one), len(member.started)
            await member.deliver(one)
            if not blind:
                again += [place for place in member.started[before:] if place[0] == one and place[1] in known]
        elif action < 0.75:
            await some_finish(member, 4)
        elif action < 0.87:
            await member.lanes.commit_now()
        elif action < 0.92:
            await deal()
        elif action < 0.95:
            members[members.index(member)] = new_member()  # killed
            await deal()
        elif action < 0.97 and not frozen:
            frozen.append(member)
            members[members.index(member)] = new_member()
            await deal()
        elif frozen:
            zombie = frozen.pop()
            await some_finish(zombie, 10)
            await zombie.lanes.commit_now()
            members.append(zombie)
            await deal()
    for member in members:
        await drain(member)
    assert {one: group.known_done(one) for one in logs} == {one: set(offsets) for one, offsets in logs.items()}
    assert again == []
    assert all(member.broke == [] for member in members)


async def drain(member: Member) -> None:
    """Deliver and finish everything of the member's partitions, and commit."""
    async with asyncio.timeout(20):
        while True:
            was_busy = member.lanes.busy > 0
            delivered = [await member.deliver(one) for one in sorted(member.consumer.assignment())]
            for place in sorted(member.running):
                await member.finish(*place)
            await settle_loop()
            if not any(delivered) and not was_busy:
                break
    await member.lanes.commit_now()
