"""A run as the log has it, and what is to be done about its attempts: tables, without a log."""

from collections.abc import Iterable

import pytest

from rollstream.dead_letters import Letter, choose, concerned, replay_of
from rollstream.errors import UsageError
from rollstream.eventlog.groups import Consumption, Done
from rollstream.eventlog.reading import Record
from rollstream.ledger import Ledger, identifying
from rollstream.operations import batches, repair, resumption
from rollstream.settings import Defaults, Settings
from schemas.envelope import Event
from schemas.failure import DeadLettered
from schemas.rollout import RolloutScored
from schemas.task import Redrive, TaskSubmitted
from tests.events import START, Attempt, Log, task_submitted
from topics.catalogue import CATALOGUE

TASK = task_submitted(attempts=3)
NOBODY = Done({})
EVERYBODY = Done({Consumption(worker, topic): {0: (1_000, frozenset())} for topic in CATALOGUE for worker in topic.read_by})


def ledger(*events: Event, done: Done = EVERYBODY, more: Iterable[Record] = (), run: str = "run-1") -> Ledger:
    found = Ledger(run, done, identifying(Settings(defaults=Defaults(environment="math", run="run-1"))))
    for record in [*Log().records(*events), *more]:
        found.take(record)
    return found


def attempt(index: int = 0, **session: int) -> Attempt:
    return Attempt(TASK, index=index, **session)  # type: ignore[arg-type]


def again(task: TaskSubmitted, round_: int, *indices: int) -> Record:
    """The task's record, published once more for some of its attempts."""
    ours = Redrive(round=round_, indices=frozenset(indices)).headers()
    record = Log().record(task)
    return Record(record.topic, 0, 7, record.timestamp_ms, record.key, record.value, (*record.headers, *ours))


def test_every_attempt_of_every_group_is_known_from_its_task_or_from_its_sessions() -> None:
    for found in (ledger(TASK), ledger(attempt(1).ready())):
        assert [ids.group.index for ids in found.attempts()] == [0, 1, 2]
        assert {ids.session for ids in found.attempts()} == {attempt(index).session for index in range(3)}


def test_records_of_other_runs_and_records_that_say_nothing_are_ignored() -> None:
    garbage = [Record("sessions.ready", 0, 0, 0, None, b"x", ()), Record("tasks.in", 0, 9, 0, None, b"x", ())]
    lies = Log().raw("sessions.ready", b"x", headers=tuple(_without_uuid(attempt().ready().headers())))
    found = ledger(task_submitted(run="run-2"), Attempt(task_submitted(run="run-2")).scored(), more=[*garbage, lies])
    assert found.is_empty
    assert list(found.attempts()) == []


def _without_uuid(headers: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [(name, b"no uuid" if name == "group_id" else value) for name, value in headers]


def test_a_task_without_headers_is_identified_as_its_worker_would_do_it() -> None:
    bare = Log().raw("tasks.in", b'{"question": "1 + 1", "answer": "2", "attempts": 2}')
    found = ledger(more=[bare])
    (group,) = found.groups.values()
    assert (group.size, group.environment, group.position) == (2, "math", (0, 0))


def test_the_newest_session_counts_opened_or_only_planned() -> None:
    opened = ledger(attempt().ready(), attempt(try_=2).ready(), attempt(try_=1).ready())
    planned = ledger(attempt().ready(), attempt().retry())
    resumed = ledger(attempt(try_=3).ready(), attempt(try_=3).retry(next_round=1))
    task = ledger(TASK, more=[again(TASK, 2, 0)])
    newest = [next((ids.round, ids.try_) for ids in found.attempts()) for found in (opened, planned, resumed, task)]
    assert newest == [(0, 2), (0, 1), (1, 0), (2, 0)]
    assert [ids.round for ids in task.attempts()] == [2, 0, 0]


def test_an_attempt_is_under_way_while_a_record_that_carries_it_is_not_done() -> None:
    first = attempt(0)
    for events in ([TASK], [first.ready()], [first.completed()], [first.retry()], [first.verification_retry()]):
        late = ledger(*events, done=NOBODY)
        early = ledger(*events)
        ids = next(late.attempts())
        assert late.is_under_way(ids)
        assert not early.is_under_way(ids)
        assert (late.under_way, early.under_way) == (1, 0)


def test_done_beyond_the_committed_offset_is_done_too() -> None:
    topic = next(topic for topic in CATALOGUE if topic.name == "sessions.ready")
    done = Done({Consumption("agent_worker", topic): {2: (5, frozenset({7}))}})
    assert [done.has("agent_worker", topic, 2, offset) for offset in (4, 5, 6, 7, 8)] == [True, False, False, True, False]
    assert not done.has("agent_worker", topic, 1, 0)
    assert not done.has("verifier_worker", topic, 2, 0)


# Repair.


def test_only_what_is_lost_is_repaired_and_only_once_more() -> None:
    scored, lost, unseeded = attempt(0), attempt(1, try_=1), attempt(2)
    found = repair(ledger(TASK, scored.ready(), scored.scored(), lost.ready()))
    assert {rollout: session for rollout, (_, session) in found.wanted.items()} == {
        lost.rollout: (0, 2),
        unseeded.rollout: (0, 0),
    }
    assert found.under_way == 0


def test_what_a_worker_has_before_it_is_not_repaired() -> None:
    found = repair(ledger(TASK, attempt(0).scored(), done=NOBODY))
    assert (found.wanted, found.under_way) == ({}, 2)


# Resume.


def test_errored_attempts_are_resumed_in_the_round_after_the_one_that_counts() -> None:
    first, second = attempt(0, round_=1), attempt(1)
    found = resumption(ledger(TASK, first.ready(), first.failed(), second.scored()), ("errored",))
    assert {rollout: session for rollout, (_, session) in found.wanted.items()} == {first.rollout: (2, 0)}
    assert found.under_way == 0


def test_an_attempt_whose_new_round_has_not_ended_is_not_resumed_again() -> None:
    failed = attempt(0)
    for later in (failed.retry(next_round=1), attempt(0, round_=1).ready()):
        found = resumption(ledger(TASK, failed.ready(), failed.failed(), later), ("errored",))
        assert (found.wanted, found.under_way) == ({}, 1)


def test_cancelled_attempts_are_resumed_only_when_asked_for() -> None:
    cancelled = attempt(0)
    record = RolloutScored.of_cancellation(cancelled.ready(), START)
    found = ledger(TASK, record)
    assert resumption(found, ("errored",)).wanted == {}
    assert list(resumption(found, ("errored", "cancelled")).wanted) == [cancelled.rollout]


# Cancel.


def test_what_is_unfinished_is_what_has_no_record_in_its_newest_round() -> None:
    scored, failed, resumed = attempt(0), attempt(1), attempt(2)
    found = ledger(TASK, scored.scored(), failed.failed(), resumed.failed(), resumed.retry(next_round=1))
    (ids,) = found.unfinished()
    assert (ids.rollout, ids.round, ids.session) == (resumed.rollout, 1, attempt(2, round_=1).session)
    assert len(list(ledger(TASK).unfinished())) == 3


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (2, [2]), (3, [2, 1]), (4, [2, 2])])
def test_batches_hold_everything_once(count: int, sizes: list[int]) -> None:
    attempts = list(ledger(task_submitted(attempts=max(count, 1))).attempts())[:count]
    found = list(batches(iter(attempts), 2))
    assert [len(batch) for batch in found] == sizes
    assert [ids for batch in found for ids in batch] == attempts


# Dead letters.


def letter(topic: str = "sessions.ready", rollout: str | None = None, number: int = 0, settled: str | None = None) -> Letter:
    event = DeadLettered.of_record(
        boundary="w", reason="r", topic=topic, partition=0, offset=number, key=None, value=b"v", headers=[],
        recorded_at=START, run="run-1" if rollout else None, rollout=rollout,
    )  # fmt: skip
    return Letter(number, event, settled)


def test_a_letter_concerns_its_own_attempt_and_one_of_a_task_its_whole_group() -> None:
    found = ledger(TASK)
    own = attempt(1).rollout
    assert concerned(found, letter(rollout=own).event) == {own}
    assert len(concerned(found, letter("tasks.in", own).event)) == 3
    assert concerned(found, letter(rollout="unknown").event) == set()


def test_a_record_is_published_again_only_where_no_attempt_has_ended_with_it() -> None:
    ended, other = attempt(0), attempt(1)
    found = ledger(TASK, ended.failed())
    assert replay_of(None, letter().event).again is None
    assert replay_of(found, letter(rollout=other.rollout).event).again is None
    replay = replay_of(found, letter(rollout=ended.rollout).event).again
    assert replay is not None
    assert list(replay.wanted) == [ended.rollout]


def test_letters_are_chosen_by_number_by_run_or_all_that_wait() -> None:
    letters = [letter(number=3), letter(rollout="r", number=5), letter(number=6, settled="discarded")]
    assert choose(letters, [6, 3], None, everything=False) == [letters[2], letters[0]]
    assert choose(letters, [], "run-1", everything=False) == [letters[1]]
    assert choose(letters, [], None, everything=True) == letters[:2]
    with pytest.raises(UsageError, match="no dead letter has the number 4"):
        choose(letters, [4], None, everything=False)
    with pytest.raises(UsageError, match="expected numbers"):
        choose(letters, [], None, everything=False)
