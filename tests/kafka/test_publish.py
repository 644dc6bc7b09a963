"""From a task file to the log: what stands there, and what a second publication adds."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollstream.blobs import BlobReference, BlobStore
from rollstream.cli.progress import Snapshot
from rollstream.cli.watch import NotFinished, follow
from rollstream.environments.intake import GroupIds
from rollstream.errors import UsageError
from rollstream.eventlog.groups import open_groups
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import open_reader
from rollstream.publishing import Accepted, Published, RunDiffers, RunIsOver, RunRequest, plan_run, publish_run, tasks_of
from rollstream.runs import known_runs
from rollstream.settings import Settings
from schemas.events import decode
from schemas.failure import ErrorInfo
from schemas.rollout import RolloutScored
from schemas.run import RunCancelled, RunPaused
from schemas.task import TaskSubmitted
from schemas.values import Composition, EpisodeLimits
from topics.catalogue import TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics")]


def row(number: int) -> dict[str, object]:
    return {"id": f"t{number}", "question": f"{number} + 1 = ?", "options": ["wrong", str(number + 1)], "answer": "B"}


def task_file(folder: Path, rows: Sequence[object]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(f"{text if isinstance(text, str) else json.dumps(text)}\n" for text in rows))
    return path


def request(path: Path, run: str = "r", attempts: int = 2) -> RunRequest:
    return RunRequest(
        path=path,
        run=run,
        composition=Composition(),
        limits=EpisodeLimits(),
        attempts=attempts,
        environment="multiple_choice",
    )


async def published(wanted: RunRequest, settings: Settings) -> Published:
    assert settings.bootstrap_servers is not None
    plan = plan_run(wanted, settings, datetime.now(UTC))
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        return await publish_run(wanted, plan, settings, settings.bootstrap_servers, producer)


async def tasks_on_the_log(settings: Settings) -> list[TaskSubmitted]:
    assert settings.bootstrap_servers is not None
    async with open_reader(settings.bootstrap_servers, settings.kafka, (TASKS_IN,)) as reader:
        return [decode(record.value, TaskSubmitted) async for batch in reader.to_end() for record in batch]


async def test_every_row_stands_on_the_log_with_its_number_and_the_manifest_tells_how_many(
    settings: Settings, tmp_path: Path
) -> None:
    assert settings.bootstrap_servers is not None
    await published(request(task_file(tmp_path, [row(number) for number in range(700)])), settings)

    tasks = await tasks_on_the_log(settings)
    manifest = (await known_runs(settings.bootstrap_servers, settings.kafka))["r"].manifest
    assert sorted(task.task.index or 0 for task in tasks) == list(range(700))
    assert {task.task.id for task in tasks} == {f"t{number}" for number in range(700)}
    assert {(task.task.dataset, task.attempts, task.environment) for task in tasks} == {("tasks", 2, "multiple_choice")}
    assert (manifest.groups, manifest.attempts, manifest.environments) == (700, 2, {"multiple_choice": 700})


async def test_the_same_file_into_the_same_run_adds_nothing(settings: Settings, tmp_path: Path) -> None:
    wanted = request(task_file(tmp_path, [row(number) for number in range(5)]))
    assert await published(wanted, settings) == Published(groups=5, already=0, resumed=False)
    assert await published(wanted, settings) == Published(groups=0, already=5, resumed=True)
    assert len(await tasks_on_the_log(settings)) == 5


async def test_a_file_that_is_written_differently_is_still_the_same(settings: Settings, tmp_path: Path) -> None:
    await published(request(task_file(tmp_path, [row(1), row(2)])), settings)
    rewritten = [dict(reversed(row(1).items())), "", json.dumps(row(2), indent=None, separators=(" ,", " : "))]
    assert (await published(request(task_file(tmp_path, rewritten)), settings)).groups == 0


async def test_a_publication_that_was_interrupted_is_completed(settings: Settings, tmp_path: Path) -> None:
    assert settings.bootstrap_servers is not None
    wanted = request(task_file(tmp_path, [row(number) for number in range(5)]))
    plan = plan_run(wanted, settings, datetime.now(UTC))
    some = [TaskSubmitted.create(run="r", environment="multiple_choice", task=task.task, row=task.row, attempts=2)
            for task in await _planned(wanted, settings) if task.task.id in ("t0", "t3")]  # fmt: skip
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish([plan.manifest, *some])

    assert await published(wanted, settings) == Published(groups=3, already=2, resumed=True)
    assert {task.task.id for task in await tasks_on_the_log(settings)} == {"t0", "t1", "t2", "t3", "t4"}


async def _planned(wanted: RunRequest, settings: Settings) -> list[TaskSubmitted]:
    return [one.task for one in tasks_of(wanted, settings, datetime.now(UTC)) if isinstance(one, Accepted)]


async def test_another_experiment_under_the_same_name_is_refused_with_what_differs(settings: Settings, tmp_path: Path) -> None:
    await published(request(task_file(tmp_path, [row(1), row(2)])), settings)
    with pytest.raises(
        RunDiffers, match=r"(?s)run r exists and is another experiment.*groups: 2 -> 1.*attempts: 2 -> 7.*--run"
    ):
        await published(request(task_file(tmp_path, [row(1)]), attempts=7), settings)
    assert len(await tasks_on_the_log(settings)) == 2


async def test_repeated_ids_of_one_file_are_tasks_of_their_own(settings: Settings, tmp_path: Path) -> None:
    unnamed = {name: value for name, value in row(4).items() if name != "id"}
    await published(request(task_file(tmp_path, [row(1), row(1), row(1), unnamed, unnamed])), settings)
    ids = sorted(task.task.id for task in await tasks_on_the_log(settings))
    assert ids[-3:] == ["t1", "t1#1", "t1#2"]
    assert ids[1] == f"{ids[0]}#1"


async def test_a_row_of_10_mb_is_published(settings: Settings, tmp_path: Path) -> None:
    await published(request(task_file(tmp_path, [row(1) | {"note": "x" * 10_000_000}])), settings)
    (task,) = await tasks_on_the_log(settings)
    assert len(str(task.row["note"])) == 10_000_000


def command(settings: Settings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    assert settings.bootstrap_servers is not None
    environment = {
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(settings.kafka.partitions),
    }
    return subprocess.run(
        [sys.executable, "-m", "rollstream.cli", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_refused_rows_are_told_by_line_and_the_others_are_published(settings: Settings, tmp_path: Path) -> None:
    rows = [row(1), "nonsense", {"question": "no answer", "options": ["a", "b"]}, row(2), '{"a": "\udcff"}']
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(
        b"".join((one if isinstance(one, str) else json.dumps(one)).encode(errors="surrogateescape") + b"\n" for one in rows)
    )
    done = command(settings, "publish", str(path), "-e", "multiple_choice", "--run", "r", "-k", "3")
    assert done.returncode == 1
    assert done.stdout == "run r: published 2 tasks x 3 attempts = 6 rollouts\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "line 2: expected JSON, found none: Expecting value at column 1"
    assert lines[1].startswith("line 3: expected a task of environment multiple_choice, found expected_answer: Field required")
    assert lines[2] == "line 5: expected UTF-8, found byte 0xff at position 7"
    assert lines[3:] == ["3 of 5 rows refused"]


def test_a_file_without_a_single_task_publishes_no_run(settings: Settings, tmp_path: Path) -> None:
    done = command(settings, "publish", str(task_file(tmp_path, ["nonsense"])), "-e", "multiple_choice", "--run", "r")
    assert done.returncode == 1
    assert "can be published" in done.stderr
    assert command(settings, "watch", "r").stderr == "error: no run is named 'r'; no run was published here yet\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-e", "mutiple_choice"], "did you mean multiple_choice?"),
        (
            ["-e", "math", "--harness", "oracel"],
            "found 'oracel'; did you mean oracle?",
        ),
        (["-e", "math", "--model", "gpt"], "no model is named 'gpt'"),
        (["-e", "math", "--sampling", "temperature=hot"], "temperature: Input should be a valid number"),
        (["-e", "math", "--sampling", "heat=1"], "--sampling knows temperature, top_p, max_tokens, seed, stop"),
        (["-e", "math", "--role", "policy=x"], "the policy is chosen with --model"),
        (["-e", "math", "--run", " "], "a run's name has 1 to 200 printable characters"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_published(
    settings: Settings, tmp_path: Path, options: list[str], sentence: str
) -> None:
    done = command(settings, "publish", str(task_file(tmp_path, [row(1)])), *options)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


class Shown:
    """What a watch showed."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.sentences: set[str] = set()

    def __call__(self, snapshot: Snapshot, sentences: Sequence[str]) -> None:
        self.snapshots.append(snapshot)
        self.sentences.update(sentences)


async def test_a_watch_says_within_5_seconds_that_nobody_works(settings: Settings, tmp_path: Path) -> None:
    assert settings.bootstrap_servers is not None
    await published(request(task_file(tmp_path, [row(1)])), settings)
    shown = Shown()
    with pytest.raises(NotFinished, match="run r is not finished after 5 s: 0/2 done"):
        await follow(settings.bootstrap_servers, settings, "r", shown, timeout_s=5)
    assert "nobody consumes sessions.ready: start an agent_worker (`rollstream up`)" in shown.sentences


async def _endings(settings: Settings) -> list[RolloutScored]:
    """A terminal record for every attempt that was published."""
    error = ErrorInfo(kind="k", stage="agent", message="m", retryable=False)
    return [
        RolloutScored.of_failure(ids, error, task.occurred_at)
        for task in await tasks_on_the_log(settings)
        for ids in GroupIds("r", task.group, task.attempts, task.environment, task.task).sessions()
    ]


async def test_a_watch_ends_when_every_attempt_is_terminal_and_counts_none_twice(settings: Settings, tmp_path: Path) -> None:
    assert settings.bootstrap_servers is not None
    await published(request(task_file(tmp_path, [row(1), row(2)])), settings)
    endings = await _endings(settings)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish([*endings, *endings])

    snapshot = await follow(settings.bootstrap_servers, settings, "r", Shown(), timeout_s=30)
    assert (snapshot.total, snapshot.done, snapshot.failed, snapshot.mean_reward) == (4, 4, 4, None)


async def test_a_watch_misses_nothing_that_arrives_while_it_begins(settings: Settings, tmp_path: Path) -> None:
    assert settings.bootstrap_servers is not None
    await published(request(task_file(tmp_path, [row(number) for number in range(60)]), attempts=1), settings)
    endings = await _endings(settings)

    async def arrive() -> None:
        assert settings.bootstrap_servers is not None
        async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
            for ending in endings:
                await producer.publish([ending])

    arriving = asyncio.create_task(arrive())
    snapshot = await follow(settings.bootstrap_servers, settings, "r", Shown(), timeout_s=30)
    await arriving
    assert snapshot.done == 60


async def test_a_run_without_manifest_is_watched_by_its_headers(settings: Settings, tmp_path: Path) -> None:
    assert settings.bootstrap_servers is not None
    tasks = await _planned(request(task_file(tmp_path, [row(1), row(2)]), run="adhoc"), settings)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish(tasks)
    shown = Shown()
    with pytest.raises(NotFinished):
        await follow(settings.bootstrap_servers, settings, "adhoc", shown, timeout_s=1)
    assert shown.snapshots[0].total == 4


async def test_an_unknown_run_is_told_with_the_recent_ones(settings: Settings, tmp_path: Path) -> None:
    assert settings.bootstrap_servers is not None
    await published(request(task_file(tmp_path, [row(1)])), settings)
    with pytest.raises(UsageError, match="no run is named 'q'; recent runs: r"):
        await follow(settings.bootstrap_servers, settings, "q", Shown())


async def test_what_waits_for_a_worker_is_its_lag(settings: Settings, tmp_path: Path) -> None:
    assert settings.bootstrap_servers is not None
    await published(request(task_file(tmp_path, [row(number) for number in range(5)])), settings)
    async with open_groups(settings.bootstrap_servers, settings) as groups:
        states = {state.consumption.topic.name: state for state in await groups.describe()}
    assert (states["tasks.in"].lag, states["tasks.in"].members) == (5, ())
    assert states["sessions.ready"].lag == 0


# Into a run that is held up.


async def test_a_cancelled_run_takes_no_more_tasks_and_a_paused_one_says_that_it_waits(
    settings: Settings, tmp_path: Path
) -> None:
    some, more = request(task_file(tmp_path, [row(1)])), request(task_file(tmp_path, [row(1), row(2)]), run="cancelled")
    plan = plan_run(more, settings, datetime.now(UTC))
    pause = RunPaused.create(run="r", reason="the key is refused", cause="k", by="w")
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish([plan.manifest, pause, RunCancelled.create(run="cancelled")])

    with pytest.raises(RunIsOver, match=r"run cancelled is cancelled.*`rollstream resume cancelled` first"):
        await published(more, settings)
    assert await tasks_on_the_log(settings) == []
    assert (await published(replace(some, path=more.path), settings)).held_up == "is paused: the key is refused"


async def test_publishing_what_a_cancelled_run_has_already_says_how_to_run_it_again(settings: Settings, tmp_path: Path) -> None:
    wanted = request(task_file(tmp_path, [row(1)]))
    await published(wanted, settings)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish([RunCancelled.create(run="r")])

    again = await published(wanted, settings)
    assert (again.groups, again.already) == (0, 1)
    assert again.held_up == "is cancelled: `rollstream resume r --cancelled` drives it again"


async def test_what_rows_name_beside_their_file_is_kept_before_their_tasks_stand_on_the_log(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/lib.py").write_text("bug = True\n")
    rows = [{"task_id": f"t{number}", "instruction": "mend it", "repo": "project"} for number in range(3)]
    path = task_file(tmp_path, [*rows, {"task_id": "t3", "instruction": "mend it", "repo": "nowhere"}])
    wanted = replace(
        request(path), environment="code_repair", composition=Composition(harness="noop", sandbox="bubblewrap"), attempts=1
    )
    assert await published(wanted, settings) == Published(groups=3, already=0, resumed=False)
    assert await published(wanted, settings) == Published(groups=0, already=3, resumed=True)

    tasks = await tasks_on_the_log(settings)
    assert [sorted(task.row) for task in tasks] == [["archive", "base", "instruction", "task_id"]] * 3
    (text,) = {str(task.row["archive"]) for task in tasks}
    reference = BlobReference.parse(text)
    assert reference is not None
    assert len(await BlobStore.of(settings).get(reference)) == reference.size_bytes
