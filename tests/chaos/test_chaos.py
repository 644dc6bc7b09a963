"""Everything dies now and then, and nothing is lost and nothing counts twice: the log alone is the witness."""

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path

import pytest
from aiokafka.errors import KafkaError

from rollstream.broker import EmbeddedBroker
from rollstream.errors import BrokerUnavailable, StoreUnavailable
from rollstream.eventlog.commits import METADATA_LIMIT
from rollstream.settings import Settings
from rollstream.store.reader import open_snapshot
from tests.chaos.fleet import kill_broker
from tests.chaos.ledger import Commits, Ledger, look_at_commits, show
from tests.chaos.plan import FULL, SEED, Schedule, injuries
from tests.chaos.stack import (
    SESSION_TIMEOUT_S,
    Installation,
    all_ended,
    installed,
    poison,
    publish,
    raw_task,
    settled,
    tasks,
)
from topics.catalogue import EPISODES_COMPLETED, ROLLOUTS_SCORED, SESSIONS_READY

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

WORKERS = [
    *(f"agent_worker-{number}" for number in (1, 2, 3)),
    *(f"env_worker-{number}" for number in (1, 2)),
    *(f"verifier_worker-{number}" for number in (1, 2)),
    "store_worker-1",
]
EPISODES = 2_000 if FULL else 300
LANES = 8 if FULL else 4
SCHEDULE = Schedule(
    freezes=frozenset({3, 8}) if FULL else frozenset({2}),
    broker_kills=frozenset({5, 10}) if FULL else frozenset({3, 5}),
)
DEADLINE_S = 900.0 if FULL else 240.0
FREEZE_S = SESSION_TIMEOUT_S + 3


@pytest.mark.timeout(DEADLINE_S + 180)
async def test_whatever_dies_every_attempt_ends_once(mortal_broker: EmbeddedBroker, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    records = [raw_task(task) for task in tasks(EPISODES)] + poison(EPISODES // 50, rng)
    rng.shuffle(records)
    async with installed(mortal_broker, tmp_path, lanes=LANES, max_latency_s=3.0, flaky=0.05) as here:
        for name in WORKERS:
            here.workers.start(name)
        await here.workers.ready()
        here.workers.keep()
        commits = Commits()
        began = time.time()
        here.diary.began = began
        chores = [
            asyncio.create_task(publish(here.settings, records, per_second=LANES * 2, at_once=EPISODES // 3)),
            asyncio.create_task(watch_commits(here.settings, commits)),
        ]
        harm = asyncio.create_task(injure(here))
        try:
            ended = await all_ended(here.settings, len(records), DEADLINE_S)
            took_s = time.time() - began
        finally:
            for task in (*chores, harm):
                task.cancel()
            await asyncio.gather(*chores, harm, return_exceptions=True)
        for task in chores:
            if not task.cancelled() and (error := task.exception()):
                raise error
        await settled(here.settings, commits)
        stored = await stored_rollouts(here.settings, len(records))
        await here.workers.whole()
        codes = await here.workers.stop()
        ledger = await Ledger.read(here.settings)
    print(f"\nseed {SEED}\n{here.diary}")
    audit = ledger.audit
    again = ledger.agents_again(here.journal)
    verified_again = ledger.verifications_again()
    stall = ledger.longest_stall(began, here.diary.broker_down, stragglers=LANES)
    show(
        f"chaos: {EPISODES} episodes, {took_s:.0f} s, seed {SEED}",
        {
            "attempts published": audit.attempts,
            "attempts with a terminal record that counts": sum(audit.counting.values()),
            **{f"    {status}": number for status, number in sorted(audit.counting.items())},
            "lost": len(audit.missing),
            "double": len(audit.double),
            "ended in several tries (the first counts)": len(audit.overtaken),
            "strays": len(audit.strays),
            "terminal records repeated (same event, harmless)": audit.repeated,
            "completed episodes played again": again,
            "ended attempts verified again": verified_again,
            "share of finished work run again": f"{share_again(again + verified_again, ledger):.2%}",
            "sessions seeded again (acked unrun)": ledger.repeated(SESSIONS_READY),
            "retries scheduled": len(ledger.records["rollouts.retries"]),
            "longest stall": str(stall),
            "broker kills": len(here.diary.broker_down),
            "workers frozen for longer than their session": here.diary.count("SIGSTOP"),
            "workers killed": here.diary.count("SIGKILL") - len(here.diary.broker_down),
            "workers that ended by themselves": here.workers.ended_by_themselves,
            "longest commit metadata, characters": f"{commits.longest_metadata} of {METADATA_LIMIT}",
            "looks at the commits": commits.looks,
            "most finished records beyond a mark": commits.most_beyond,
            "left undone in the groups": sum(commits.unfinished.values()),
            "rollouts in the store": stored,
        },
    )
    assert ended == len(records), f"{len(records) - ended} attempts never ended"
    assert len(here.diary.broker_down) >= len(SCHEDULE.broker_kills), "the work was over before all harm was done"
    assert here.diary.count("SIGSTOP") >= len(SCHEDULE.freezes), "the work was over before all harm was done"
    assert audit.missing == []
    assert audit.double == {}
    assert audit.strays == []
    assert audit.attempts == sum(audit.counting.values()) == len(records)
    assert audit.counting["errored"] == EPISODES // 50
    assert share_again(again + verified_again, ledger) <= 0.01
    assert stall.seconds <= SESSION_TIMEOUT_S + 5
    assert commits.longest_metadata <= METADATA_LIMIT
    assert sum(commits.unfinished.values()) == 0
    assert stored == len(records)
    # One that was started again a moment ago may be told to stop before it listens.
    assert set(codes.values()) <= {0, -signal.SIGTERM}


def share_again(again: int, ledger: Ledger) -> float:
    """Work that was run although it was done, of all that was done: episodes played and verified."""
    done = len({_id(record) for record in ledger.records[EPISODES_COMPLETED.name]})
    done += len({_id(record) for record in ledger.records[ROLLOUTS_SCORED.name]})
    return again / done


def _id(record: object) -> str:
    found: str = record.header_map().get("ce_id", "")  # type: ignore[attr-defined]
    return found


async def injure(here: Installation) -> None:
    """Go on hurting workers and broker until cancelled."""
    thaws: set[asyncio.Task[None]] = set()
    try:
        for injury in injuries(SEED, WORKERS, SCHEDULE):
            await asyncio.sleep(injury.pause_s)
            if injury.kind == "kill broker":
                await asyncio.shield(kill_broker(here.broker, here.diary))
            elif injury.kind == "freeze":
                thaws.add(asyncio.create_task(here.workers.freeze(injury.target, FREEZE_S)))
            else:
                here.workers.kill(injury.target)
    finally:
        if thaws:
            await asyncio.wait(thaws)


async def watch_commits(settings: Settings, commits: Commits) -> None:
    while True:
        with contextlib.suppress(KafkaError, BrokerUnavailable, OSError, TimeoutError):
            await look_at_commits(settings, commits)
        await asyncio.sleep(1.5)


async def stored_rollouts(settings: Settings, wanted: int, deadline_s: float = 20.0) -> int:
    """Rollouts in the published store, once they are so many, or at the deadline."""
    found = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while found < wanted:
                await asyncio.sleep(0.5)
                with contextlib.suppress(StoreUnavailable), open_snapshot(settings.data_dir) as connection:
                    found = (connection.execute("SELECT count(*) FROM rollouts").fetchone() or (0,))[0]
    return found
