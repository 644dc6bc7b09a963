"""The command line as a whole: what it says of itself, and how it fails."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import rollstream
from rollstream.cli.main import COMMANDS, Entry, LazyCommand
from rollstream.harnesses import KNOWN_HARNESSES
from services.agent_worker.harnesses.registry import HARNESSES


def rollstream_command(
    *arguments: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None, timeout_s: float = 60
) -> "subprocess.CompletedProcess[str]":
    """Run `rollstream` as a user does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rollstream.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_the_overview_names_every_command() -> None:
    shown = rollstream_command("--help").stdout
    assert all(f" {entry.name} " in shown and entry.purpose in shown for entry in COMMANDS)


def test_the_overview_imports_no_command() -> None:
    heavy = {"aiokafka", "duckdb", "openai", "pyarrow", "psutil", "rollstream.settings"}
    code = f"import sys; from rollstream.cli.main import root; root(); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_overview_appears_at_once() -> None:
    """It loads nothing of what commands need, which takes a second: who mistypes has to see the names at once."""
    code = """
import sys, rollstream.cli
sys.argv = ["rollstream", "--help"]
try:
    rollstream.cli.main()
except SystemExit:
    print("loaded", *sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    overview, _, loaded = shown.rpartition("loaded ")
    assert "doctor" in overview
    assert not {"pydantic", "duckdb", "aiokafka", "faststream", "pyarrow", "openai"} & set(loaded.split())


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_a_command_says_of_itself_what_the_overview_says_and_gives_an_example(entry: Entry) -> None:
    command = LazyCommand(entry).load()
    commands = [command, *getattr(command, "commands", {}).values()]
    assert (command.help or "").partition("\n")[0].startswith(entry.purpose.removesuffix("."))
    for one in commands if len(commands) == 1 else commands[1:]:
        assert "Example: rollstream " in (one.help or ""), one.name


def test_the_version_is_printed() -> None:
    assert rollstream_command("--version").stdout == f"rollstream {rollstream.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["publish", "missing.jsonl"], 2, "task file missing.jsonl does not exist"),
        (["watch", "some-run"], 3, "no broker is running for"),
        (["topics", "ensure"], 3, "no broker is running for"),
        (["topics", "list", "--config", "missing.toml"], 2, "expected a settings file at"),
        (["up", "--workers", "agent"], 2, "no worker is named 'agent'"),
        (["up", "--replicas", "agent_worker"], 2, "--replicas expects NAME=VALUE, found 'agent_worker'"),
        (["up", "--replicas", "agent_worker=two"], 2, "--replicas agent_worker: expected a whole number, found 'two'"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(tmp_path: Path, arguments: list[str], code: int, sentence: str) -> None:
    done = rollstream_command(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_named_broker_that_is_away_is_exit_code_3_in_one_line(tmp_path: Path) -> None:
    done = rollstream_command("topics", "describe", cwd=tmp_path, environment={"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9"})
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "no Kafka broker answers at 127.0.0.1:9" in done.stderr


def test_a_settings_file_that_is_no_toml_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rollstream.toml").write_text("data_dir = ")
    done = rollstream_command("topics", "list", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected TOML in rollstream.toml, found ")


def test_topics_are_listed_without_a_broker(tmp_path: Path) -> None:
    done = rollstream_command("topics", "list", cwd=tmp_path, environment={"ROLLSTREAM_KAFKA__TOPIC_PREFIX": "mine."})
    assert done.returncode == 0
    assert "mine.tasks.in" in done.stdout


def test_every_harness_of_the_agent_worker_is_known_with_what_it_plays() -> None:
    known = {name: can.interactions for name, can in KNOWN_HARNESSES.items()}
    assert known == {name: harness.capabilities.interactions for name, harness in HARNESSES.items()}
