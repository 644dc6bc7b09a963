"""Journals of boxes: an action is done once, whoever is asked to, and whoever has been overtaken is refused."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from rollstream.errors import EnvironmentFailure
from rollstream.sandboxes.journal import Journal, Opened, find, prune
from schemas.envelope import now

LATER = now() + timedelta(hours=1)


async def opened(tmp_path: Path, fence: int = 1, sandbox: str = "box") -> Journal:
    journal = Journal(tmp_path, "session/1", sandbox)
    await journal.open(Opened("{}", f"world of {sandbox}"), fence, LATER)
    return journal


def another(tmp_path: Path) -> Journal:
    """The same journal, in a process that has not seen it before."""
    return Journal(tmp_path, "session/1", "box")


async def refused(journal: Journal, action: str, fence: int) -> str:
    with pytest.raises(EnvironmentFailure) as raised:
        await journal.begin(action, fence)
    assert raised.value.retryable
    return raised.value.kind


async def test_an_action_that_is_done_gets_its_first_outcome_in_every_process(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    for number in range(3):
        assert await journal.begin(f"a{number}", 1) is None
        await journal.done(f"a{number}", {"shown": f"\ud800 {number}"}, 1)
    for again in (journal, another(tmp_path)):
        assert await again.begin("a1", 1) == {"shown": "\ud800 1"}


async def test_an_action_that_had_begun_when_its_worker_died_is_not_done_again(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.begin("a", 1)
    assert await refused(another(tmp_path), "a", 2) == "action_unknown"


async def test_half_a_record_of_a_killed_worker_counts_as_none_and_is_written_over(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.begin("a", 1)
    (name,) = os.listdir(tmp_path)
    with (tmp_path / name).open("ab") as file:
        file.write(b'{"kind": "done", "action": "a", "outc')
    reader = another(tmp_path)
    assert await refused(reader, "a", 1) == "action_unknown"
    assert await reader.begin("b", 1) is None
    await reader.done("b", {"n": 1}, 1)
    assert await another(tmp_path).begin("b", 1) == {"n": 1}


async def test_a_lower_fence_neither_begins_nor_ends_an_action_nor_closes(tmp_path: Path) -> None:
    zombie = await opened(tmp_path, fence=3)
    await zombie.begin("a", 3)
    successor = another(tmp_path)
    await successor.take_over(4)
    with pytest.raises(EnvironmentFailure, match="fence 4") as raised:
        await zombie.done("a", {}, 3)
    assert raised.value.kind == "fenced"
    assert await refused(zombie, "b", 3) == "fenced"
    assert not await zombie.is_held_under(3)
    assert await successor.is_held_under(4)
    with pytest.raises(EnvironmentFailure, match="fence 4"):
        await another(tmp_path).take_over(2)


async def test_what_is_done_in_one_process_is_known_in_another_that_reads_on(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    second = another(tmp_path)
    await second.take_over(1)
    await first.begin("a", 1)
    await first.done("a", {"n": 1}, 1)
    assert await second.begin("a", 1) == {"n": 1}


async def test_a_journal_whose_box_was_closed_begins_nothing(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.remove()
    assert not journal.exists
    assert await refused(journal, "a", 1) == "world_gone"


async def test_a_session_whose_box_was_opened_anew_refuses_whoever_has_the_old_one_and_keeps_the_new_journal(
    tmp_path: Path,
) -> None:
    old = await opened(tmp_path)
    await old.begin("a", 1)
    new = await opened(tmp_path, fence=2, sandbox="new box")
    assert find(tmp_path, "session/1") == Opened("{}", "world of new box")
    assert await refused(old, "b", 3) == "world_gone"
    await old.remove()
    assert (old.exists, new.exists) == (False, True)
    assert await new.begin("a", 2) is None
    assert find(tmp_path, "session/2") is None


async def test_journals_of_boxes_whose_time_is_over_are_removed_and_no_others(tmp_path: Path) -> None:
    await opened(tmp_path)
    (tmp_path / "unreadable.journal").write_text("{")
    prune(tmp_path, LATER - timedelta(seconds=1))
    assert another(tmp_path).exists
    prune(tmp_path, LATER + timedelta(seconds=1))
    assert os.listdir(tmp_path) == ["unreadable.journal"]
