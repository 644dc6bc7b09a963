"""How far a run is, from its records."""

import json

import pytest

from rollstream.cli.progress import Outcome, RunProgress, Snapshot, duration, line, outcome_of
from rollstream.cli.watch import held_up, notices
from rollstream.eventlog.control import RunStates
from rollstream.eventlog.groups import CONSUMPTIONS
from schemas.rollout import Status
from schemas.run import RunCancelled, RunPaused
from schemas.values import GroupRef, Usage


def outcome(
    rollout: str, status: Status = "completed", reward: float | None = 1.0, round: int = 0, revision: int = 0
) -> Outcome:
    return Outcome(
        run="r",
        group=GroupRef(id="g", size=4, index=0),
        rollout=rollout,
        round=round,
        revision=revision,
        status=status,
        reward=reward,
        success=None if reward is None else reward >= 1.0,
        usage=Usage(prompt_tokens=3, completion_tokens=2),
    )


def after(*outcomes: Outcome, seeded: tuple[str, ...] = (), expected: int | None = 4, now_s: float = 10) -> Snapshot:
    progress = RunProgress(expected)
    for rollout in seeded:
        progress.rollout_seeded(rollout)
    for one in outcomes:
        progress.rollout_ended(one, at_s=0)
    return progress.snapshot(now_s)


def test_a_run_begins_with_nothing_known_but_its_size() -> None:
    snapshot = after()
    assert (snapshot.total, snapshot.done, snapshot.running, snapshot.failed) == (4, 0, 0, 0)
    assert (snapshot.rate_per_s, snapshot.eta_s, snapshot.mean_reward, snapshot.success_rate) == (0.0, None, None, None)
    assert not snapshot.is_complete


def test_sessions_run_until_their_rollout_ends_however_often_each_is_told() -> None:
    snapshot = after(outcome("a"), outcome("a"), seeded=("a", "b", "b"))
    assert (snapshot.seeded, snapshot.running, snapshot.done) == (2, 1, 1)
    assert snapshot.tokens == 5


@pytest.mark.parametrize(
    ("records", "reward"),
    [
        ([outcome("a", reward=0.0), outcome("a", reward=1.0)], 0.0),
        ([outcome("a", reward=0.0), outcome("a", reward=1.0, revision=1)], 1.0),
        ([outcome("a", reward=0.5, revision=1), outcome("a", reward=1.0)], 0.5),
        ([outcome("a", reward=0.5, revision=9), outcome("a", reward=0.25, round=1)], 0.25),
        ([outcome("a", "errored", None), outcome("a", reward=1.0, round=1)], 1.0),
    ],
)
def test_the_record_that_counts_is_the_highest_round_and_revision_then_the_first(records: list[Outcome], reward: float) -> None:
    snapshot = after(*records)
    assert snapshot.mean_reward == reward
    assert snapshot.done == 1


def test_what_was_not_scored_is_no_zero() -> None:
    snapshot = after(outcome("a", reward=1.0), outcome("b", "errored", None), outcome("c", "truncated", 0.0))
    assert snapshot.mean_reward == 0.5
    assert snapshot.success_rate == 0.5
    assert snapshot.failed == 1
    assert snapshot.statuses == {"completed": 1, "errored": 1, "truncated": 1}


def test_a_run_is_complete_when_every_attempt_is_terminal_errored_ones_too() -> None:
    assert after(outcome("a"), outcome("b", "errored", None), expected=2).is_complete
    assert not after(outcome("a"), expected=2).is_complete


def test_a_run_without_manifest_is_as_large_as_the_groups_it_shows() -> None:
    progress = RunProgress(None)
    assert not progress.snapshot(0).is_complete
    progress.group_seen("g", 4)
    progress.group_seen("g", 4)
    progress.group_seen("h", 2)
    assert progress.snapshot(0).total == 6


def test_the_rate_is_of_the_last_half_minute_and_gives_the_time_left() -> None:
    progress = RunProgress(30)
    progress.rollout_ended(outcome("old"), at_s=0)
    for number in range(10):
        progress.rollout_ended(outcome(f"new{number}"), at_s=100 + number)
    snapshot = progress.snapshot(110)
    assert snapshot.rate_per_s == 1.0
    assert snapshot.eta_s == 19


def test_a_run_that_stands_still_has_no_time_left_to_tell() -> None:
    assert after(outcome("a"), now_s=1000).eta_s is None


HEADERS = (
    ("run_id", b"r"),
    ("group_id", b"g"),
    ("group_size", b"4"),
    ("group_index", b"2"),
    ("rollout_id", b"a"),
    ("round", b"1"),
    ("status", b"errored"),
)


def test_an_undecodable_terminal_record_still_counts_by_its_headers() -> None:
    found = outcome_of(b"\xff garbage", HEADERS)
    assert found is not None
    assert (found.rollout, found.round, found.status, found.reward) == ("a", 1, "errored", None)


@pytest.mark.parametrize("reward", ["NaN", "true", '"1"', "Infinity"])
def test_a_reward_that_is_no_finite_number_is_not_counted_as_one(reward: str) -> None:
    body = json.dumps(
        {"run": "r", "group": {"id": "g", "size": 1, "index": 0}, "rollout": "a", "status": "completed", "reward": "REWARD"}
    )
    found = outcome_of(body.replace('"REWARD"', reward).encode(), HEADERS)
    assert found is not None
    assert found.reward is None


def test_a_record_without_body_and_ids_is_nothing() -> None:
    assert outcome_of(None, ()) is None


def test_a_snapshot_reads_as_one_line() -> None:
    snapshot = after(outcome("a"), outcome("b", "errored", None), seeded=("c",))
    assert line(snapshot) == "2/4 done, 1 running, 1 failed, 0.2/s, 10 s left, mean reward 1.000, success 100.0%"


# Retries, and further rounds.


def test_a_retry_waits_until_its_session_is_opened_in_whatever_order_that_is_told() -> None:
    progress = RunProgress(2)
    progress.rollout_seeded("a")
    progress.retry_scheduled("a", (0, 1))
    progress.rollout_seeded("b", (0, 2))
    progress.retry_scheduled("b", (0, 1))
    assert (progress.snapshot(0).waiting, progress.snapshot(0).running) == (1, 2)
    progress.rollout_seeded("a", (0, 1))
    assert progress.snapshot(0).waiting == 0


def test_a_verification_waits_until_its_attempt_has_ended() -> None:
    progress = RunProgress(1)
    progress.rollout_seeded("a", (0, 1))
    progress.retry_scheduled("a", (0, 1), verification=True)
    assert progress.snapshot(0).waiting == 1
    progress.rollout_ended(outcome("a"), at_s=0)
    assert progress.snapshot(0).waiting == 0


def test_a_resumed_attempt_is_under_way_until_its_new_round_has_ended() -> None:
    progress = RunProgress(2)
    for rollout in ("a", "b"):
        progress.rollout_seeded(rollout)
    progress.rollout_ended(outcome("a"), at_s=0)
    progress.rollout_ended(outcome("b", "errored", None), at_s=0)
    assert progress.snapshot(0).is_complete
    progress.retry_scheduled("b", (1, 0))
    waiting = progress.snapshot(0)
    assert (waiting.done, waiting.running, waiting.waiting, waiting.is_complete) == (1, 1, 1, False)
    assert "1 waiting for a retry" in line(waiting)
    progress.rollout_seeded("b", (1, 0))
    progress.rollout_ended(outcome("b", round=1), at_s=0)
    final = progress.snapshot(0)
    assert (final.done, final.failed, final.running, final.is_complete) == (2, 0, 0, True)


def test_a_run_that_somebody_holds_up_is_told_with_the_reason() -> None:
    states = RunStates()
    assert held_up("r", states) == []
    states.learn(RunPaused.create(run="r", reason="the key is refused", cause="k", by="w"))
    assert held_up("r", states) == ["run r is paused: the key is refused"]
    assert held_up("other", states) == []
    states.learn(RunCancelled.create(run="r"))
    assert "run r is cancelled" in held_up("r", states)[0]


def test_nobody_to_take_up_retries_is_told_when_one_waits() -> None:
    progress = RunProgress(1)
    progress.rollout_seeded("a")
    progress.retry_scheduled("a", (0, 1))
    told = [notice for notice in notices(progress.snapshot(0), CONSUMPTIONS) if "rollouts.retries" in notice]
    assert told[0] == "nobody consumes rollouts.retries: start an env_worker (`rollstream up`)"


def test_missing_workers_are_told_with_the_topic_that_waits() -> None:
    assert notices(after(), CONSUMPTIONS) == [
        "nobody consumes tasks.in: start an env_worker (`rollstream up`)",
        "nobody consumes sessions.ready: start an agent_worker (`rollstream up`)",
        "nobody consumes env.actions: start an env_worker (`rollstream up`)",
        "nobody consumes episodes.completed: start a verifier_worker (`rollstream up`)",
    ]


def test_a_run_that_is_seeded_needs_an_env_worker_only_for_actions_that_wait() -> None:
    seeded = after(seeded=("a", "b", "c", "d"))
    assert [notice.split()[2] for notice in notices(seeded, CONSUMPTIONS)] == [
        "sessions.ready:",
        "env.actions:",
        "episodes.completed:",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_are_told_in_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text
