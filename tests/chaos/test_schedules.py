"""Rebalances, deaths and freezes in orders that nobody would think of, on a group in memory."""

import random

import pytest
from aiokafka import TopicPartition

from tests.chaos.group import Group, Member, drain, partition
from tests.chaos.plan import FULL, SEED

pytestmark = pytest.mark.usefixtures("impatient")


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
