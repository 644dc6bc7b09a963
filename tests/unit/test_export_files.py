"""The files of an export, and what is refused before there are any."""

import json
import os
from hashlib import sha256
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from rollstream.errors import NothingToExport, StoreUnavailable, UsageError
from rollstream.store.exports.export import Export
from rollstream.store.exports.request import ExportRequest, Splits
from rollstream.store.exports.selection import groups, select
from rollstream.store.reader import open_snapshot
from schemas.envelope import Event
from tests.events import Attempt, task_submitted
from tests.exporting import export, mixed, rows
from tests.stores import publish_events


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_events(tmp_path_factory.mktemp("store"), *mixed())


# Files.


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("format", "file_format"),
    [("sft", "parquet"), ("sft", "jsonl"), ("dpo", "parquet"), ("grpo", "parquet"), ("grpo", "jsonl"), ("atif", "jsonl")],
)
def test_the_same_store_gives_the_same_bytes_and_the_manifest_tells_them(
    store: Path, tmp_path: Path, format: str, file_format: str
) -> None:
    exported = export(store, tmp_path / "one", format=format, file_format=file_format)
    export(store, tmp_path / "two", format=format, file_format=file_format)
    files = tree(tmp_path / "one")
    assert files == tree(tmp_path / "two")
    manifest = json.loads(files.pop("manifest.json"))
    assert {info["path"]: info["sha256"] for info in manifest["files"]} == {
        name: sha256(content).hexdigest() for name, content in files.items()
    }
    assert manifest["rows"] == {"train": exported.total} == {"train": len(rows(tmp_path / "one"))}
    assert (manifest["runs"], manifest["format"]) == (["run-1"], format)
    assert manifest["offsets"]["rollouts.scored/0"] == 7


def test_a_rebuilt_store_gives_the_same_bytes(tmp_path: Path) -> None:
    events = mixed()
    task = events[0]
    publish_events(tmp_path / "one", *events)
    # Another order of topics, as a rebuild from the log may read them: tasks last.
    publish_events(tmp_path / "two", *(event for event in events if type(event) is not type(task)), *events[:3])
    for format in ("sft", "grpo"):
        export(tmp_path / "one", tmp_path / format / "one", format=format)
        export(tmp_path / "two", tmp_path / format / "two", format=format)
        assert tree(tmp_path / format / "one") == tree(tmp_path / format / "two")


def many(tasks: int, size: int = 3) -> list[Event]:
    told = [task_submitted(f"task-{number}", attempts=size) for number in range(tasks)]
    # Attempts of different groups end in turns, as they do.
    return [Attempt(task, index=index, answer=f"{task.task.id} {index}").scored() for index in range(size) for task in told]


def test_groups_stand_together_and_no_file_cuts_one(tmp_path: Path) -> None:
    publish_events(tmp_path, *many(20))
    exported = export(tmp_path, tmp_path / "out", format="grpo", shard_bytes=4_000)
    assert len(exported.files) > 3
    of_groups = [row["group_id"] for row in rows(tmp_path / "out")]
    assert len(of_groups) == 60
    assert all(of_groups[n] == of_groups[n + 1] == of_groups[n + 2] for n in range(0, 60, 3))
    in_file = [set(pq.read_table(path)["group_id"].to_pylist()) for path in sorted((tmp_path / "out" / "data").iterdir())]
    assert sum(map(len, in_file)) == len(set.union(*in_file)) == 20
    assert [info.groups for info in exported.files] == list(map(len, in_file))


def test_a_group_is_read_whole_however_small_the_pages(tmp_path: Path) -> None:
    publish_events(tmp_path, *many(7), Attempt(task_submitted("long"), answer="x" * 200_000).scored())
    with open_snapshot(tmp_path) as connection:
        selection = select(connection, ExportRequest(("run-1",), "atif", "jsonl"), page_bytes=1)
        found = list(groups(connection, selection))
    assert selection.pages >= 8
    assert [len(group.attempts) for group in found] == [3] * 7 + [1]
    assert len({group.id for group in found}) == 8


def test_a_task_is_in_one_split_in_every_format_and_run(tmp_path: Path) -> None:
    other = [event.model_copy(update={"run": "run-2", "event_id": f"other-{n}"}) for n, event in enumerate(many(40))]
    publish_events(tmp_path, *many(40), *other)
    splits = Splits.parse("train=0.5,test=0.5")
    for format in ("sft", "grpo"):
        export(tmp_path, tmp_path / format, format=format, splits=splits)
    parts = [{split: {row["task_id"] for row in rows(tmp_path / f, split)} for split in splits.names} for f in ("sft", "grpo")]
    assert parts[0] == parts[1]
    assert not parts[0]["train"] & parts[0]["test"]
    assert len(parts[0]["train"] | parts[0]["test"]) == 40
    assert min(map(len, parts[0].values())) >= 8


def test_a_directory_appears_whole_or_not_at_all(store: Path, tmp_path: Path) -> None:
    with open_snapshot(store) as connection:
        job = Export(connection, ExportRequest(("run-1",), "sft"))
        selection = job.choose()
        calls = 0

        def fail(count: int) -> None:
            nonlocal calls
            calls += count
            if calls > selection.groups:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            job.write(selection, tmp_path / "out", overwrite=False, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_what_stands_there_is_replaced_only_when_it_is_an_export_and_asked_for(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", format="sft")
    with pytest.raises(UsageError, match="is not empty"):
        export(store, tmp_path / "out", format="dpo")
    export(store, tmp_path / "out", format="dpo", overwrite=True)
    assert "chosen" in rows(tmp_path / "out")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="replaces exports only"):
        export(store, tmp_path / "mine", format="sft", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="expects a directory"):
        export(store, tmp_path / "file", format="sft", overwrite=True)


def test_an_empty_directory_is_used(store: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(store, tmp_path / "out", format="sft")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Refusals.


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"format": "sft", "min_reward": 2.0}, "no scored attempts with reward >= 2.0: 6 scored, best 1"),
        ({"format": "sft", "where": "task_id = 'z'"}, "no attempt matches --where \"task_id = 'z'\": 7 ended"),
        ({"format": "sft", "where": "task_id = 'c'"}, "no attempt succeeded: 1 scored, best 0; --min-reward takes others"),
        ({"format": "sft", "where": "status = 'errored'"}, "no scored attempts: 1 ended, every one without a reward"),
        ({"format": "sft", "where": "mask_loss AND success"}, "no attempts to learn from: 1 scored, every one of them masked"),
        (
            {"format": "dpo", "where": "task_id = 'b'"},
            "no group has rewards that differ at all: 2 scored in 1 groups, the largest difference 0",
        ),
        (
            {"format": "dpo", "margin": 3.0},
            "no group has rewards that differ by 3 or more: 6 scored in 3 groups, the largest difference 1",
        ),
        (
            {"format": "grpo", "where": "task_id = 'c'"},
            "no group is complete with attempts that match: 1 attempts of 1 groups do",
        ),
    ],
)
def test_nothing_to_export_says_why(store: Path, tmp_path: Path, asked: dict[str, object], message: str) -> None:
    with pytest.raises(NothingToExport) as refusal:
        export(store, tmp_path / "out", **asked)
    assert str(refusal.value) == message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("rewad > 1", '--where: Binder Error: Referenced column "rewad" not found'),
        ("reward >", "--where: Parser Error: syntax error"),
        ("true); DROP VIEW rollouts; SELECT (1", "--where"),
        ("reward = 'much'", "--where: Conversion Error"),
    ],
)
def test_a_condition_that_is_none_is_refused_in_one_line(store: Path, tmp_path: Path, where: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        export(store, tmp_path / "out", format="sft", where=where)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"format": "atif", "file_format": "parquet"},
        {"format": "grpo", "min_reward": 1.0},
        {"format": "grpo", "dedupe": True},
        {"format": "sft", "margin": 0.5},
        {"format": "dpo", "margin": -1.0},
        {"format": "sft", "min_reward": float("nan")},
    ],
)
def test_options_that_do_not_go_together_are_refused(asked: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ExportRequest(runs=("run-1",), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["train", "train=1,test=1", "train=0.5", "train=0.5,train=0.5", "a b=1", "x=nan", "x=-1,y=2", ""]
)
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--split expects"):
        Splits.parse(text)


def test_a_copy_that_an_older_version_published_is_refused_in_one_line(tmp_path: Path) -> None:
    publish_events(tmp_path, Attempt().scored())
    copy = tmp_path / "trajectories.duckdb"
    copy.chmod(0o644)
    with duckdb.connect(str(copy)) as connection:
        connection.execute("DROP VIEW counting_records")
    with pytest.raises(StoreUnavailable, match="made by an older rollstream"):
        export(tmp_path, tmp_path / "out", format="sft")


def test_a_record_of_another_writer_is_left_out_and_counted(tmp_path: Path) -> None:
    strange = Attempt(task_submitted("strange")).scored()
    broken = strange.model_copy(update={"messages": [{"role": "narrator", "content": "Once upon a time"}]})
    publish_events(tmp_path, broken, Attempt().scored())
    exported = export(tmp_path, tmp_path / "out", format="sft")
    assert (exported.total, exported.left_out) == (1, {"unreadable": 1})
