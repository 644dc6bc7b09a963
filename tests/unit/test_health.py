"""What a process says of itself, and what whoever asks makes of it."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream import health
from rollstream.eventlog.commits import Progress
from rollstream.health import HealthSocket, LaneHealth, ProcessHealth, WorkerHealth, ask_all
from services.health import described, faults_of

LANE = LaneHealth("agent_worker", 3, in_flight=40, span=900, mark_age_s=3_000.0, commit_age_s=0.1, out_for_s=0.0)


def process(lane: LaneHealth = LANE, failure: str | None = None) -> ProcessHealth:
    return ProcessHealth(7, (WorkerHealth("agent_worker", failure, (lane,)),))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_long_episode_ages_the_mark_and_is_no_fault() -> None:
    assert process().hindrances == []
    assert described(process()) == [
        "agent_worker (pid 7)",
        "  agent_worker: 3 partitions, 40 in flight, span 900, oldest mark 3000 s, oldest commit due 0.1 s",
    ]


@pytest.mark.parametrize(
    ("lane", "said"),
    [
        (replace(LANE, commit_age_s=31.0), "group agent_worker has taken no commit for 31 s"),
        (replace(LANE, out_for_s=40.0), "group agent_worker has not let this process in for 40 s"),
    ],
)
def test_what_may_pass_by_itself_hinders_and_is_no_reason_for_a_new_process(lane: LaneHealth, said: str) -> None:
    assert process(lane).hindrances == [said]
    assert process(lane).dead == []


def test_what_a_worker_broke_of_is_said_and_only_a_new_process_mends_it() -> None:
    assert process(failure="boom").dead == process(failure="boom").hindrances == ["agent_worker broke: boom"]


def test_nobody_there_and_somebody_missing_are_faults() -> None:
    assert faults_of([], [], live=True) == ["no worker runs here with this data directory"]
    assert faults_of([process()], ["agent_worker", "env_worker"], live=True) == ["no env_worker answers"]


def test_a_mark_ages_from_when_work_began_and_is_young_again_when_it_moves() -> None:
    clock = Clock()
    progress = Progress(0, clock=clock)
    clock.now += 50
    assert progress.mark_age_s == 0.0, "nothing runs"
    progress.offer(0)
    progress.offer(1)
    clock.now += 7
    progress.complete(1)
    progress.next_commit()
    assert progress.mark_age_s == 7.0
    progress.offer(2)
    progress.complete(0)
    progress.next_commit()
    assert progress.mark_age_s == 0.0


def test_a_commit_is_due_from_when_there_was_something_new_until_the_broker_has_it() -> None:
    clock = Clock()
    progress = Progress(0, clock=clock)
    progress.offer(0)
    progress.complete(0)
    first = progress.next_commit()
    clock.now += 5
    progress.offer(1)
    progress.complete(1)
    progress.next_commit()
    assert progress.commit_age_s == 5.0
    progress.committed = first
    assert progress.commit_age_s == 0.0
    progress.committed = progress.next_commit()
    clock.now += 60
    progress.next_commit()
    assert progress.commit_age_s == 0.0


@contextmanager
def answering(data_dir: Path) -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread of its own that answers for this process."""
    loop = asyncio.new_event_loop()
    ready, end = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with HealthSocket(data_dir, lambda: process().workers):
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield loop
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def test_a_process_is_asked_over_a_socket_of_its_data_directory(tmp_path: Path) -> None:
    with answering(tmp_path):
        assert ask_all(tmp_path) == [ProcessHealth(os.getpid(), process().workers)]
        assert ask_all(tmp_path / "another") == []
    assert ask_all(tmp_path) == []


def test_a_blocked_loop_does_not_answer_and_does_again_when_it_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 0.2)
    let_go = threading.Event()
    with answering(tmp_path) as loop:
        loop.call_soon_threadsafe(let_go.wait)
        (blocked,) = ask_all(tmp_path)
        let_go.set()
        monkeypatch.setattr(health, "ANSWER_S", 10.0)
        (well,) = ask_all(tmp_path)
    assert blocked.dead == [f"process {os.getpid()} has not answered for 0.2 s: its event loop is blocked, or it is stopped"]
    assert well.dead == []


def test_a_socket_that_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    with answering(tmp_path):
        (path,) = health._directory(tmp_path).glob("*.sock")
        left = path.with_name("1.sock")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(left))
        assert [one.pid for one in ask_all(tmp_path)] == [os.getpid()]
        assert not left.exists()


async def test_where_no_socket_can_be_a_worker_runs_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    async with HealthSocket(tmp_path, lambda: process().workers):
        assert ask_all(tmp_path) == []
