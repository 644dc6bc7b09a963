"""Worker processes under supervision, played by small scripts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rollstream.errors import UsageError
from rollstream.supervisor import (
    WORKERS,
    AlreadyRunning,
    ProcessSpec,
    Supervisor,
    SupervisorLock,
    WorkersFailed,
    plan,
    running,
    stop_running,
)
from rollstream.supervisor.plan import Restarts, ready_worker, workers_of
from rollstream.supervisor.state import ProcessRecord, SupervisorState, read_state, supervised_pools, write_state

READY = """
import json, sys, time
for worker in sys.argv[1:]:
    print(json.dumps({"event": "ready", "worker": worker}), file=sys.stderr, flush=True)
time.sleep(600)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY
BROKEN = "import sys; print('the key file is missing'); sys.exit(7)"
SILENT = "import time; time.sleep(600)"

AGENT = ProcessSpec("agent_worker", ("agent_worker",))
ENV = ProcessSpec("env_worker", ("env_worker",))


def eventually(condition: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None, deadline_s: float = 20) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        meanwhile()
        assert time.monotonic() < give_up, "did not happen in time"
        time.sleep(0.01)


class Scene:
    """A supervisor of scripts, what it said, and its processes."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.said: list[str] = []
        self.supervisors: list[Supervisor] = []

    def supervise(self, script: str, specs: Sequence[ProcessSpec] = (AGENT,)) -> Supervisor:
        supervisor = Supervisor(
            self.data_dir,
            specs,
            lambda spec: [sys.executable, "-S", "-c", script, *spec.workers],
            bootstrap="127.0.0.1:9",
            environment={"MARK": str(self.data_dir)},
            say=self.said.append,
        )
        self.supervisors.append(supervisor)
        supervisor.start()
        return supervisor

    def pids(self) -> dict[str, int]:
        state = read_state(self.data_dir)
        return {} if state is None else {process.name: process.pid for process in state.processes}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for supervisor in made.supervisors:
        supervisor.stop(0)


@pytest.mark.parametrize(
    ("workers", "processes", "replicas", "expected"),
    [
        ([], False, {}, [("workers", WORKERS)]),
        (["agent_worker"], False, {}, [("agent_worker", ("agent_worker",))]),
        (["agent_worker", "env_worker"], False, {}, [("workers", ("agent_worker", "env_worker"))]),
        (["agent_worker", "agent_worker"], False, {}, [("agent_worker", ("agent_worker",))]),
        (
            ["agent_worker", "env_worker"],
            True,
            {},
            [("agent_worker", ("agent_worker",)), ("env_worker", ("env_worker",))],
        ),
        (
            ["agent_worker", "env_worker"],
            False,
            {"agent_worker": 2},
            [("agent_worker", ("agent_worker",)), ("agent_worker-2", ("agent_worker",)), ("env_worker", ("env_worker",))],
        ),
    ],
)
def test_a_plan_is_one_process_for_all_or_one_for_each(
    workers: list[str], processes: bool, replicas: dict[str, int], expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert plan(workers, processes=processes, replicas=replicas) == [ProcessSpec(*one) for one in expected]


@pytest.mark.parametrize(
    ("workers", "replicas", "sentence"),
    [
        (["agent"], {}, "no worker is named 'agent'; known: env_worker, agent_worker"),
        ([], {"nobody": 2}, "no worker is named 'nobody'"),
        ([], {"store_worker": 2}, "store_worker runs once only"),
        ([], {"agent_worker": 0}, "expected 1 or more, found 0"),
        (["env_worker"], {"agent_worker": 2}, "agent_worker were asked for, but it is not among the workers env_worker"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(workers: list[str], replicas: dict[str, int], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan(workers, replicas=replicas)


def test_a_pool_has_every_worker_but_the_one_that_reads_for_all() -> None:
    (spec,) = plan([], pool="gpu")
    assert (spec.name, spec.workers) == ("workers.gpu", ("env_worker", "agent_worker", "verifier_worker"))
    names = [spec.name for spec in plan(["agent_worker"], replicas={"agent_worker": 2}, pool="gpu")]
    assert names == ["agent_worker.gpu", "agent_worker.gpu-2"]
    assert workers_of("default") == WORKERS
    with pytest.raises(UsageError, match="store_worker reads what all pools write: start it without --pool"):
        plan(["store_worker"], pool="gpu")


def test_pools_share_a_data_directory_and_not_a_supervisor(tmp_path: Path) -> None:
    with SupervisorLock(tmp_path), SupervisorLock(tmp_path, "gpu"):
        for pool in ("gpu", "default", "a-b"):
            write_state(tmp_path, SupervisorState(supervisor=ProcessRecord.of(os.getpid(), pool), bootstrap="b"), pool)
        with pytest.raises(AlreadyRunning, match="for pool gpu run already"), SupervisorLock(tmp_path, "gpu"):
            pass
    assert supervised_pools(tmp_path) == ["default", "a-b", "gpu"]
    found = running(tmp_path, "gpu")
    assert found is not None
    assert found.supervisor.name == "gpu"
    assert running(tmp_path, "other") is None


def test_a_process_that_keeps_dying_at_its_start_is_given_up_after_growing_delays() -> None:
    restarts = Restarts()
    assert [restarts.after_death(was_ready=False, lived_s=1) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_a_process_that_worked_for_a_while_starts_again_at_once_and_clears_its_record() -> None:
    restarts = Restarts(failed_starts=4)
    assert restarts.after_death(was_ready=True, lived_s=3600) == 0.0
    assert restarts.after_death(was_ready=True, lived_s=1) == 0.5


@pytest.mark.parametrize(
    ("line", "worker"),
    [
        (b'{"event": "ready", "worker": "env_worker", "pid": 3}', "env_worker"),
        (b'{"event": "stopped", "worker": "env_worker"}', None),
        (b'{"event": "ready"}', None),
        (b'{"event": "ready", "worker": 3}', None),
        (b'{"event": "ready", ', None),
        (b"2024-01-01 INFO ready", None),
        (b"", None),
    ],
)
def test_only_a_ready_line_says_that_a_worker_is_ready(line: bytes, worker: str | None) -> None:
    assert ready_worker(line) == worker


def test_a_supervisor_is_ready_when_every_worker_said_so(scene: Scene) -> None:
    supervisor = scene.supervise(READY, [ProcessSpec("workers", ("env_worker", "agent_worker")), AGENT])
    assert not supervisor.is_ready
    supervisor.await_ready(20)
    state = running(scene.data_dir)
    assert state is not None
    assert state.ready
    assert state.workers() == ["env_worker", "agent_worker"]


def test_a_worker_that_is_never_ready_is_told_by_name(scene: Scene) -> None:
    supervisor = scene.supervise(SILENT)
    with pytest.raises(WorkersFailed, match=r"agent_worker not ready after 0.2 s; its log is empty"):
        supervisor.await_ready(0.2)


def test_a_killed_worker_is_started_again_and_said(scene: Scene) -> None:
    supervisor = scene.supervise(READY, [AGENT, ENV])
    supervisor.await_ready(20)
    first = scene.pids()

    os.kill(first["agent_worker"], signal.SIGKILL)
    eventually(lambda: scene.pids().get("agent_worker", first["agent_worker"]) != first["agent_worker"], supervisor.poll)

    eventually(lambda: supervisor.is_ready, supervisor.poll)
    assert scene.pids()["env_worker"] == first["env_worker"]
    assert scene.said == ["agent_worker ended by SIGKILL; starting it again in 0.5 s", "agent_worker ready again"]


@pytest.mark.slow
def test_a_worker_that_dies_five_times_at_its_start_ends_all_with_its_last_lines(scene: Scene) -> None:
    supervisor = scene.supervise(BROKEN)
    with pytest.raises(WorkersFailed, match=r"(?s)agent_worker ended with code 7, 5 times in a row.*the key file is missing"):
        supervisor.await_ready(60)
    assert len(scene.said) == 4


def test_stopping_is_asked_for_first_and_forced_after_the_grace(scene: Scene) -> None:
    supervisor = scene.supervise(STUBBORN)
    supervisor.await_ready(20)
    pid = scene.pids()["agent_worker"]
    supervisor.stop(0.2)
    assert scene.said == ["agent_worker did not stop and is killed"]
    assert not psutil.pid_exists(pid)
    assert read_state(scene.data_dir) is None


SUPERVISOR_SCRIPT = """
import sys, time
from pathlib import Path
from rollstream.supervisor import ProcessSpec, Supervisor, SupervisorLock
data_dir, script = Path(sys.argv[1]), sys.argv[2]
with SupervisorLock(data_dir):
    supervisor = Supervisor(
        data_dir, [ProcessSpec("agent_worker", ("agent_worker",))],
        lambda spec: [sys.executable, "-S", "-c", script, *spec.workers],
        bootstrap="127.0.0.1:9", environment={}, say=print,
    )
    supervisor.start()
    try:
        while True:
            supervisor.poll()
            time.sleep(0.05)
    finally:
        supervisor.stop(5)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that supervises a worker in `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR_SCRIPT, str(tmp_path), READY])
    try:
        eventually(lambda: (state := running(tmp_path)) is not None and state.ready)
        yield process
    finally:
        process.kill()
        process.wait()


def test_workers_die_with_their_supervisor_even_when_it_is_killed(tmp_path: Path, other: "subprocess.Popen[bytes]") -> None:
    state = running(tmp_path)
    assert state is not None
    other.kill()
    other.wait()
    eventually(lambda: state.processes[0].process() is None)


def test_a_second_supervisor_is_refused_and_told_who_runs(tmp_path: Path, other: "subprocess.Popen[bytes]") -> None:
    with (
        pytest.raises(AlreadyRunning, match=rf"run already \(pid {other.pid}\): publish to them, or stop them"),
        SupervisorLock(tmp_path),
    ):
        pass


def test_stopping_from_outside_ends_supervisor_and_workers(tmp_path: Path, other: "subprocess.Popen[bytes]") -> None:
    state = running(tmp_path)
    assert state is not None
    # The supervisor here has no handler for SIGTERM, so that the worker is left to be found and ended.
    assert stop_running(tmp_path, 10) == ["agent_worker"]
    assert all(record.process() is None for record in (state.supervisor, *state.processes))
    assert stop_running(tmp_path, 10) == []


def test_a_pid_that_was_given_out_again_is_not_taken_for_ours() -> None:
    record = ProcessRecord.of(os.getpid(), "me")
    assert record.process() is not None
    assert record.model_copy(update={"started_at": record.started_at - 60}).process() is None
