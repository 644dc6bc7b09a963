"""Finished offsets in, committable offsets out."""

import random
from uuid import UUID

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.eventlog.commits import METADATA_LIMIT, Commit, Progress, as_of, decode_done, encode_done, tagged


@given(base=st.integers(0, 2**40), done=st.sets(st.integers(1, 30_000), max_size=400))
def test_finished_offsets_survive_the_metadata(base: int, done: set[int]) -> None:
    offsets = {base + step for step in done}
    assert decode_done(base, encode_done(base, offsets)) == offsets


def test_metadata_never_exceeds_the_brokers_limit_and_only_leaves_the_highest_out() -> None:
    rng = random.Random(7)
    done = {offset for offset in range(1, 200_000) if rng.random() < 0.5}
    text = encode_done(0, done)
    kept = decode_done(0, text)
    assert len(text) <= METADATA_LIMIT
    assert kept < done
    assert kept == {offset for offset in done if offset <= max(kept)}
    assert len(kept) > 10_000


def test_one_straggler_before_a_hundred_thousand_finished_records_fits() -> None:
    done = set(range(1, 100_001))
    assert decode_done(0, encode_done(0, done)) == done


@pytest.mark.parametrize(
    "metadata", [None, "", "somebody else's", "rs1", "rs1z!!!", "rs1rAA=A", "rs1zAAAA", "rs9rAQ==", "rs1z" + "A" * 4000]
)
def test_metadata_of_somebody_else_means_nothing_is_finished(metadata: str | None) -> None:
    assert decode_done(5, metadata) == set()


THIS, OTHER = UUID("973195c0-a010-4850-856a-c5e5a50373df"), UUID("0f0f0f0f-a010-4850-856a-c5e5a50373df")


@given(base=st.integers(0, 2**40), done=st.sets(st.integers(1, 30_000), max_size=400), beyond=st.integers(0, 10))
def test_a_commit_that_names_its_log_says_there_what_it_said_without_the_name(base: int, done: set[int], beyond: int) -> None:
    plain = Commit(base, encode_done(base, {base + step for step in done}))
    named = tagged(plain, THIS)
    assert as_of(named, THIS, base + beyond) == plain
    assert decode_done(base, named.metadata) == {base + step for step in done}
    assert len(named.metadata) <= METADATA_LIMIT


@pytest.mark.parametrize(
    ("commit", "topic_id", "end", "meant"),
    [
        (tagged(Commit(7, ""), THIS), THIS, 9, Commit(7, "")),
        (tagged(Commit(7, ""), THIS), OTHER, 9, Commit(0, "")),
        (tagged(Commit(7, ""), THIS), None, 9, Commit(7, "")),
        (Commit(7, ""), THIS, 9, Commit(7, "")),
        (Commit(7, "a note"), THIS, 9, Commit(7, "a note")),
        (Commit(7, "me@12345678"), THIS, 9, Commit(7, "me@12345678")),
        (Commit(7, "@"), THIS, 9, Commit(7, "@")),
        (Commit(7, encode_done(7, {8})), THIS, 5, Commit(5, "")),
        (Commit(-1, ""), THIS, 9, Commit(-1, "")),
    ],
    ids=[
        "its own",
        "another log",
        "no ids here",
        "no name",
        "somebody's note",
        "an address",
        "half a name",
        "beyond the end",
        "never committed",
    ],
)
def test_what_a_commit_means_in_the_log_as_it_is_now(commit: Commit, topic_id: UUID | None, end: int, meant: Commit) -> None:
    assert as_of(commit, topic_id, end) == meant


def test_the_mark_waits_for_the_lowest_running_record() -> None:
    progress = Progress(10)
    for offset in (10, 11, 12):
        assert progress.offer(offset)
    progress.complete(11)
    progress.complete(12)
    commit = progress.next_commit()
    assert commit is not None
    assert commit.offset == 10
    assert decode_done(10, commit.metadata) == {11, 12}
    progress.complete(10)
    assert progress.next_commit() == Commit(13, "")


def test_offsets_that_are_never_delivered_leave_no_hole() -> None:
    progress = Progress(0)
    for offset in (0, 7, 9):
        progress.offer(offset)
        progress.complete(offset)
    assert progress.next_commit() == Commit(10, "")


def test_a_restored_set_is_skipped_when_it_is_delivered_again() -> None:
    progress = Progress(10, {12})
    assert progress.offer(10)
    assert progress.offer(11)
    assert not progress.offer(12)
    progress.complete(10)
    progress.complete(11)
    assert progress.next_commit() == Commit(13, "")


def test_a_record_that_another_member_finished_is_dropped_here() -> None:
    progress = Progress(0)
    progress.offer(0)
    progress.offer(1)
    assert progress.merge(1, {3}) == {0}
    progress.complete(0)
    assert progress.running == {1}
    commit = progress.next_commit()
    assert commit is not None
    assert commit.offset == 1


def test_a_log_that_was_cut_is_gone_on_with_at_its_start_and_the_rest_is_named() -> None:
    progress = Progress(3, {5, 6, 9})
    assert progress.offer(3)
    assert progress.offer(4)
    assert progress.cut(5, 8) == [range(7, 8)]
    assert progress.position == 8
    progress.complete(4)
    held = progress.next_commit()
    assert held is not None
    assert (held.offset, decode_done(3, held.metadata)) == (3, {4, 5, 6, 9})
    progress.complete(3)
    assert progress.next_commit() == Commit(8, encode_done(8, {9}))


def test_a_log_that_was_cut_before_anything_was_read_of_it_is_committed_to_its_start() -> None:
    progress = Progress()
    assert progress.cut(0, 8) == [range(8)]
    assert progress.next_commit() == Commit(8, "")


def test_a_cut_below_what_was_read_changes_nothing() -> None:
    progress = Progress(3)
    assert progress.offer(3)
    assert progress.cut(4, 4) == []
    assert progress.next_commit() == Commit(3, "")


class Partition(RuleBasedStateMachine):
    """A partition with gaps, read by a worker that crashes, against the truth of what was completed."""

    def __init__(self) -> None:
        super().__init__()
        rng = random.Random(3)
        self.log = [offset for offset in range(400) if rng.random() > 0.2]
        self.completed: set[int] = set()
        self.start = 0
        self.gone: set[int] = set()
        self.committed = Commit(0, "")
        self.crash()

    def _fetch(self) -> int | None:
        position = self.progress.position or 0
        if position < self.start:  # out of range, says the broker
            told = {offset for offsets in self.progress.cut(position, self.start) for offset in offsets}
            assert told.isdisjoint(self.progress.running | self.completed_by_commit), "what runs or is done is not gone"
            self.gone |= told
            position = self.start
        return next((offset for offset in self.log if offset >= position), None)

    @rule(count=st.integers(1, 30))
    def fetch(self, count: int) -> None:
        for _ in range(count):
            offset = self._fetch()
            if offset is None:
                return
            finished = offset in self.completed_by_commit
            ran = self.progress.offer(offset)
            assert not (ran and finished), "a record known to be finished ran again"

    @precondition(lambda self: self.progress.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.progress.running)))
        self.completed.add(offset)
        self.progress.complete(offset)

    @rule()
    def commit(self) -> None:
        commit = self.progress.next_commit()
        if commit is not None:
            self.committed = commit

    @rule()
    def crash(self) -> None:
        self.completed_by_commit = decode_done(self.committed.offset, self.committed.metadata)
        self.progress = Progress(self.committed.offset, self.completed_by_commit)

    @rule(others=st.sets(st.integers(0, 399), max_size=40))
    def keep_through_a_rebalance_while_another_member_worked(self, others: set[int]) -> None:
        done = {offset for offset in others if offset in self.log and offset >= self.committed.offset}
        self.completed |= done
        self.progress.merge(self.committed.offset, done | decode_done(self.committed.offset, self.committed.metadata))

    @rule(start=st.integers(1, 399))
    def cut(self, start: int) -> None:
        self.start = max(self.start, start)

    @invariant()
    def nothing_unfinished_is_ever_committed(self) -> None:
        below = {offset for offset in self.log if offset < self.committed.offset} - self.gone
        beyond = decode_done(self.committed.offset, self.committed.metadata)
        assert below <= self.completed
        assert beyond <= self.completed


TestPartition = Partition.TestCase
