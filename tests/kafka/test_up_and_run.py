"""`rollstream up`, `down` and `run` as a user calls them: real workers, the harness `oracle`, no model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollstream.settings import Settings
from rollstream.supervisor import SupervisorState, running

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def rollstream(settings: Settings) -> Iterator[Command]:
    """Calls `rollstream` in an installation of its own; whatever it left running is stopped at the end."""
    assert settings.bootstrap_servers is not None
    environment = {
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(settings.kafka.partitions),
        "ROLLSTREAM_KAFKA__SESSION_TIMEOUT_S": "6",
        "ROLLSTREAM_STORE__PUBLISH_INTERVAL_S": "0.5",
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
    }

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "rollstream.cli", *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    yield call
    call("down")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"environment": "multiple_choice", "question": f"{n} + 1 = ?", "options": ["wrong", str(n + 1)], "answer": "B"}
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def state_of(settings: Settings) -> SupervisorState:
    state = running(settings.data_dir)
    assert state is not None
    return state


def test_run_starts_what_it_needs_reports_and_stops_it_again(rollstream: Command, settings: Settings, tasks: str) -> None:
    done = rollstream("run", tasks, "--harness", "oracle", "-k", "3", "--run", "r")
    assert done.returncode == 0, done.stderr
    assert "run r: published 5 tasks x 3 attempts = 15 rollouts" in done.stdout
    assert "15/15 done, 0 running, 0 failed" in done.stdout
    assert "15 of 15 attempts ended" in done.stdout
    assert "rollstream show --run r --worst" in done.stdout
    assert running(settings.data_dir) is None


def test_detached_workers_are_used_by_others_and_stopped_by_down(rollstream: Command, settings: Settings, tasks: str) -> None:
    up = rollstream("up", "--detach", "--processes")
    assert up.returncode == 0, up.stderr
    assert "env_worker, agent_worker, verifier_worker, store_worker ready in " in up.stdout
    state = state_of(settings)
    assert len(state.processes) == 4

    again = rollstream("up")
    assert again.returncode == 2
    assert f"run already (pid {state.supervisor.pid})" in again.stderr

    waited = rollstream("publish", tasks, "--harness", "oracle", "--run", "r", "--wait")
    assert waited.returncode == 0, waited.stderr
    ran = rollstream("run", tasks, "--harness", "oracle", "--run", "s")
    assert ran.returncode == 0, ran.stderr
    assert f"using the workers that run already (pid {state.supervisor.pid})" in ran.stdout
    assert state_of(settings) == state

    assert rollstream("down").stdout == "stopped: env_worker, agent_worker, verifier_worker, store_worker\n"
    assert all(record.process() is None for record in (state.supervisor, *state.processes))


def test_a_worker_that_is_killed_comes_back_and_the_run_ends(rollstream: Command, settings: Settings, tasks: str) -> None:
    rollstream("up", "--detach", "--processes")
    before = {record.name: record.pid for record in state_of(settings).processes}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)

    done = rollstream("publish", tasks, "--harness", "oracle", "--run", "r", "--wait")

    assert done.returncode == 0, done.stderr
    give_up = time.monotonic() + 20
    while len(after := {record.name: record.pid for record in state_of(settings).processes}) < 4:
        assert time.monotonic() < give_up
        time.sleep(0.1)
    assert all(after[name] != pid for name, pid in before.items())


def test_workers_that_cannot_run_here_end_up_in_one_sentence(rollstream: Command, settings: Settings) -> None:
    rollstream("topics", "ensure")
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    (settings.data_dir / "keys").write_text("a file where a folder must be")
    done = rollstream("up", "--workers", "env_worker")
    assert done.returncode == 1
    assert "env_worker ended with code" in done.stderr
    assert "5 times in a row at its start; the last lines of" in done.stderr
