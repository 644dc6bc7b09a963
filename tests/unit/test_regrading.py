"""Which attempts are verified once more, in which revision, and what becomes of those that fail: tables, without a log."""

from collections.abc import Sequence

import pytest

from rollstream.errors import EnvironmentFailure
from rollstream.eventlog.failures import Boundary, Settler
from rollstream.eventlog.groups import Consumption, Done
from rollstream.eventlog.retries import Backoff, RetryPolicy, regrade, schedule
from rollstream.ledger import Ledger
from rollstream.regrading import CAUSE, Graded, Regrade, plan_regrade
from schemas.envelope import Event
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored, terminal_event_id
from tests.events import Attempt, Log, at, task_submitted
from topics.catalogue import CATALOGUE, ROLLOUTS_SCORED

TASK = task_submitted(attempts=2)
ONE, TWO = Attempt(TASK, index=0), Attempt(TASK, index=1)
NOBODY = Done({})
EVERYBODY = Done({Consumption(worker, topic): {0: (1_000, frozenset())} for topic in CATALOGUE for worker in topic.read_by})


def asked(attempt: Attempt, revision: int = 1, version: str = "2") -> RetryScheduled:
    return regrade(attempt.completed(), revision, version, CAUSE, at=at(10), worker="rollstream-cli")


def graded_by(attempt: Attempt, version: str, revision: int = 0) -> RolloutScored:
    record = attempt.scored(revision)
    return record.model_copy(update={"versions": record.versions.model_copy(update={"environment": version})})


def plan(
    *events: Event, done: Done = EVERYBODY, force: bool = False, only: Sequence[str] | None = None, version: str = "2"
) -> Regrade:
    records = Log().records(TASK, *events)
    ledger = Ledger("run-1", done)
    for record in records:
        if record.topic != "verdicts":
            ledger.take(record)
    graded = [one for record in records if record.topic == ROLLOUTS_SCORED.name and (one := Graded.of(record, "run-1"))]
    return plan_regrade(ledger, graded, ledger.episodes, {"math": version}, only=only, force=force)


def revisions(found: Regrade) -> dict[str, int]:
    return {session: one.revision for session, one in found.wanted.items()}


def test_attempts_that_another_version_graded_are_verified_again_in_the_next_revision() -> None:
    found = plan(ONE.completed(), ONE.scored(), TWO.completed(), graded_by(TWO, "2"))
    assert revisions(found) == {ONE.session: 1}
    assert (found.wanted[ONE.session].version, found.current) == ("2", 1)


def test_those_of_the_wanted_version_are_left_alone_unless_they_are_forced() -> None:
    events = (ONE.completed(), graded_by(ONE, "2", revision=3), TWO.completed(), graded_by(TWO, "2"))
    assert plan(*events).wanted == {}
    assert revisions(plan(*events, force=True)) == {ONE.session: 4, TWO.session: 1}


def test_what_was_asked_for_and_is_still_before_a_worker_is_not_asked_for_again() -> None:
    events = (ONE.completed(), ONE.scored(), asked(ONE))
    for force in (False, True):
        found = plan(*events, done=NOBODY, force=force)
        assert (found.wanted, list(found.under_way)) == ({}, [ONE.session])
        assert found.under_way[ONE.session].revision == 1


def test_what_was_asked_for_and_got_lost_is_asked_for_again_in_the_same_revision() -> None:
    assert revisions(plan(ONE.completed(), ONE.scored(), asked(ONE))) == {ONE.session: 1}
    assert asked(ONE).event_id == asked(ONE).event_id


def test_an_attempt_whose_verification_failed_gets_another_chance() -> None:
    failed = RolloutScored.of_failure(ONE.completed(), CAUSE, caused_at=at(5))
    found = plan(ONE.completed(), failed)
    assert revisions(found) == {ONE.session: 1}
    assert found.wanted[ONE.session].before.reward is None


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([ONE.ready(), ONE.failed()], {"without_episode": 1, "not_ended": 1}),
        ([ONE.completed()], {"not_ended": 2}),
        ([ONE.completed(), RolloutScored.of_cancellation(ONE.completed(), at(5))], {"cancelled": 1, "not_ended": 1}),
        ([ONE.completed(), ONE.scored(), Attempt(TASK, round_=1).ready()], {"not_ended": 2}),
    ],
)
def test_what_cannot_be_verified_again_is_counted_by_reason(events: list[Event], left: dict[str, int]) -> None:
    found = plan(*events)
    counts = {name: getattr(found, name) for name in ("not_ended", "cancelled", "without_episode")}
    assert {name: count for name, count in counts.items() if count} == left
    assert found.wanted == {}


def test_only_the_newest_round_is_verified_again() -> None:
    newer = Attempt(TASK, round_=1)
    found = plan(ONE.completed(), ONE.scored(), newer.ready(), newer.completed(), newer.scored())
    assert revisions(found) == {newer.session: 1}


def test_attempts_can_be_chosen_and_other_environments_are_left_out() -> None:
    events = (ONE.completed(), ONE.scored(), TWO.completed(), TWO.scored())
    assert list(plan(*events, only=[TWO.rollout]).wanted) == [TWO.session]
    assert plan_regrade(Ledger("run-1", NOBODY), [], [], {}).wanted == {}


def test_a_record_that_cannot_be_read_is_known_by_its_headers() -> None:
    record = Log().raw("rollouts.scored", b"garbage", headers=tuple(graded_by(ONE, "2", revision=1).headers()))
    found = Graded.of(record, "run-1")
    assert found is not None
    assert (found.rollout_id, found.revision, found.status, found.version) == (ONE.rollout, 1, "completed", None)
    assert Graded.of(record, "another run") is None


# What is asked for, and what becomes of it.


def test_asking_for_a_revision_is_another_event_than_the_retry_of_a_verification() -> None:
    first, second, other = asked(ONE), asked(ONE, 2), ONE.verification_retry()
    assert len({first.event_id, second.event_id, other.event_id}) == 3
    assert (first.stage, first.failures, first.not_before) == ("verification", 0, at(10))
    assert dict(first.headers())["revision"] == b"1"


def test_a_retry_of_a_regrade_keeps_its_revision_and_its_version() -> None:
    again = schedule(asked(ONE), CAUSE, failures=1, delay_s=2.0, at=at(11), worker="verifier_worker@host:1")
    assert (again.revision, again.environment_version, again.failures, again.episode) == (1, "2", 1, ONE.completed())
    assert again.event_id != asked(ONE).event_id


@pytest.mark.parametrize("garbage", [False, True])
def test_a_regrade_that_fails_for_good_ends_in_its_own_revision(garbage: bool) -> None:
    settler = Settler(Boundary("verifier_worker", "verification"), RetryPolicy(default=Backoff(attempts=1)), 0)
    event = asked(ONE, revision=3)
    headers = tuple(event.headers())
    record = Log().raw("rollouts.retries", b"garbage" if garbage else event.to_json(), key=event.key(), headers=headers)
    failure = EnvironmentFailure("the grader cannot be reached", stage="verification")
    (*_, scored) = settler.settle(record, failure, (RetryScheduled,), at(12))
    assert isinstance(scored, RolloutScored)
    assert (scored.status, scored.reward, scored.revision, scored.session) == ("errored", None, 3, ONE.session)
    assert scored.event_id == terminal_event_id(ONE.session, 3)
