"""What is done to the system, and when. Pure: the same seed gives the same plan."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "freeze", "kill broker"]

FULL = os.environ.get("CHAOS_FULL", "") not in ("", "0")
SEED = int(os.environ.get("CHAOS_SEED", "1"))

STORE = "store_worker"


@dataclass(frozen=True, slots=True)
class Injury:
    """One thing done to the system.

    Attributes:
        pause_s: time since the injury before.
        target: name of a process, such as `agent_worker-2`; `broker` for the broker.
    """

    pause_s: float
    kind: Kind
    target: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which injuries, counted from 1, are special; all others kill a random worker."""

    freezes: frozenset[int]
    broker_kills: frozenset[int]


def injuries(seed: int, workers: list[str], schedule: Schedule) -> Iterator[Injury]:
    """Injuries without end, 5 to 8 s apart.

    The role that was hit last is spared: a group that loses one member after the other never gets to the end of a rebalance,
    and how long it stands still then says nothing about us.
    """
    rng = random.Random(seed)
    last_role, number = "", 0
    while True:
        number += 1
        pause_s = rng.uniform(5, 8)
        if number in schedule.broker_kills:
            yield Injury(pause_s, "kill broker", "broker")
            continue
        freezes = number in schedule.freezes
        # A frozen store tells nothing: it is in no consumer group.
        candidates = [name for name in workers if role(name) != last_role and not (freezes and role(name) == STORE)]
        target = rng.choice(candidates)
        last_role = role(target)
        yield Injury(pause_s, "freeze" if freezes else "kill", target)


def role(name: str) -> str:
    """The worker that a process runs: `agent_worker` of `agent_worker-2`."""
    return name.rpartition("-")[0]
