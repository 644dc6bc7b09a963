"""Whose records are kept for whom: what a follower makes of them, without a broker."""

from dataclasses import dataclass
from typing import Any

from rollstream.eventlog import following
from rollstream.eventlog.following import SessionFollower, _Partition
from rollstream.eventlog.ownership import Assignment
from rollstream.settings import Settings


@dataclass(frozen=True)
class Stored:
    """As much of a consumer's record as is looked at."""

    key: bytes | None
    value: bytes | None = b"body"
    offset: int = 0
    partition: int = 0
    headers: tuple[tuple[str, bytes], ...] = (("ce_id", b"o"),)


def follower(*owned: int) -> SessionFollower:
    made = SessionFollower(Settings())
    made._owned = {number: _Partition(None) for number in owned}
    return made


def test_what_came_before_a_session_was_delivered_is_handed_to_whoever_plays_it() -> None:
    here = follower(0)
    here._stepped(Stored(b"s", b"step"))
    here._observed(Stored(b"s", b"seen"))
    with here.inbox("s", 0) as inbox:
        assert (inbox.steps, inbox.peek("o")) == ([b"step"], b"seen")
        here._observed(Stored(b"s", b"later", offset=1, headers=(("ce_id", b"p"),)))
        assert inbox.peek("p") == b"later"
    assert here._unclaimed_bytes == 0


def test_a_session_that_is_over_keeps_nothing() -> None:
    here = follower(0)
    here._stepped(Stored(b"s", b"step"))
    here._completed(Stored(b"s"))
    here._stepped(Stored(b"s", b"more"))
    here._observed(Stored(b"s"))
    assert here.is_over("s")
    assert (here._unclaimed, here._unclaimed_bytes) == ({}, 0)


def test_records_of_partitions_that_others_own_and_records_without_a_key_are_nobodys() -> None:
    here = follower(0)
    for record in (Stored(b"s", partition=1), Stored(None), Stored(b"t", None), Stored(b"u", headers=())):
        here._observed(record)
    here._stepped(Stored(b"s", partition=1))
    assert not here._unclaimed


def test_what_is_kept_for_nobody_yet_is_bounded_and_the_oldest_goes_first(monkeypatch: Any) -> None:
    monkeypatch.setattr(following, "MAX_UNCLAIMED_BYTES", 1_000)
    here = follower(0)
    for number in range(20):
        here._stepped(Stored(b"s%d" % number, b"x" * 100))
        assert here._unclaimed_bytes <= 1_000
    assert list(here._unclaimed) == [f"s{number}" for number in range(10, 20)]


def test_sessions_that_are_over_are_remembered_up_to_a_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr(following, "MAX_COMPLETED", 3)
    here = follower(0)
    for number in range(5):
        here.over(f"s{number}")
    assert [here.is_over(f"s{number}") for number in range(5)] == [False, False, True, True, True]


def test_a_session_that_failed_is_over_only_as_long_as_its_partition_stays() -> None:
    """A failure is not settled here if the partition goes; when it comes back, the session may still be to be played."""
    here = follower(0, 1)
    here.failed("went", 0)
    here.failed("stayed", 1)
    here._completed(Stored(b"completed", partition=0))
    assert here.is_over("went")
    here.assigned(Assignment({1: None}, frozenset()))
    assert [here.is_over(session) for session in ("went", "stayed", "completed")] == [False, True, True]


def test_a_second_player_of_a_session_keeps_its_inbox_when_the_first_one_ends() -> None:
    here = follower(0)
    first = here.inbox("s", 0)
    first.__enter__()
    with here.inbox("s", 0) as second:
        first.__exit__(None, None, None)
        here._observed(Stored(b"s", b"seen"))
        assert second.peek("o") == b"seen"
