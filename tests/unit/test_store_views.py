"""What the views say, against numbers worked out by hand or by another method."""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import comb
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from rollstream.eventlog.retries import regrade
from rollstream.regrading import CAUSE
from schemas.counting import that_count
from schemas.envelope import Event
from schemas.episode import EpisodeTiming
from schemas.failure import DeadLettered, DeadLetterSettled, ErrorInfo
from schemas.rollout import Mask, RolloutScored
from schemas.run import RunCancelled, RunPaused, RunResumed
from schemas.values import Usage
from tests.events import CANARY, Attempt, Log, at, attempts, run_published, task_submitted, with_tools
from tests.stores import answer, publish_events, writing


def two_groups() -> list[Event]:
    """Group A: four attempts, rewards 1, 0, 0.5 and a failure. Group B: four attempts, rewards 1 and 1, two still out."""
    a, b = task_submitted("a", attempts=4), task_submitted("b", attempts=4)
    events: list[Event] = [run_published(groups=2, attempts=4), a, b]
    for attempt in (*attempts(a, 1.0, 0.0, 0.5), *attempts(b, 1.0, 1.0)):
        events += attempt.events()
    lost = Attempt(a, index=3)
    return [*events, lost.ready(), lost.failed(), Attempt(b, index=2).ready()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_events(tmp_path_factory.mktemp("store"), *two_groups())


def test_a_mean_reward_leaves_failed_attempts_out(store: Path) -> None:
    found = answer(store, "SELECT environment, count(*), count(reward), avg(reward) FROM rollouts GROUP BY 1")
    assert found == [("math", 6, 5, 0.7)]


def test_groups_tell_what_is_missing(store: Path) -> None:
    columns = "task_id, size, ended, scored, succeeded, errored, cancelled, complete, mean_reward"
    assert answer(store, f"SELECT {columns} FROM groups ORDER BY task_id") == [
        ("a", 4, 4, 3, 1, 1, 0, True, 0.5),
        ("b", 4, 2, 2, 2, 0, 0, False, 1.0),
    ]


def test_pass_at_k_is_over_scored_attempts_and_says_how_many_those_are(store: Path) -> None:
    # Group A: 1 of 3 succeeded; group B: 2 of 2. pass@2 of A is 1 - C(2,2)/C(3,2) = 2/3. Nobody has four scored.
    found = answer(store, "SELECT k, pass_at_k, groups_estimated, groups, coverage FROM pass_at_k")
    assert found == [
        (1, pytest.approx((1 / 3 + 1) / 2), 2, 2, 5 / 8),
        (2, pytest.approx((2 / 3 + 1) / 2), 2, 2, 5 / 8),
        (4, None, 0, 2, 5 / 8),
    ]


def test_failures_say_where_and_why(store: Path) -> None:
    columns = "task_id, error_stage, error_kind, error_retryable, error_message"
    found = answer(store, f"SELECT {columns} FROM failures")
    assert found == [("a", "agent", "model_unavailable", True, "the model server answered 503")]


def test_runs_attempted_is_what_the_manifest_promised(store: Path) -> None:
    columns = "run_id, dataset, harness, model, groups, attempted, ended, scored, succeeded, errored, mean_reward"
    assert answer(store, f"SELECT {columns} FROM runs") == [("run-1", "sums", "chat", "small", 2, 8, 6, 5, 3, 1, 0.7)]


def test_usage_is_of_every_recorded_call(store: Path) -> None:
    columns = "model, role, calls, rollouts, prompt_tokens, completion_tokens, model_s"
    assert answer(store, f"SELECT {columns} FROM usage") == [("small-1b", "policy", 5, 5, 50, 25, 7.5)]


COSTS = (0.1, 0.2, 0.3, 0.0)
"""Whose sum as floating-point numbers depends on their order."""


@pytest.mark.parametrize("costs", [COSTS, COSTS[::-1]])
def test_what_calls_said_that_they_cost_is_added_up_exactly_in_any_order(tmp_path: Path, costs: Sequence[float]) -> None:
    told = [Attempt(index=index, cost_usd=cost).stepped() for index, cost in enumerate((*costs, None))]
    publish_events(tmp_path, *told, Attempt(cost_usd=0.25).environment_called())
    found = answer(tmp_path, "SELECT role, calls, cost_usd FROM usage")
    assert found == [("policy", 5, 0.6), ("user", 1, 0.25)]


def test_where_no_call_said_what_it_cost_the_usage_has_no_cost(store: Path) -> None:
    assert answer(store, "SELECT cost_usd FROM usage") == [(None,)]


def test_costs_too_large_to_be_one_are_left_out_and_no_sum_of_them_overflows(tmp_path: Path) -> None:
    told = [Attempt(index=index, cost_usd=cost).stepped() for index, cost in enumerate((1e300, 9e28, 9e28, 0.5))]
    publish_events(tmp_path, *told)
    assert answer(tmp_path, "SELECT calls, cost_usd FROM usage") == [(4, 0.5)]


def test_no_tokens_and_no_times_of_other_writers_make_the_usage_fail(tmp_path: Path) -> None:
    log = Log()
    most = 2**63 - 1
    sound = Attempt().stepped()
    records = [log.record(sound)]
    for index in (1, 2):
        body = orjson.loads(Attempt(index=index).stepped().to_json())
        body["call"] |= {
            "usage": {"prompt_tokens": most, "completion_tokens": most, "cached_tokens": -most},
            "duration_s": 9e28,
        }
        records.append(log.raw("agent.steps", orjson.dumps(body)))
    with writing(tmp_path) as store:
        store.apply(records)
        store.publish()
    assert answer(tmp_path, "SELECT max(prompt_tokens), max(duration_s) FROM agent_stepped") == [(most, 9e28)]
    used = answer(tmp_path, "SELECT calls, prompt_tokens, completion_tokens, cached_tokens, model_s FROM usage")
    assert used == [(3, 10, 5, 0, 1.5)]


def test_trajectories_have_the_messages(store: Path) -> None:
    found = answer(
        store, "SELECT messages ->> '$[1].content', len(messages -> '$[*]') FROM trajectories WHERE status = 'completed'"
    )
    assert found == [("It is 2.", 2)] * 5


def test_lag_is_by_partition(tmp_path: Path) -> None:
    log = Log()
    with writing(tmp_path) as store:
        store.apply(log.records(*Attempt().events()), {("verdicts", 0): 4})
        store.publish()
    found = answer(tmp_path, "SELECT topic, next_offset, end_offset, behind FROM lag WHERE end_offset IS NOT NULL")
    assert found == [("verdicts", 1, 4, 3)]


def test_a_run_without_manifest_is_as_large_as_its_tasks(tmp_path: Path) -> None:
    publish_events(tmp_path, *two_groups()[1:])
    assert answer(tmp_path, "SELECT groups, attempted, ended FROM runs") == [(2, 8, 6)]


def test_a_record_made_of_headers_alone_gets_its_task_from_its_group(tmp_path: Path) -> None:
    task = task_submitted(attempts=2)
    lost = Attempt(task)
    publish_events(tmp_path, task, lost.failed().model_copy(update={"task": None}))
    found = answer(tmp_path, "SELECT dataset, split, task_id, harness, model, submitted_at FROM rollouts")
    assert found == [("sums", "test", "task-1", "chat", "small", at(0).replace(tzinfo=None))]


def test_a_bare_tasks_group_is_known_by_its_session(tmp_path: Path) -> None:
    attempt = Attempt(task_submitted(attempts=3))
    publish_events(tmp_path, attempt.ready())
    found = answer(tmp_path, "SELECT task_id, size, harness, ended, complete FROM groups")
    assert found == [("task-1", 3, "chat", 0, False)]


def test_a_regrade_counts_over_the_first_verdict(tmp_path: Path) -> None:
    first, again = Attempt(reward=0.0), Attempt(reward=1.0)
    publish_events(tmp_path, *first.events(), again.verdict(revision=1), again.scored(revision=1))
    assert answer(tmp_path, "SELECT revision, reward FROM rollouts") == [(1, 1.0)]


def test_a_resumed_round_counts_over_an_earlier_failure_and_its_late_score(tmp_path: Path) -> None:
    first = Attempt(round_=0, reward=0.0)
    second = Attempt(round_=1, reward=1.0)
    late = first.scored(revision=3)
    publish_events(tmp_path, first.failed(), second.scored(), late)
    assert answer(tmp_path, "SELECT round, reward FROM rollouts") == [(1, 1.0)]


def test_steps_that_do_not_belong_to_the_counting_trajectory_are_told_apart(tmp_path: Path) -> None:
    lost, kept = Attempt(round_=0), Attempt(round_=1)
    stray = kept.stepped().model_copy(update={"event_id": "b3c1b2a6-0000-4000-8000-000000000000", "index": 9})
    publish_events(tmp_path, lost.stepped(), lost.failed(), *kept.events(), stray)
    found = answer(tmp_path, "SELECT round, step_index, counts FROM steps ORDER BY round, step_index")
    assert found == [(0, 0, False), (1, 0, True), (1, 9, False)]


def test_a_truncated_attempt_is_scored_and_a_cancelled_one_is_not(tmp_path: Path) -> None:
    task = task_submitted(attempts=2)
    cut = Attempt(task, stop_reason="max_steps", reward=0.0)
    ended = Attempt(task, index=1).failed()
    cancelled = ended.model_copy(update={"status": "cancelled", "error": None, "stop_reason": "cancelled"})
    publish_events(tmp_path, task, *cut.events(), cancelled)
    found = answer(tmp_path, "SELECT ended, scored, succeeded, errored, cancelled, complete FROM groups")
    assert found == [(2, 1, 0, 0, 1, True)]
    assert answer(tmp_path, "SELECT count(*) FROM failures") == [(0,)]


def test_a_rollouts_own_times_and_tokens_are_columns(tmp_path: Path) -> None:
    timing = EpisodeTiming(queued_s=1.25, agent_s=3.0, environment_s=0.5, model_s=2.0)
    attempt = replace(
        Attempt(), timing=timing, verify_s=0.75, usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
    )
    publish_events(tmp_path, *attempt.events())
    columns = "queued_s, agent_s, environment_s, model_s, verify_s, prompt_tokens, completion_tokens, cached_tokens"
    assert answer(tmp_path, f"SELECT {columns} FROM rollouts") == [(1.25, 3.0, 0.5, 2.0, 0.75, 7, 3, 2)]


def test_an_artifact_is_the_submission(tmp_path: Path) -> None:
    scored = Attempt().scored()
    assert scored.submission is not None
    patched = scored.model_copy(update={"submission": scored.submission.model_copy(update={"artifact": "diff --git a b"})})
    publish_events(tmp_path, patched)
    assert answer(tmp_path, "SELECT submission FROM rollouts") == [("diff --git a b",)]


def test_the_estimators_equal_exact_fractions(store: Path) -> None:
    cases = [(n, c, k) for n in range(1, 13) for c in range(n + 1) for k in range(1, n + 1)]
    cases += [(200, c, k) for c in (0, 1, 99, 199, 200) for k in (1, 64, 128, 200)]
    values = ", ".join(f"({n}, {c}, {k})" for n, c, k in cases)
    found = answer(store, f"SELECT n, c, k, pass_at_k(n, c, k), pass_hat_k(n, c, k) FROM (VALUES {values}) AS t(n, c, k)")
    for (n, c, k), (*_, at_k, hat_k) in zip(cases, found, strict=True):
        assert at_k == pytest.approx(float(1 - Fraction(comb(n - c, k), comb(n, k))), abs=1e-12), (n, c, k)
        assert hat_k == pytest.approx(float(Fraction(comb(c, k), comb(n, k))), abs=1e-12), (n, c, k)


outcomes = st.lists(st.lists(st.sampled_from([1.0, 0.0, None]), min_size=1, max_size=5), min_size=1, max_size=4)
"""By group, the reward of each attempt; of None nobody knows."""


@settings(max_examples=15, deadline=None)
@given(outcomes)
def test_a_runs_estimates_are_the_means_of_its_groups(drawn: list[list[float | None]]) -> None:
    events: list[Event] = []
    for number, rewards in enumerate(drawn):
        task = task_submitted(f"task-{number}", attempts=len(rewards))
        events.append(task)
        for index, reward in enumerate(rewards):
            attempt = Attempt(task, index=index, reward=reward or 0.0)
            events.append(attempt.failed() if reward is None else attempt.scored())
    with tempfile.TemporaryDirectory() as folder:
        publish_events(Path(folder), *events)
        query = "SELECT k, pass_at_k, pass_hat_k FROM pass_at_k JOIN pass_hat_k USING (run_id, environment, k)"
        found = answer(Path(folder), query)
    for k, at_k, hat_k in found:
        assert isinstance(k, int)
        counts = [(sum(r is not None for r in rewards), sum(r == 1 for r in rewards)) for rewards in drawn if len(rewards) >= k]
        exact = [(1 - Fraction(comb(n - c, k), comb(n, k)), Fraction(comb(c, k), comb(n, k))) for n, c in counts if n >= k]
        expected = [float(sum(column) / len(exact)) for column in zip(*exact, strict=True)] or [None, None]
        assert [at_k, hat_k] == pytest.approx(expected, abs=1e-12), k


def test_fewer_attempts_than_k_give_no_estimate(store: Path) -> None:
    assert answer(store, "SELECT pass_at_k(3, 3, 4), pass_at_k(3, 0, 3)") == [(None, 0.0)]
    assert answer(store, "SELECT pass_hat_k(3, 3, 4), pass_hat_k(3, 2, 3)") == [(None, 0.0)]


@dataclass(frozen=True)
class Terminal:
    """A terminal record, as far as the rule looks at it."""

    rollout_id: str
    round: int
    revision: int
    partition: int
    offset: int
    reward: float


terminals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=25
)


@settings(max_examples=25, deadline=None)
@given(terminals, st.randoms(use_true_random=False))
def test_the_view_and_the_rule_agree(drawn: list[tuple[int, int, int, int]], order: random.Random) -> None:
    log = Log()
    task = task_submitted(attempts=4)
    records, told = [], []
    for number, (index, round_, revision, partition) in enumerate(drawn):
        event = terminal_record(Attempt(task, index=index, round_=round_), revision, number)
        record = log.raw("rollouts.scored", event.to_json(), partition=partition)
        records.append(record)
        told.append(Terminal(event.rollout, round_, revision, record.partition, record.offset, float(number)))
    expected = {(each.rollout_id, each.round, each.revision, each.reward) for each in that_count(told).values()}
    order.shuffle(told)
    assert {(each.rollout_id, each.round, each.revision, each.reward) for each in that_count(told).values()} == expected
    with tempfile.TemporaryDirectory() as folder, writing(Path(folder)) as store:
        store.apply(records)
        store.publish()
        found = answer(Path(folder), "SELECT rollout_id, round, revision, reward FROM rollouts")
    assert set(found) == expected


def terminal_record(attempt: Attempt, revision: int, number: int) -> RolloutScored:
    """A terminal record with an id of its own, so that only the counting rule tells records of a session apart."""
    error = ErrorInfo(kind="x", stage="agent", message="x", retryable=False)
    record = RolloutScored.of_failure(attempt.ready(), error, at(1))
    return record.model_copy(update={"event_id": f"terminal-{number}", "revision": revision, "reward": float(number)})


# What trainers and analysts ask.


def played_with_tools() -> list[Event]:
    attempt = Attempt(task_submitted("tools"))
    return [attempt.task, attempt.completed(), with_tools(attempt.scored())]


def test_a_tool_call_has_what_came_back_for_it_also_when_its_id_comes_again(tmp_path: Path) -> None:
    publish_events(tmp_path, *played_with_tools())
    columns = "message_index, call_index, tool_call_id, tool, arguments, result"
    assert answer(tmp_path, f"SELECT {columns} FROM tool_calls ORDER BY 1, 2") == [
        (2, 0, "call-1", "search", '{"q": "1"}', "one"),
        (2, 1, "call-2", "sum", '{"a": 1}', "two"),
        (5, 0, "call-1", "search", '{"q": "2"}', "three"),
    ]


def test_time_adds_up_and_a_failed_attempt_has_what_is_known(store: Path) -> None:
    columns = "seeding_s, queued_s, agent_s, environment_s, model_s, harness_s, verify_s, total_s, other_s"
    found = answer(store, f"SELECT DISTINCT status, {columns} FROM timing ORDER BY status")
    # Submitted at 0, seeded at 1, scored at 5; a failure at 6 has no times of a session that counts.
    assert found == [
        ("completed", 1.0, 1.0, 2.0, 0.25, 1.5, 0.25, 0.5, 5.0, 0.5),
        ("errored", None, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6.0, 6.0),
    ]


def test_only_a_success_that_is_not_masked_is_an_example(tmp_path: Path) -> None:
    task = task_submitted(attempts=4)
    masked = Attempt(task, index=1).scored().model_copy(update={"mask": Mask(loss=True, baseline=False)})
    middling, lost = Attempt(task, index=2, reward=0.5).scored(), Attempt(task, index=3).failed()
    publish_events(tmp_path, task, Attempt(task).scored(), masked, middling, lost)
    assert answer(tmp_path, "SELECT group_index, messages ->> '$[1].content' FROM sft_examples") == [(0, "It is 2.")]


def test_a_pair_is_the_best_against_the_worst_and_of_equals_the_first(tmp_path: Path) -> None:
    task, even = task_submitted("a", attempts=6), task_submitted("b", attempts=2)
    tried = [*attempts(task, 0.0, 1.0, 1.0, 0.0, 0.5), *attempts(even, 0.5, 0.5)]
    publish_events(tmp_path, task, even, *(each.scored() for each in tried), Attempt(task, index=5).failed())
    columns = "task_id, chosen, rejected, chosen_reward, rejected_reward, margin, attempts"
    assert answer(tmp_path, f"SELECT {columns} FROM preference_pairs") == [
        ("a", tried[1].rollout, tried[0].rollout, 1.0, 0.0, 1.0, 5)
    ]


def test_an_advantage_is_over_the_attempts_of_the_baseline(tmp_path: Path) -> None:
    task, even = task_submitted("a", attempts=4), task_submitted("b", attempts=2)
    masked = Attempt(task, index=3, reward=5.0).scored().model_copy(update={"mask": Mask(loss=False, baseline=True)})
    scored = [each.scored() for each in (*attempts(task, 1.0, 0.0), *attempts(even, 0.5, 0.5))]
    publish_events(tmp_path, task, even, *scored, Attempt(task, index=2).failed(), masked)
    columns = "task_id, group_index, complete, counted, group_mean, group_std, advantage"
    assert answer(tmp_path, f"SELECT {columns} FROM grpo_groups ORDER BY 1, 2") == [
        ("a", 0, True, 2, 0.5, 0.5, 1.0),
        ("a", 1, True, 2, 0.5, 0.5, -1.0),
        ("a", 2, True, 2, 0.5, 0.5, None),
        ("a", 3, True, 2, 0.5, 0.5, 9.0),
        ("b", 0, True, 2, 0.5, 0.0, 0.0),
        ("b", 1, True, 2, 0.5, 0.0, 0.0),
    ]


def test_steps_of_are_those_of_the_rollouts_in_order(tmp_path: Path) -> None:
    task = task_submitted(attempts=3)
    lost, kept, other = Attempt(task, try_=0), Attempt(task, try_=1), Attempt(task, index=1)
    publish_events(tmp_path, task, *kept.events(), *other.events(), lost.stepped(), *Attempt(task, index=2).events())
    found = answer(tmp_path, f"SELECT rollout_id, try, counts FROM steps_of(['{kept.rollout}', '{other.rollout}'])")
    assert found == sorted([(kept.rollout, 0, False), (kept.rollout, 1, True), (other.rollout, 0, True)])


def test_a_payload_in_parts_is_whole_in_every_view(tmp_path: Path) -> None:
    long = Attempt(answer="x" * 100_000)
    publish_events(tmp_path, long.task, *long.events(), *Attempt(task_submitted("short")).events())
    of_long = f"WHERE rollout_id = '{long.rollout}'"
    assert answer(tmp_path, f"SELECT len(messages ->> '$[1].content') FROM trajectories {of_long}") == [(100_000,)]
    assert answer(tmp_path, f"SELECT len(message ->> '$.content') FROM steps {of_long}") == [(100_000,)]
    assert answer(tmp_path, f"SELECT len(messages ->> '$[1].content') FROM sft_examples {of_long}") == [(100_000,)]
    assert answer(tmp_path, "SELECT count(*) FROM events WHERE payload IS NULL") == [(0,)]


def test_of_a_group_that_was_published_twice_the_first_task_is_told(tmp_path: Path) -> None:
    task = task_submitted(attempts=2)
    again = task.model_copy(update={"event_id": "another", "attempts": 3})
    publish_events(tmp_path, task, again, *Attempt(task).events())
    assert answer(tmp_path, "SELECT size FROM tasks") == [(2,)]
    assert answer(tmp_path, "SELECT size, ended, complete FROM groups") == [(2, 1, False)]


# Retries, and runs that are held up.


def test_a_retry_waits_until_its_session_is_opened_or_its_attempt_has_ended(tmp_path: Path) -> None:
    task = task_submitted(attempts=4)
    waits, opened, ended, verifying = (Attempt(task, index=index) for index in range(4))
    publish_events(
        tmp_path, task, waits.retry(), opened.retry(), replace(opened, try_=1).ready(), ended.retry(), ended.failed(),
        verifying.ready(), verifying.verification_retry(),
    )  # fmt: skip
    found = answer(tmp_path, "SELECT rollout_id, stage, next_try, cause_kind, waiting FROM retries")
    assert sorted(found, key=str) == sorted(
        [
            (waits.rollout, "agent", 1, "model_unavailable", True),
            (opened.rollout, "agent", 1, "model_unavailable", False),
            (ended.rollout, "agent", 1, "model_unavailable", False),
            (verifying.rollout, "verification", 0, "grader_crashed", True),
        ],
        key=str,
    )


def test_of_several_retries_of_an_attempt_the_last_one_waits(tmp_path: Path) -> None:
    first, second = Attempt(), Attempt(try_=1)
    publish_events(tmp_path, first.task, first.retry(), second.retry(failures=2), second.retry(next_round=1))
    assert answer(tmp_path, "SELECT next_round, next_try, waiting FROM retries ORDER BY 1, 2") == [
        (0, 1, False),
        (0, 2, False),
        (1, 0, True),
    ]


def test_a_run_has_the_state_that_was_said_last(tmp_path: Path) -> None:
    def pause(run: str) -> Event:
        return RunPaused.create(run=run, reason="the key is refused", cause="model_unauthorized", by="w")

    runs = ("active", "paused", "resumed", "cancelled")
    said = [*map(pause, runs[1:]), RunResumed.create(run="resumed"), RunCancelled.create(run="cancelled")]
    publish_events(tmp_path, *map(run_published, runs), *said)
    assert answer(tmp_path, "SELECT run_id, state, paused_because FROM runs ORDER BY run_id") == [
        ("active", "active", None),
        ("cancelled", "cancelled", None),
        ("paused", "paused", "the key is refused"),
        ("resumed", "active", None),
    ]
    assert answer(tmp_path, "SELECT kind, count(*) FROM events WHERE topic = 'runs.control' GROUP BY 1 ORDER BY 1") == [
        ("RunCancelled", 1),
        ("RunPaused", 3),
        ("RunPublished", 4),
        ("RunResumed", 1),
    ]


def test_a_dead_letter_says_what_was_done_about_it(tmp_path: Path) -> None:
    letters = [
        DeadLettered.of_record(
            boundary="w",
            reason="r",
            topic="tasks.in",
            partition=0,
            offset=offset,
            key=None,
            value=b"x",
            headers=[],
            recorded_at=at(0),
        )
        for offset in range(3)
    ]
    done = [DeadLetterSettled.create(letters[0], "replayed"), DeadLetterSettled.create(letters[1], "discarded")]
    publish_events(tmp_path, *letters, *done)
    assert answer(tmp_path, "SELECT kafka_offset, settled FROM dead_letters ORDER BY 1") == [
        (0, "replayed"),
        (1, "discarded"),
        (2, None),
    ]


def test_no_ticket_of_a_retry_is_published_nor_the_one_of_its_episode(tmp_path: Path) -> None:
    publish_events(tmp_path, Attempt().retry(), Attempt().verification_retry())
    ((both,),) = answer(tmp_path, "SELECT string_agg(payload, '') FROM retry_scheduled")
    assert CANARY not in str(both)
    assert answer(tmp_path, "SELECT count(*) FROM retry_scheduled") == [(2,)]


def test_a_regrade_waits_until_its_revision_or_a_newer_one_is_there(tmp_path: Path) -> None:
    task = task_submitted("a", attempts=2)
    one, two = attempts(task, 0.0, 1.0)
    asked = [regrade(each.completed(), 1, "2", CAUSE, at=at(9), worker="w") for each in (one, two)]
    again = Attempt(task, index=0, reward=0.5).scored(revision=1)
    publish_events(tmp_path, task, *one.events(), *two.events(), two.verification_retry(), *asked, again)
    columns = "task_id, revision, wanted_version, reward_before, reward, waiting"
    found = answer(tmp_path, f"SELECT {columns} FROM regrades ORDER BY waiting")
    assert found == [("a", 1, "2", 0.0, 0.5, False), ("a", 1, "2", 1.0, None, True)]
