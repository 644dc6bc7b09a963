"""`rollstream export`, as people type it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rollstream.cli.export import export
from rollstream.errors import NothingToExport, StoreUnavailable, UsageError
from tests.events import attempts, task_submitted
from tests.stores import publish_events

app = typer.Typer()
app.command()(export)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tasks = [(run, task_submitted(name, run=run, attempts=2)) for run in ("run-1", "run-2") for name in ("a", "b")]
    records = [replace(each, answer=str(each.index)).scored() for _, task in tasks for each in attempts(task, 1.0, 0.0)]
    return publish_events(tmp_path_factory.mktemp("store"), *(task for _, task in tasks), *records)


def command(store: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(store)])


def test_it_says_what_it_wrote(store: Path, tmp_path: Path) -> None:
    result = command(store, "run-1", "run-2", "run-1", "--format", "dpo", "--to", str(tmp_path / "out"), "--dedupe")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"dpo of run-1, run-2: 1 rows of 1 groups in {tmp_path / 'out'} (parquet)",
        "left out: 3 duplicate",
    ]


def test_an_empty_part_is_said(store: Path, tmp_path: Path) -> None:
    result = command(store, "run-1", "--format", "sft", "--to", str(tmp_path / "out"), "--split", "train=0.999,test=0.001")
    assert "train 2, test 0" in result.output
    assert "note: no task fell into test" in result.output


def test_the_kind_of_file_follows_the_format_unless_it_is_said(store: Path, tmp_path: Path) -> None:
    for arguments, suffix in ((("sft",), "parquet"), (("sft", "--jsonl"), "jsonl"), (("atif",), "jsonl")):
        to = tmp_path / "-".join(arguments)
        assert command(store, "--to", str(to), "--format", *arguments).exit_code == 0
        manifest = json.loads((to / "manifest.json").read_text())
        assert [Path(info["path"]).suffix for info in manifest["files"]] == [f".{suffix}"]
        assert manifest["runs"] == ["run-1"]


def test_failures_are_typed_and_name_what_was_found(store: Path, tmp_path: Path) -> None:
    to = ("--format", "sft", "--to", str(tmp_path / "out"))
    unknown = command(store, "run-3", *to).exception
    assert isinstance(unknown, UsageError)
    assert "no run 'run-3' in the published store; close to it: run-2, run-1" in str(unknown)
    assert isinstance(command(store, *to, "--min-reward", "2").exception, NothingToExport)
    assert isinstance(command(store, *to, "--where", "nope = 1").exception, UsageError)
    assert isinstance(command(tmp_path, *to).exception, StoreUnavailable)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    refused = command(tmp_path, "--format", "sft", "--to", str(tmp_path / "mine")).exception
    assert "is not empty" in str(refused)


def test_help_has_an_example(store: Path) -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "Example: rollstream export nightly" in result.output
