"""A worker whose event loop was blocked, and a broker that was gone for long: both come back by themselves."""

import asyncio
import time
from pathlib import Path

import pytest

from rollstream.broker import EmbeddedBroker
from tests.chaos.fleet import Fleet, kill_broker
from tests.chaos.ledger import Commits, Ledger, show
from tests.chaos.plan import FULL
from tests.chaos.stack import SESSION_TIMEOUT_S, all_ended, installed, publish, raw_task, settled, tasks

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

GONE_S = 60.0 if FULL else 20.0
BLOCKED_S = SESSION_TIMEOUT_S + 1.5


@pytest.mark.timeout(GONE_S + 180)
async def test_a_broker_that_was_gone_for_long_finds_its_workers_where_they_were(
    mortal_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    records = [raw_task(task) for task in tasks(80)]
    async with installed(mortal_broker, tmp_path, lanes=8, max_latency_s=2.0, flaky=0.0) as here:
        for name in ("env_worker-1", "agent_worker-1", "agent_worker-2", "verifier_worker-1", "store_worker-1"):
            here.workers.start(name)
        await here.workers.ready()
        here.workers.keep()
        began = here.diary.began = time.time()
        feeding = asyncio.create_task(publish(here.settings, records, per_second=10, at_once=40))
        await asyncio.sleep(3)
        await kill_broker(here.broker, here.diary, GONE_S)
        ended = await all_ended(here.settings, len(records), 90)
        await feeding
        commits = Commits()
        await settled(here.settings, commits)
        codes = await here.workers.stop()
        ledger = await Ledger.read(here.settings)
    audit, again = ledger.audit, ledger.agents_again(here.journal)
    stall = ledger.longest_stall(began, here.diary.broker_down)
    print(f"\n{here.diary}")
    show(
        f"a broker that was gone for {GONE_S:g} s",
        {
            "attempts published": audit.attempts,
            "attempts with a terminal record that counts": sum(audit.counting.values()),
            "lost": len(audit.missing),
            "double": len(audit.double),
            "completed episodes played again": again,
            "workers that ended by themselves": here.workers.ended_by_themselves,
            "longest stall beside the outage": str(stall),
            "left undone in the groups": sum(commits.unfinished.values()),
        },
    )
    assert ended == len(records)
    assert audit.is_clean
    assert audit.counting == {"completed": len(records)}
    assert again == 0
    assert here.workers.ended_by_themselves == 0
    assert stall.seconds <= SESSION_TIMEOUT_S + 5
    assert sum(commits.unfinished.values()) == 0
    assert set(codes.values()) == {0}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["session", "poll interval"])
async def test_a_worker_whose_loop_was_blocked_comes_back_by_itself(
    mortal_broker: EmbeddedBroker, tmp_path: Path, how: str
) -> None:
    """Blocked for longer than the group waits for a member, or than aiokafka lets a consumer not fetch."""
    records = [raw_task(task) for task in tasks(80)]
    async with installed(mortal_broker, tmp_path, lanes=8, max_latency_s=0.0, flaky=0.0) as here:
        workers = Fleet(here.workers.environment, here.workers.log_dir, here.diary)
        marker = tmp_path / "blocked"
        options = ["--block-s", str(BLOCKED_S), "--marker", str(marker)]
        if how == "poll interval":
            options += ["--max-poll-ms", "3000", "--session-s", "30"]
        try:
            for number in (1, 2):
                workers.start(f"blocking-{number}", "tests.chaos.blocking_worker", *options)
            await workers.ready()
            began = here.diary.began = time.time()
            feeding = asyncio.create_task(publish(here.settings, records, per_second=4, at_once=20))
            ended = await all_ended(here.settings, len(records), 60)
            took_s = time.time() - began
            await feeding
            codes = await workers.stop()
        finally:
            await workers.stop(gracefully=False)
        ledger = await Ledger.read(here.settings)
    audit = ledger.audit
    show(
        f"a loop that was blocked for {BLOCKED_S:g} s ({how})",
        {
            "attempts published": audit.attempts,
            "attempts with a terminal record that counts": sum(audit.counting.values()),
            "lost": len(audit.missing),
            "double": len(audit.double),
            "terminal records repeated (same event, harmless)": audit.repeated,
            "took, s": took_s,
            "tasks that the blocked worker ended afterwards": len(marker.read_text()),
        },
    )
    assert ended == len(records)
    assert audit.is_clean
    assert len(marker.read_text()) > 5, "the worker that was blocked did not take part again"
    assert set(codes.values()) == {0}
