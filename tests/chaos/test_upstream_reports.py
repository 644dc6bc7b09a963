"""Loss and races that others have reported of the same technique, each as a case on a group in memory.

They are named by their numbers at Confluent's Parallel Consumer. `tests/kafka/test_upstream_reports.py` has them on a real
broker.
"""

import asyncio
import random

import pytest

from rollstream.eventlog.commits import METADATA_LIMIT, SOFT_LIMIT, Commit, decode_done, encode_done
from tests.chaos.group import Member, drain, group_of, partition, rebalance

P, Q = partition(0), partition(1)

pytestmark = pytest.mark.usefixtures("impatient")


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
    progress = a.lanes.ownership.parts[P]
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
    a.lanes.ownership.crowded.add(P)
    a.consumer.pause(P)
    await rebalance(group, {a: [P]})
    assert a.consumer.paused == set()
    await drain(a)
    assert group.known_done(P) == set(range(100))
