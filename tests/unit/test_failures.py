"""Whatever goes wrong with a record, it is settled: who waits for an attempt gets its terminal record, and no zero."""

from itertools import count

import orjson
import pytest
from hypothesis import given, strategies as st

from rollstream.errors import (
    BoundaryFailure,
    CircuitOpen,
    EnvironmentFailure,
    EpisodeTimeout,
    ModelFailure,
    Poison,
    Refused,
)
from rollstream.eventlog.failures import MAX_MESSAGE, Boundary, Settler, TaskFailure, error_info
from rollstream.eventlog.reading import Record
from rollstream.eventlog.retries import Backoff, RetryPolicy
from schemas.envelope import Event, header_map
from schemas.episode import EpisodeCompleted
from schemas.events import EVENTS, UndecodableEvent, decode
from schemas.failure import MAX_ORIGINAL_BYTES, DeadLettered
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.session import SessionReady
from schemas.task import TaskSubmitted
from tests.events import CANARY, START, Attempt, Log, at, task_submitted

NO_RETRIES = RetryPolicy(default=Backoff(attempts=1))
THREE_TRIES = RetryPolicy(default=Backoff(attempts=3, first_s=10, factor=2, most_s=100))
AGENT = Boundary("agent_worker", "agent")
ENV = Boundary("env_worker", "seed")
VERIFIER = Boundary("verifier_worker", "verification")
READS: dict[Boundary, tuple[type[Event], ...]] = {AGENT: (SessionReady,), ENV: (TaskSubmitted,), VERIFIER: (EpisodeCompleted,)}
SMALLEST_RECORD = 1024 * 1024
"""What any broker takes by default."""
OFFSETS = count()


def settle(record: Record, error: Exception, boundary: Boundary) -> list[Event]:
    """How a worker settles its first failure, when nothing is ever tried again."""
    return Settler(boundary, NO_RETRIES, 0).settle(record, error, READS[boundary], at(10))


def ready() -> Record:
    return Log().record(Attempt().ready())


def garbage(value: bytes | None = b"\xff\x00 garbage", attempt: Attempt | None = None) -> Record:
    """A record whose body is useless; its headers are those of a session if there is an `attempt`."""
    headers = tuple(attempt.ready().headers()) if attempt else ()
    return Log().raw("sessions.ready", value, key=b"k", headers=headers)


def undecodable() -> UndecodableEvent:
    return UndecodableEvent("expected SessionReady as JSON, found 10 bytes that are not")


def bug() -> Exception:
    """An exception with a traceback, as a handler would raise it."""
    try:
        raise KeyError("missing")
    except KeyError as error:
        return error


def only(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if type(event) is kind]


@pytest.mark.parametrize(
    "error",
    [
        ModelFailure("503", kind="model_unavailable", retryable=True),
        ModelFailure("401", kind="model_unauthorized", retryable=False),
        EpisodeTimeout("too long", stage="agent"),
        Refused("cannot be"),
        EnvironmentFailure("broken", stage="verification"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_boundary_failure_ends_the_attempt_as_errored_and_masked_with_no_reward(error: BoundaryFailure) -> None:
    attempt = Attempt()
    (scored,) = settle(Log().record(attempt.ready()), error, AGENT)
    assert isinstance(scored, RolloutScored)
    assert (scored.status, scored.reward, scored.success) == ("errored", None, None)
    assert (scored.mask.loss, scored.mask.baseline, scored.mask.reason) == (True, True, error.kind)
    assert scored.error is not None
    assert (scored.error.kind, scored.error.stage, scored.error.retryable) == (error.kind, error.stage, error.retryable)
    assert scored.error.message == str(error)
    assert (scored.session, scored.rollout, scored.task) == (attempt.session, attempt.rollout, attempt.task.task)
    assert (scored.group.size, scored.group.index) == (1, 0)


def test_a_bug_is_dead_lettered_with_its_traceback_and_still_ends_the_attempt() -> None:
    record = ready()
    letter, scored = settle(record, bug(), AGENT)
    assert isinstance(letter, DeadLettered)
    assert isinstance(scored, RolloutScored)
    assert letter.reason == "KeyError: 'missing'"
    assert letter.traceback is not None
    assert "in bug" in letter.traceback
    assert (letter.topic, letter.partition, letter.offset) == ("sessions.ready", 0, 0)
    assert scored.error is not None
    assert (scored.error.kind, scored.error.retryable) == ("internal_error", False)


def test_poison_with_readable_headers_ends_its_attempt_from_them() -> None:
    attempt = Attempt()
    letter, scored = settle(garbage(attempt=attempt), undecodable(), AGENT)
    assert isinstance(letter, DeadLettered)
    assert isinstance(scored, RolloutScored)
    assert (letter.traceback, letter.run, letter.rollout) == (None, attempt.task.run, attempt.rollout)
    assert (scored.session, scored.key(), scored.task) == (attempt.session, attempt.task.group.encode(), None)
    assert scored.error is not None
    assert scored.error.kind == "undecodable"


def test_poison_that_names_no_session_is_dead_lettered_alone() -> None:
    (letter,) = settle(garbage(), undecodable(), AGENT)
    assert isinstance(letter, DeadLettered)
    assert (letter.run, letter.rollout) == (None, None)


def test_a_dead_letter_holds_the_record_as_it_was() -> None:
    record = Log().raw("tasks.in", b"\x00\xff", key=b"\xfe", headers=(("a", b"\x80"), ("a", b"2"), ("\ud800", b"")))
    (letter,) = settle(record, Poison("no task"), ENV)
    again = decode(letter.to_json(), DeadLettered)
    assert again.original_bytes() == b"\x00\xff"
    assert again.key() == b"\xfe"
    assert [name for name, _ in again.original_headers] == ["a", "a", "\\ud800"]


def test_the_terminal_record_of_one_session_is_one_record_however_often_it_fails() -> None:
    record = ready()
    first = only(settle(record, bug(), AGENT), RolloutScored)[0]
    second = only(settle(record, Refused("no"), AGENT), RolloutScored)[0]
    assert first.event_id == second.event_id


def test_a_dead_letter_of_the_same_record_and_worker_has_the_same_id() -> None:
    record = garbage()
    ids = {settle(record, undecodable(), boundary)[0].event_id for boundary in (AGENT, AGENT, VERIFIER)}
    assert len(ids) == 2


def test_a_task_that_fails_ends_every_one_of_its_attempts_with_the_cause() -> None:
    task = task_submitted(attempts=3)
    failure = TaskFailure(task.sessions())
    failure.__cause__ = Refused("no such environment", kind="unknown_environment")
    scored = settle(Log().record(task), failure, ENV)
    assert [type(event) for event in scored] == [RolloutScored] * 3
    records = [event for event in scored if isinstance(event, RolloutScored)]
    assert [record.group.index for record in records] == [0, 1, 2]
    assert {record.session for record in records} == {Attempt(task, index=index).session for index in range(3)}
    assert {record.error.kind for record in records if record.error} == {"unknown_environment"}


def test_a_task_that_nobody_can_attribute_is_dead_lettered_with_the_sentence() -> None:
    failure = TaskFailure([])
    failure.__cause__ = Poison("expected a task, found a list")
    (letter,) = settle(Log().raw("tasks.in", b"[]"), failure, ENV)
    assert isinstance(letter, DeadLettered)
    assert letter.reason == "expected a task, found a list"


def test_a_record_of_no_attempt_never_fails_in_silence_whatever_failed() -> None:
    (letter,) = settle(Log().raw("tasks.in", b"{}"), EnvironmentFailure("the worker could not", stage="seed"), ENV)
    assert isinstance(letter, DeadLettered)
    assert "the worker could not" in letter.reason


def test_grading_data_is_in_no_terminal_record() -> None:
    task = task_submitted()
    failure = TaskFailure(task.sessions())
    failure.__cause__ = bug()
    for event in only(settle(Log().record(task), failure, ENV), RolloutScored):
        assert CANARY.encode() not in event.to_json()


def test_an_event_of_the_wrong_kind_still_ends_the_attempt_that_its_headers_name() -> None:
    attempt = Attempt()
    record = Log().raw("sessions.ready", attempt.verdict().to_json(), headers=tuple(attempt.verdict().headers()))
    _, scored = settle(record, undecodable(), AGENT)
    assert isinstance(scored, RolloutScored)
    assert scored.session == attempt.session


HUGE = "\u00e9" * 3_000_000


@pytest.mark.parametrize(
    "error", [Poison(HUGE), ModelFailure(HUGE, kind="k", retryable=True), ValueError(HUGE)], ids=["poison", "boundary", "bug"]
)
def test_what_settles_a_record_always_fits_a_record_itself(error: Exception) -> None:
    headers = (*Attempt().ready().headers(), ("big", b"x" * 3_000_000))
    record = Log().raw("sessions.ready", b"\xff" * 16_000_000, key=b"k" * 1_000_000, headers=headers)
    events = settle(record, error, AGENT)
    assert events
    for event in events:
        size = len(event.to_json()) + len(event.key()) + sum(len(name) + len(value) for name, value in event.headers())
        assert size < SMALLEST_RECORD


def test_a_value_too_large_for_a_dead_letter_stays_in_the_log_and_the_letter_says_so() -> None:
    small, large = (
        settle(garbage(b"x" * size), undecodable(), AGENT)[0] for size in (MAX_ORIGINAL_BYTES, MAX_ORIGINAL_BYTES + 1)
    )
    assert isinstance(small, DeadLettered)
    assert isinstance(large, DeadLettered)
    assert (small.original_bytes(), small.omitted_bytes) == (b"x" * MAX_ORIGINAL_BYTES, None)
    assert (large.original_bytes(), large.omitted_bytes) == (None, MAX_ORIGINAL_BYTES + 1)


@pytest.mark.parametrize("timestamp_ms", [-1, 0, 1_700_000_000_000_000, 2**63 - 1, -(2**63)])
def test_a_record_out_of_all_time_is_settled_too(timestamp_ms: int) -> None:
    record = Record("sessions.ready", 0, 0, timestamp_ms, None, b"garbage", ())
    (letter,) = settle(record, undecodable(), AGENT)
    assert decode(letter.to_json(), DeadLettered).caused_at.year >= 1970


def test_a_message_that_no_json_can_carry_is_spelled_out() -> None:
    assert error_info(ValueError("half \ud800"), "agent").message == "ValueError: half \\ud800"
    assert len(error_info(Refused("x" * 10_000), "agent").message) == MAX_MESSAGE


HEADER_NAMES = [name for name, _ in Attempt().ready().headers()]
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(HEADER_NAMES) | st.text(max_size=5), st.binary(max_size=40) | st.integers().map(lambda i: b"%d" % i)
    )
)


@given(value=st.none() | st.binary() | st.sampled_from([e.to_json() for e in Attempt().events()]), headers=HEADERS)
def test_no_record_whatever_it_holds_can_break_its_settling(value: bytes | None, headers: list[tuple[str, bytes]]) -> None:
    record = Record("sessions.ready", 0, next(OFFSETS), round(START.timestamp() * 1000), None, value, tuple(headers))
    for error in (undecodable(), bug(), Refused("no")):
        for event in settle(record, error, AGENT):
            assert decode(event.to_json(), EVENTS[event.kind]) == event
            orjson.loads(event.to_json())
            assert header_map(event.headers())["ce_id"] == event.event_id


# Tried again, or not.


AWAY = ModelFailure("the model server answered 503", kind="model_unavailable", retryable=True)


def settler(boundary: Boundary = AGENT, budget: int = 100) -> Settler:
    return Settler(boundary, THREE_TRIES, budget)


def retried(event: Event, error: Exception = AWAY, by: Settler | None = None, expected: type[Event] = SessionReady) -> Event:
    """The one event that settles a failure of `event`."""
    (settled,) = (by or settler()).settle(Log().record(event), error, (expected,), at(10))
    return settled


def test_a_failure_that_a_retry_can_help_is_scheduled_and_nothing_ends() -> None:
    attempt = Attempt()
    retry = retried(attempt.ready())
    assert isinstance(retry, RetryScheduled)
    assert (retry.stage, retry.failures, retry.next_round, retry.next_try) == ("agent", 1, 0, 1)
    assert (retry.session, retry.ticket) == (attempt.session, attempt.ready().ticket)
    assert (retry.cause.kind, retry.cause.retryable) == ("model_unavailable", True)
    assert at(15) <= retry.not_before <= at(25)
    assert (retry.episode, retry.key()) == (None, attempt.rollout.encode())


def test_each_try_counts_the_failures_before_it_until_the_last_one_is_final() -> None:
    second = retried(Attempt(try_=1).ready().model_copy(update={"failures": 1}))
    last = retried(Attempt(try_=2).ready().model_copy(update={"failures": 2}))
    assert isinstance(second, RetryScheduled)
    assert (second.failures, second.next_try) == (2, 2)
    assert isinstance(last, RolloutScored)
    assert (last.status, last.try_, last.reward) == ("errored", 2, None)


def test_a_resumed_attempt_is_retried_within_its_own_round() -> None:
    retry = retried(Attempt(round_=2).ready())
    assert isinstance(retry, RetryScheduled)
    assert (retry.next_round, retry.next_try) == (2, 1)


def test_a_failed_verification_is_repeated_with_the_episode_that_there_is() -> None:
    attempt = Attempt(try_=1)
    failure = EnvironmentFailure("grader died", stage="verification", retryable=True)
    retry = retried(attempt.completed(), failure, settler(VERIFIER), EpisodeCompleted)
    assert isinstance(retry, RetryScheduled)
    assert (retry.stage, retry.next_try, retry.failures) == ("verification", 1, 1)
    assert retry.episode == attempt.completed()


def test_a_retry_that_fails_again_stays_what_it_was_and_counts_on() -> None:
    attempt = Attempt()
    first = retried(attempt.ready())
    again = retried(first, by=settler(ENV), expected=RetryScheduled)
    assert isinstance(first, RetryScheduled)
    assert isinstance(again, RetryScheduled)
    assert (again.stage, again.next_try, again.failures) == ("agent", 1, 2)
    assert again.event_id != first.event_id


def test_the_same_failure_settled_twice_is_one_retry() -> None:
    first, second = retried(Attempt().ready()), retried(Attempt().ready())
    assert first.event_id == second.event_id


def test_a_run_that_has_spent_its_budget_of_retries_fails_for_good_and_no_other_does() -> None:
    thrifty = settler(budget=2)
    other = Attempt(task_submitted(run="run-2"))
    kinds = [type(retried(Attempt(try_=number).ready(), by=thrifty)) for number in range(4)]
    assert kinds == [RetryScheduled, RetryScheduled, RolloutScored, RolloutScored]
    assert isinstance(retried(other.ready(), by=thrifty), RetryScheduled)


def test_a_call_that_was_not_made_uses_up_no_attempt_and_no_budget() -> None:
    thrifty = settler(budget=0)
    exhausted = Attempt(try_=9).ready().model_copy(update={"failures": 2})
    retry = retried(exhausted, CircuitOpen("nobody asks it for a while", retry_after_s=7.0), thrifty)
    assert isinstance(retry, RetryScheduled)
    assert (retry.failures, retry.next_try, retry.not_before) == (2, 10, at(17))


def test_a_server_that_says_how_long_to_wait_is_given_that_time() -> None:
    patient = ModelFailure("429", kind="model_rate_limited", retryable=True)
    patient.retry_after_s = 90.0
    retry = retried(Attempt().ready(), patient)
    assert isinstance(retry, RetryScheduled)
    assert retry.not_before == at(100)


def test_a_task_that_failed_is_not_retried_even_if_its_cause_could_be() -> None:
    task = task_submitted(attempts=2)
    failure = TaskFailure(task.sessions())
    failure.__cause__ = EnvironmentFailure("away", stage="seed", retryable=True)
    events = settler(ENV).settle(Log().record(task), failure, (TaskSubmitted,), at(10))
    assert [type(event) for event in events] == [RolloutScored] * 2


def test_poison_and_bugs_are_never_retried() -> None:
    for error in (undecodable(), bug()):
        events = settler().settle(ready(), error, (SessionReady,), at(10))
        assert [type(event) for event in events] == [DeadLettered, RolloutScored]


def test_a_record_of_a_retry_that_cannot_be_read_ends_its_attempt_from_the_headers() -> None:
    retry = retried(Attempt().ready())
    record = Log().raw("rollouts.retries", b"garbage", headers=tuple(retry.headers()))
    events = settler(ENV).settle(record, undecodable(), (RetryScheduled,), at(10))
    assert [type(event) for event in events] == [DeadLettered, RolloutScored]
