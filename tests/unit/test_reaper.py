"""Which boxes are reaped: only one's own, when their lease has run out or their session was taken over."""

import asyncio
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import ClassVar

import pytest
from hypothesis import given, strategies as st

from rollstream.errors import SandboxUnavailable
from rollstream.sandboxes.protocol import Enforces, FoundSandbox, SandboxTag
from rollstream.sandboxes.reaper import LeaseBook, Reaper, survey
from rollstream.sandboxes.tags import from_labels, labels
from schemas.envelope import Event, now
from schemas.sandbox import SandboxHolder, SandboxReleased
from tests.events import START, at, sandbox_leased

HOLDERS = st.builds(
    SandboxHolder,
    worker=st.just("w"),
    session=st.sampled_from([None, "s", "t"]),
    consumer_group=st.sampled_from([None, "agents", "verifiers"]),
    fence=st.sampled_from([None, 1, 2, 3]),
)
TAGS = st.builds(
    SandboxTag,
    installation=st.sampled_from(["ours", "theirs"]),
    host=st.sampled_from(["here", "there"]),
    holder=HOLDERS,
    expires_at=st.sampled_from([at(-10), at(10)]),
)


def box(name: str = "box-1", **changes: object) -> FoundSandbox:
    fields = {"installation": "cluster/", "host": "here", "holder": sandbox_leased().holder, "expires_at": at(60), **changes}
    return FoundSandbox(name, SandboxTag(**fields), START)  # type: ignore[arg-type]


def reaped(*boxes: FoundSandbox, events: Iterable[Event] = (), when: float = 0.0, force: bool = False) -> dict[str, str]:
    judged = survey(boxes, LeaseBook(events), installation="cluster/", host="here", at=at(when), force=force)
    return {one.box.id: one.reap for one in judged if one.reap}


def test_a_held_box_stays_and_an_expired_one_goes() -> None:
    assert reaped(box(), when=59) == {}
    assert reaped(box(), when=60) == {"box-1": "expired"}


def test_a_renewal_in_the_log_counts_and_not_the_label_alone() -> None:
    renewed = sandbox_leased().renewed(60, at(50))
    assert reaped(box(), events=[renewed, sandbox_leased()], when=100) == {}
    assert reaped(box(), events=[renewed, sandbox_leased()], when=110) == {"box-1": "expired"}


def test_a_renewal_never_shortens_a_lease() -> None:
    assert sandbox_leased(lease_s=600).renewed(5, at(1)).expires_at == at(600)


def test_a_session_that_was_taken_over_leaves_its_lower_fence() -> None:
    newer = sandbox_leased("box-2", fence=2)
    assert reaped(box(), events=[newer]) == {"box-1": "fenced"}
    assert reaped(box(), box("box-2", holder=newer.holder)) == {"box-1": "fenced"}
    assert reaped(box(), events=[sandbox_leased("box-2", session="session-2", fence=2)]) == {}


def test_fences_of_different_groups_do_not_compare() -> None:
    verifier = sandbox_leased("box-2", fence=9)
    verifier = verifier.model_copy(update={"holder": verifier.holder.model_copy(update={"consumer_group": "verifier_worker"})})
    assert reaped(box(), events=[verifier]) == {}


def test_force_takes_all_of_ones_own() -> None:
    assert reaped(box(), box("other", installation="elsewhere/"), force=True) == {"box-1": "forced"}


@given(st.lists(TAGS, max_size=8), st.booleans())
def test_only_ones_own_are_ever_reaped(tags: list[SandboxTag], force: bool) -> None:
    boxes = [FoundSandbox(str(number), tag, START) for number, tag in enumerate(tags)]
    judged = survey(boxes, LeaseBook(), installation="ours", host="here", at=START, force=force)
    assert [one.box for one in judged] == boxes
    for one in judged:
        own = one.box.tag.installation == "ours" and one.box.tag.host == "here"
        assert one.own == own
        assert own or one.reap is None
        if own and one.reap is None:
            assert one.box.tag.expires_at > START
            assert not force


@given(TAGS)
def test_a_tag_survives_its_labels(tag: SandboxTag) -> None:
    assert from_labels(labels("id", tag)) == tag


@given(st.dictionaries(st.sampled_from(sorted(labels("id", box().tag))), st.sampled_from(["", "x", "-1", "2026-01-01"])))
def test_what_carries_garbage_as_labels_is_nobodys(garbage: dict[str, str]) -> None:
    tag = from_labels(garbage)
    assert tag is None or (tag.installation == garbage["rollstream.sandbox.installation"])


class FakeProvider:
    """Boxes in a set; those in `stuck` cannot be removed."""

    name: ClassVar[str] = "fake"

    def __init__(self, boxes: list[FoundSandbox], stuck: frozenset[str] = frozenset()) -> None:
        self.boxes = boxes
        self.stuck = stuck

    async def enforces(self) -> Enforces:
        return Enforces()

    async def host(self) -> str:
        return "here"

    def create(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        raise AssertionError("a reaper makes no boxes")

    async def found(self) -> list[FoundSandbox]:
        return list(self.boxes)

    async def destroy(self, sandbox_id: str) -> None:
        if sandbox_id in self.stuck:
            raise SandboxUnavailable("stuck", stage="cleanup")
        self.boxes = [one for one in self.boxes if one.id != sandbox_id]

    async def close(self) -> None:
        pass


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    async def publish(self, events: Iterable[Event]) -> None:
        self.events += events


async def test_the_log_is_asked_from_the_oldest_of_ones_own_on_and_not_at_all_without_one() -> None:
    asked: list[datetime] = []

    async def read(since: datetime) -> list[Event]:
        asked.append(since)
        return []

    await Reaper(FakeProvider([box(installation="theirs")]), read, Sink(), "cluster/", "w").reap()
    assert asked == []
    await Reaper(FakeProvider([box(expires_at=now() + timedelta(days=1))]), read, Sink(), "cluster/", "w").reap()
    assert asked == [START - timedelta(minutes=5)]


async def test_one_that_cannot_be_removed_does_not_keep_the_others() -> None:
    async def read(since: datetime) -> list[Event]:
        return []

    provider, sink = FakeProvider([box("a"), box("b"), box("c")], stuck=frozenset({"b"})), Sink()
    with pytest.raises(SandboxUnavailable, match="stuck"):
        await Reaper(provider, read, sink, "cluster/", "w").reap()
    assert [one.id for one in provider.boxes] == ["b"]
    assert [event.sandbox for event in sink.events if isinstance(event, SandboxReleased)] == ["a", "c"]


async def test_a_session_that_is_taken_over_is_rid_of_its_lower_fences_at_once_and_nobody_else_is() -> None:
    async def read(since: datetime) -> list[Event]:
        raise AssertionError("the log is not asked for what the boxes themselves say")

    def held(session: str, fence: int, group: str = "agent_worker") -> dict[str, object]:
        return {"holder": SandboxHolder(worker="w", run="r", session=session, consumer_group=group, fence=fence)}

    provider = FakeProvider(
        [
            box("lower", **held("s", 1)),
            box("same", **held("s", 2)),
            box("higher", **held("s", 3)),
            box("another session's", **held("t", 1)),
            box("another group's", **held("s", 1, "verifier_worker")),
            box("another installation's", installation="theirs", **held("s", 1)),
            box("another host's", host="there", **held("s", 1)),
        ]
    )
    sink = Sink()
    holder = SandboxHolder(worker="w", run="r", session="s", consumer_group="agent_worker", fence=2)
    assert await Reaper(provider, read, sink, "cluster/", "w").fence_off(holder) == ["lower"]
    assert "lower" not in [one.id for one in provider.boxes]
    assert len(provider.boxes) == 6
    (released,) = sink.events
    assert isinstance(released, SandboxReleased)
    assert (released.sandbox, released.how, released.by) == ("lower", "fenced", "w")


async def test_a_lease_that_is_renewed_while_the_log_is_read_is_not_over() -> None:
    held = box(expires_at=now() + timedelta(seconds=0.2))

    async def read(since: datetime) -> list[Event]:
        # Its renewal comes after the end of the log was looked up, and in time.
        while now() < held.tag.expires_at:
            await asyncio.sleep(0.01)
        return []

    provider, sink = FakeProvider([held]), Sink()
    reaper = Reaper(provider, read, sink, "cluster/", "w")
    assert await reaper.reap() == []
    assert provider.boxes == [held]
    # Once there is no renewal in all of the log, it is.
    assert [judged.reap for judged in await reaper.reap()] == ["expired"]


class SlowProvider(FakeProvider):
    """Removes boxes at once, and says so when it is told to."""

    def __init__(self, boxes: list[FoundSandbox], stuck: frozenset[str] = frozenset()) -> None:
        super().__init__(boxes, stuck)
        self.removing = asyncio.Event()
        self.removed = asyncio.Event()

    async def destroy(self, sandbox_id: str) -> None:
        await super().destroy(sandbox_id)
        self.removing.set()
        await self.removed.wait()


@pytest.mark.parametrize("way", ["reap", "fence_off"])
async def test_what_a_worker_removes_while_it_is_stopped_is_said_to_be_gone(way: str) -> None:
    async def read(since: datetime) -> list[Event]:
        return []

    provider, sink = SlowProvider([box("lower")]), Sink()
    reaper = Reaper(provider, read, sink, "cluster/", "w")
    higher = sandbox_leased("higher", fence=9).holder
    working = asyncio.create_task(reaper.reap() if way == "reap" else reaper.fence_off(higher))  # type: ignore[arg-type]
    await provider.removing.wait()
    working.cancel()
    provider.removed.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert [event.sandbox for event in sink.events if isinstance(event, SandboxReleased)] == ["lower"]


async def test_what_was_taken_from_a_lower_fence_is_said_though_something_else_stays() -> None:
    async def read(since: datetime) -> list[Event]:
        return []

    provider, sink = FakeProvider([box("a"), box("b"), box("c")], stuck=frozenset({"b"})), Sink()
    with pytest.raises(SandboxUnavailable, match="stuck"):
        await Reaper(provider, read, sink, "cluster/", "w").fence_off(sandbox_leased("higher", fence=9).holder)
    assert [event.sandbox for event in sink.events if isinstance(event, SandboxReleased)] == ["a", "c"]
