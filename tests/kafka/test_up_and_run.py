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


PURSE = '''
from rollstream.environments.protocol import Task, Verdict, World
from rollstream.environments.tools import ToolEnvironment, ToolError, ToolResult, tool

class PurseTask(Task):
    coins: int
    left: int

class Purse(World):
    coins: int

class PurseEnvironment(ToolEnvironment[PurseTask, Purse]):
    name, version, task_type, world_type = "purse", "1", PurseTask, Purse
    public_fields = frozenset({"coins"})

    def begin(self, task):
        return Purse(coins=task.coins)

    def prompt(self, task):
        return [{"role": "user", "content": f"Of {task.coins} coins, spend some."}]

    @tool
    async def spend(self, world: Purse, coins: int) -> ToolResult:
        """Spend some coins."""
        if coins > world.coins:
            raise ToolError(f"there are only {world.coins}")
        world.coins -= coins
        return ToolResult({"left": world.coins}, reward=0.5)

    async def score(self, task, world, episode, services):
        return Verdict(reward=1.0 if world.coins == task.left else 0.0)
'''
SPENDER = '''
from schemas.action import ToolCall
from schemas.session import Submission
from services.agent_worker.harnesses.protocol import Capabilities, Turn

class SpenderHarness:
    """Spends a coin in each of two turns, whatever there is to do."""

    name, version = "spender", "1"
    capabilities = Capabilities(interactions=frozenset({"tools"}), tools=True)

    async def open(self, descriptor, models, box):
        return SpenderSession()

class SpenderSession:
    spent = 0

    async def activate(self, observation):
        if self.spent == 2:
            return Turn([{"role": "assistant", "content": "Spent."}], "completed")
        self.spent += 1
        return Turn([{"role": "assistant", "content": ""}], None, [ToolCall(id="c", name="spend", arguments={"coins": 1})])

    async def close(self):
        return Submission(text="Spent.")
'''


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


def test_an_environment_and_a_harness_in_files_of_ones_own_run_in_workers_of_their_own(
    rollstream: Command, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "purse_plugin.py").write_text(PURSE)
    (tmp_path / "spender_plugin.py").write_text(SPENDER)
    rows = [{"task_id": "two", "coins": 5, "left": 3}, {"task_id": "three", "coins": 5, "left": 2}]
    tasks = tmp_path / "purses.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment, harness = f"{tmp_path}/purse_plugin.py:PurseEnvironment", f"{tmp_path}/spender_plugin.py:SpenderHarness"

    done = rollstream("run", str(tasks), "--environment", environment, "--harness", harness, "--run", "own")

    assert done.returncode == 0, done.stderr
    assert "2/2 done, 0 running, 0 failed" in done.stdout
    asked = "SELECT task_id, status, reward, harness, environment FROM rollouts ORDER BY task_id"
    told = rollstream("sql", "--format", "json", asked)
    assert told.returncode == 0, told.stderr
    assert [tuple(row.values()) for row in json.loads(told.stdout)] == [
        ("three", "completed", 0.0, "spender", "purse"),
        ("two", "completed", 1.0, "spender", "purse"),
    ]
    earned = rollstream("sql", "--format", "json", "SELECT sum(reward) AS earned FROM step_rewards WHERE counts")
    assert json.loads(earned.stdout) == [{"earned": 2.0}]


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
    give_up = time.monotonic() + 90
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


def test_a_pool_has_workers_of_its_own_in_the_same_data_directory(
    rollstream: Command, settings: Settings, tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSTREAM_POOLS", '{"choices": {"environments": ["multiple_choice"]}}')
    up = rollstream("up", "--detach")
    assert up.returncode == 0, up.stderr
    assert "pool choices: nobody serves it (environment multiple_choice): rollstream up --pool choices" in up.stdout

    rollstream("publish", tasks, "--harness", "oracle", "--run", "r")
    waiting = rollstream("watch", "r", "--timeout", "6")
    assert waiting.returncode == 1
    assert "pool choices: nobody serves it, 5 attempts wait (environment multiple_choice)" in waiting.stdout
    assert "0/5 done" in waiting.stderr

    pool = rollstream("up", "--detach", "--pool", "choices")
    assert pool.returncode == 0, pool.stderr
    assert "env_worker, agent_worker, verifier_worker ready in " in pool.stdout
    assert "nobody serves" not in pool.stdout
    again = rollstream("up", "--pool", "choices")
    assert again.returncode == 2
    assert "for pool choices run already" in again.stderr
    done = rollstream("watch", "r", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    assert "5/5 done" in done.stdout

    assert rollstream("down", "--pool", "choices").stdout == (
        "stopped: env_worker.choices, agent_worker.choices, verifier_worker.choices\n"
    )
    assert rollstream("down").stdout == "stopped: env_worker, agent_worker, verifier_worker, store_worker\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["env_worker", "--pool", "nowhere"], "expected one of the pools default, choices, found 'nowhere'"),
        (["store_worker", "--pool", "choices"], "store_worker reads what all pools write: start it without --pool"),
    ],
)
def test_workers_of_a_pool_that_cannot_be_are_refused_in_one_line(
    words: list[str], sentence: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings.bootstrap_servers is not None
    monkeypatch.setenv("ROLLSTREAM_POOLS", '{"choices": {"environments": ["multiple_choice"]}}')
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", settings.bootstrap_servers)
    done = subprocess.run([sys.executable, "-m", "services", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
