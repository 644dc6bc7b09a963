"""Workers that join and leave all the time: every few seconds a rebalance, and the work goes on."""

import asyncio
import itertools
import time
from pathlib import Path

import pytest

from rollstream.broker import EmbeddedBroker
from tests.chaos.ledger import Commits, Ledger, show
from tests.chaos.plan import FULL, SEED
from tests.chaos.stack import SESSION_TIMEOUT_S, Installation, all_ended, installed, publish, raw_task, settled, tasks

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STORM_S = 60.0 if FULL else 20.0
EVERY_S = 3.0
PER_SECOND = 8


@pytest.mark.timeout(STORM_S + 180)
async def test_a_storm_of_rebalances_loses_nothing_and_repeats_nothing(mortal_broker: EmbeddedBroker, tmp_path: Path) -> None:
    records = [raw_task(task) for task in tasks(round(STORM_S * PER_SECOND))]
    async with installed(mortal_broker, tmp_path, lanes=16, max_latency_s=3.0, flaky=0.0) as here:
        workers = here.workers
        staying = ["env_worker-1", "verifier_worker-1", "agent_worker-1"]
        for name in staying:
            workers.start(name)
        await workers.ready()
        began = here.diary.began = time.time()
        feeding = asyncio.create_task(publish(here.settings, records, per_second=PER_SECOND))
        await storm(here, until=began + STORM_S)
        ended = await all_ended(here.settings, len(records), 90)
        await feeding
        commits = Commits()
        await settled(here.settings, commits)
        codes = await workers.stop()
        ledger = await Ledger.read(here.settings)
    audit, stall, again = ledger.audit, ledger.longest_stall(began, []), ledger.agents_again(here.journal)
    verified_again = ledger.verifications_again()
    print(f"\nseed {SEED}\n{here.diary}")
    show(
        f"rebalance storm: {len(records)} episodes, {STORM_S:g} s",
        {
            "attempts published": audit.attempts,
            "attempts with a terminal record that counts": sum(audit.counting.values()),
            "lost": len(audit.missing),
            "double": len(audit.double),
            "completed episodes played again": again,
            "ended attempts verified again": verified_again,
            "longest stall": str(stall),
            "left undone in the groups": sum(commits.unfinished.values()),
            "episodes/s, by 3 s": " ".join(f"{rate:.1f}" for rate in ledger.curve(began)),
        },
    )
    assert ended == len(records)
    assert audit.is_clean
    assert audit.counting == {"completed": len(records)}
    assert again + verified_again <= len(records) / 100
    assert stall.seconds <= SESSION_TIMEOUT_S + 5
    assert sum(commits.unfinished.values()) == 0
    assert set(codes.values()) == {0}


async def storm(here: Installation, until: float) -> None:
    """By turns, a worker joins and the one that joined first leaves: an agent, then a verifier."""
    joined: list[str] = []
    leaving: list[asyncio.Task[None]] = []
    for turn in itertools.count():
        wait_s = min(EVERY_S, until - time.time())
        if wait_s <= 0:
            break
        await asyncio.sleep(wait_s)
        if turn % 2 == 0:
            name = f"{('agent_worker', 'verifier_worker')[turn // 2 % 2]}-{turn + 2}"
            here.diary.write(f"{name} joins")
            here.workers.start(name)
            joined.append(name)
        elif len(joined) > 1:
            leaving.append(asyncio.create_task(here.workers.leave(joined.pop(0))))
    await asyncio.gather(*leaving)
