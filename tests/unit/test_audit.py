"""Which attempts have exactly one terminal record that counts."""

import dataclasses

from hypothesis import given, strategies as st

from rollstream.audit import Audit, Terminal, audit
from schemas.identities import rollout_id, session_id

GROUPS = {"5f5bd9b4-4b43-5b8c-9a37-3b6c1c0d8a11": 2, "5f5bd9b4-4b43-5b8c-9a37-3b6c1c0d8a12": 1}
FIRST, SECOND = GROUPS


def terminal(
    group: str, index: int, offset: int, *, try_: int = 0, session: str = "", status: str = "completed", round_: int = 0
) -> Terminal:
    rollout = rollout_id(group, index)
    session = session or session_id(rollout, round_, try_)
    return Terminal(rollout, group, f"of {session}", session, round_, try_, 0, status, 0, offset)


def healthy() -> list[Terminal]:
    return [terminal(FIRST, 0, 0), terminal(FIRST, 1, 1, status="errored"), terminal(SECOND, 0, 2)]


def test_a_healthy_run_is_clean_and_counted_by_status() -> None:
    result = audit(GROUPS, healthy(), expected_groups=2)
    assert result.is_clean
    assert result.attempts == 3
    assert result.counting == {"completed": 2, "errored": 1}


def test_repeated_records_are_counted_and_harmless() -> None:
    result = audit(GROUPS, [*healthy(), terminal(FIRST, 0, 7), terminal(FIRST, 0, 8)])
    assert result.is_clean
    assert result.repeated == 2


def test_an_attempt_without_a_record_is_missing() -> None:
    result = audit(GROUPS, healthy()[:-1])
    assert [attempt.group for attempt in result.missing] == [SECOND]
    assert not result.is_clean


def test_a_session_that_the_ids_do_not_lead_to_makes_an_attempt_double() -> None:
    result = audit(GROUPS, [*healthy(), terminal(FIRST, 0, 9, session="another", status="errored")])
    assert list(result.double) == [rollout_id(FIRST, 0)]
    assert not result.is_clean


def test_two_records_of_one_session_are_double() -> None:
    forged = dataclasses.replace(terminal(FIRST, 0, 9), event_id="another")
    result = audit(GROUPS, [*healthy(), forged])
    assert list(result.double) == [rollout_id(FIRST, 0)]


def test_of_two_tries_that_both_ended_the_first_counts_and_the_run_is_clean() -> None:
    result = audit(GROUPS, [*healthy(), terminal(FIRST, 0, 9, try_=1, status="errored")])
    assert list(result.overtaken) == [rollout_id(FIRST, 0)]
    assert result.counting == {"completed": 2, "errored": 1}
    assert result.is_clean


def test_a_later_round_replaces_an_earlier_one_and_is_not_double() -> None:
    result = audit(GROUPS, [*healthy(), terminal(FIRST, 1, 9, round_=1)])
    assert result.is_clean
    assert result.counting == {"completed": 3}


def test_groups_that_the_manifest_promised_and_nobody_published_are_missing() -> None:
    result = audit(GROUPS, healthy(), expected_groups=5)
    assert result.missing_groups == 3
    assert not result.is_clean


def test_records_of_nobodys_attempts_are_strays() -> None:
    result = audit(GROUPS, [*healthy(), terminal("5f5bd9b4-4b43-5b8c-9a37-3b6c1c0d8a13", 0, 5)])
    assert len(result.strays) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from([(FIRST, 0), (FIRST, 1), (SECOND, 0)]), st.integers(0, 3), st.integers(0, 1)), max_size=40
    )
)
def test_every_attempt_is_either_counted_once_or_missing(drawn: list[tuple[tuple[str, int], int, int]]) -> None:
    records = [
        terminal(group, index, offset, try_=try_, round_=round_) for offset, ((group, index), round_, try_) in enumerate(drawn)
    ]
    result: Audit = audit(GROUPS, records)
    assert sum(result.counting.values()) + len(result.missing) == result.attempts
    assert result.double == {}
    assert not result.overtaken.keys() & {attempt.rollout_id for attempt in result.missing}
