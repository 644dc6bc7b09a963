"""Objects that go from one process to another: they arrive as they were, and an end is an end."""

import os
import socket
from collections.abc import Iterator

import pyarrow as pa
import pytest

from rollstream.store import handover
from rollstream.store.batch import plan
from rollstream.store.planned import Planned
from tests.events import Attempt, Log, attempts, task_submitted


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_batch_arrives_as_it_was_planned(connected: tuple[socket.socket, socket.socket]) -> None:
    task = task_submitted(attempts=2)
    events = [event for one in attempts(task, 1.0, 0.0) for event in one.events()]
    batch = plan(Log().records(task, *events), {}, {("verdicts", 0): 9})
    handover.send(connected[0], Planned(batch, 3))
    found, behind, is_last = handover.receive(connected[1])
    assert (behind, is_last) == (3, False)
    for was, came in zip(batch.events, found.events, strict=True):
        assert came.table is was.table
        assert came.topic == was.topic
        assert came.rows.equals(was.rows)
    assert (found.public, found.private, found.moved) == (batch.public, batch.private, batch.moved)
    assert (found.offsets, found.records, found.first_offset) == (batch.offsets, batch.records, batch.first_offset)
    assert found.prompts == batch.prompts


@pytest.mark.parametrize("count", [0, 1, 5, 2_000])
def test_what_is_large_and_what_is_small_arrive_in_their_order(
    connected: tuple[socket.socket, socket.socket], count: int
) -> None:
    what = {number: pa.array([number * 1.5] * number) for number in range(count)}
    handover.send(connected[0], what)
    handover.send(connected[0], "the next")
    assert handover.receive(connected[1]) == what
    assert handover.receive(connected[1]) == "the next"


def test_what_came_stays_when_the_other_side_is_gone(connected: tuple[socket.socket, socket.socket]) -> None:
    handover.send(connected[0], pa.array(["a" * 100_000]))
    connected[0].close()
    found = handover.receive(connected[1])
    assert found.to_pylist() == ["a" * 100_000]
    with pytest.raises(EOFError):
        handover.receive(connected[1])


def test_memory_is_used_again_for_what_is_longer_and_for_what_is_shorter(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    memory = handover.Memory()
    for length in (10, 100_000, 7, 3_000_000, 0):
        what = {"column": pa.array(range(length)), "name": str(length)}
        memory.put(what)
        memory.send(connected[0])
        found = handover.receive(connected[1])
        assert found == what
    memory.close()
    assert found["name"] == "0"


def test_no_descriptor_stays_open(connected: tuple[socket.socket, socket.socket]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        handover.send(connected[0], [Attempt().scored(), pa.array([number])])
        handover.receive(connected[1])
    connected[1].close()
    with pytest.raises(OSError):
        handover.send(connected[0], "nobody")
    assert len(os.listdir("/proc/self/fd")) == before - 1
