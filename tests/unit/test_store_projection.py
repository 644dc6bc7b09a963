"""Exactly once: whatever is delivered how often, and wherever a crash falls."""

import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from rollstream.errors import UsageError
from rollstream.store.database import StoreFiles
from rollstream.store.projection import Store
from tests.events import CANARY, Attempt, Log, attempts, run_published, task_submitted
from tests.stores import SETTINGS, answer, publish_events, writing

REPOSITORY = Path(__file__).parents[2]
EVENTS = "SELECT count(*), count(DISTINCT event_id) FROM events"


def test_a_chain_of_events_becomes_one_row_each(tmp_path: Path) -> None:
    task = task_submitted()
    publish_events(tmp_path, run_published(), task, *Attempt(task).events())
    kinds = answer(tmp_path, "SELECT kind, topic FROM events ORDER BY kind")
    assert kinds == [
        ("AgentStepped", "agent.steps"),
        ("EpisodeCompleted", "episodes.completed"),
        ("RolloutScored", "rollouts.scored"),
        ("RunPublished", "runs.control"),
        ("SessionReady", "sessions.ready"),
        ("TaskSubmitted", "tasks.in"),
        ("VerdictReached", "verdicts"),
    ]


def test_hot_columns_hold_what_the_event_says(tmp_path: Path) -> None:
    attempt = Attempt(task_submitted(attempts=2), index=1, reward=0.25, components={"format": 0.25})
    publish_events(tmp_path, *attempt.events())
    columns = (
        "rollout_id, session_id, group_index, reward, success, reward_components, prompt_tokens, calls, model, served_model"
    )
    assert answer(tmp_path, f"SELECT {columns} FROM rollouts") == [
        (attempt.rollout, attempt.session, 1, 0.25, False, '{"format":0.25}', 10, 1, "small", "small-1b")
    ]


@pytest.mark.parametrize("cost", [0.0125, 0.0, None])
def test_what_a_call_said_that_it_cost_is_a_column(tmp_path: Path, cost: float | None) -> None:
    attempt = Attempt(cost_usd=cost)
    publish_events(tmp_path, *attempt.interaction())
    for table in ("agent_stepped", "environment_called"):
        assert answer(tmp_path, f"SELECT cost_usd, typeof(cost_usd) FROM {table}") == [(cost, "DOUBLE")]


def test_records_below_the_stored_offset_are_skipped(tmp_path: Path) -> None:
    batch = Log().records(*Attempt().events())
    with writing(tmp_path) as store:
        assert store.apply(batch) == 5
        assert store.apply(batch) == 0
        store.publish()
    assert answer(tmp_path, EVENTS) == [(5, 5)]


def test_a_redelivered_event_is_stored_once(tmp_path: Path) -> None:
    log = Log()
    attempt = Attempt()
    with writing(tmp_path) as store:
        assert store.apply(log.records(*attempt.events(), *attempt.events())) == 10
        assert store.apply(log.records(*attempt.events())) == 5
        store.publish()
    assert answer(tmp_path, EVENTS) == [(5, 5)]


def test_of_two_contents_under_one_id_the_first_by_offset_counts(tmp_path: Path) -> None:
    first, second = Attempt(answer="first"), Attempt(answer="second")
    log = Log()
    with writing(tmp_path) as store:
        store.apply(log.records(first.scored(), second.scored()))
        store.apply(log.records(second.scored()))
        store.publish()
    assert answer(tmp_path, "SELECT submission FROM rollouts") == [("first",)]


def test_a_task_published_again_much_later_is_recognised(tmp_path: Path) -> None:
    task = task_submitted()
    later = task.model_copy(
        update={"occurred_at": task.occurred_at.replace(year=2027), "caused_at": task.caused_at.replace(year=2027)}
    )
    publish_events(tmp_path, task, later)
    assert answer(tmp_path, "SELECT count(*) FROM tasks") == [(1,)]


def test_offsets_are_by_topic_and_partition_and_survive_reopening(tmp_path: Path) -> None:
    log = Log()
    attempt = Attempt()
    with writing(tmp_path) as store:
        store.apply([*log.records(*attempt.events()), log.raw("verdicts", b"{}", partition=7)])
        offsets = store.offsets()
    assert offsets[("verdicts", 0)] == 1
    assert offsets[("verdicts", 7)] == 1
    with writing(tmp_path) as store:
        assert store.offsets() == offsets


def test_a_failed_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    log = Log()
    good = log.records(*Attempt().events())
    bad = log.record(Attempt(index=1).scored())
    unfit = replace(bad, partition=2**40)
    with writing(tmp_path) as store:
        with pytest.raises(pa.ArrowInvalid):
            store.apply([*good, unfit])
        assert store.offsets() == {}
        assert store.apply(good) == 5
        store.publish()
    assert answer(tmp_path, EVENTS) == [(5, 5)]


def test_a_crash_between_the_two_files_keeps_private_rows_single(tmp_path: Path) -> None:
    files = StoreFiles(tmp_path)
    batch = Log().records(task_submitted(), *Attempt().events())
    with writing(tmp_path):
        pass
    before = shutil.copy(files.public, tmp_path / "before.duckdb")
    with writing(tmp_path) as store:
        store.apply(batch)
    shutil.copy(before, files.public)
    with writing(tmp_path) as store:
        assert store.apply(batch) == 6
    with duckdb.connect(str(files.private)) as private:
        assert private.execute("SELECT count(*) FROM task_rows").fetchall() == [(1,)]


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    with writing(tmp_path), pytest.raises(UsageError, match=f"being written by process {os.getpid()}"):
        Store.open(tmp_path, SETTINGS)
    with writing(tmp_path):
        pass


def test_a_store_of_an_older_schema_is_set_aside_and_begun_anew(tmp_path: Path) -> None:
    publish_events(tmp_path, *Attempt().events())
    with duckdb.connect(str(StoreFiles(tmp_path).public)) as connection:
        connection.execute("UPDATE schema_version SET version = 0")
    with writing(tmp_path) as store:
        assert store.offsets() == {}
    assert (tmp_path / "store" / "store.old.duckdb").is_file()


def test_a_store_without_its_private_file_is_begun_anew(tmp_path: Path) -> None:
    publish_events(tmp_path, *Attempt().events())
    StoreFiles(tmp_path).private.unlink()
    with writing(tmp_path) as store:
        assert store.offsets() == {}


def test_a_store_of_a_newer_rollstream_is_refused(tmp_path: Path) -> None:
    publish_events(tmp_path, *Attempt().events())
    with duckdb.connect(str(StoreFiles(tmp_path).public)) as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(UsageError, match="newer rollstream"):
        Store.open(tmp_path, SETTINGS)


def test_grading_data_stays_in_the_private_file(tmp_path: Path) -> None:
    publish_events(tmp_path, task_submitted())
    with duckdb.connect(str(StoreFiles(tmp_path).private)) as private:
        assert private.execute("SELECT payload ->> '$.row.expected_answer' FROM task_rows").fetchall() == [(CANARY,)]


def test_a_long_payload_is_whole_in_the_views_and_cut_in_the_columns(tmp_path: Path) -> None:
    long = Attempt(answer='é"\n' * 20_000 + "end")
    log = Log()
    with writing(tmp_path) as store:
        store.apply(log.records(*long.events(), *long.events()))
        store.apply(log.records(*long.events(), *Attempt(task_submitted("short")).events()))
        store.publish()
    assert answer(tmp_path, EVENTS) == [(10, 10)]
    transcript = "SELECT messages ->> '$[1].content' FROM trajectories ORDER BY length(messages) DESC LIMIT 1"
    assert answer(tmp_path, transcript) == [(long.answer,)]
    assert answer(tmp_path, "SELECT message ->> '$.content' FROM steps ORDER BY length(message) DESC LIMIT 1") == [
        (long.answer,)
    ]
    assert answer(tmp_path, "SELECT count(*) FROM events WHERE NOT json_valid(payload)") == [(0,)]
    submission = str(answer(tmp_path, "SELECT submission FROM rollouts ORDER BY length(submission) DESC LIMIT 1")[0][0])
    assert submission.endswith(f"[truncated by rollstream: {len(long.answer.encode())} bytes in all, 32768 kept]")


def test_no_value_of_any_table_is_long(tmp_path: Path) -> None:
    log = Log()
    huge = Attempt(task_submitted("t" * 512), answer="x" * 300_000)
    long_row = huge.task.model_copy(update={"row": {"question": "q" * 300_000}})
    letter = log.raw(
        "dead.letters", b'{"kind":"DeadLettered","event_id":"e","boundary":"%s","reason":"%s"}' % (b"b" * 10**6, b"r" * 10**6)
    )
    garbage, newer = (
        log.raw("verdicts", prefix + b"x" * 10**6 + b'"}')
        for prefix in (b"{", b'{"schema_version":9,"kind":"VerdictReached","x":"')
    )
    with writing(tmp_path) as store:
        store.apply([*log.records(long_row, *huge.events(), huge.failed(message="m" * 300_000)), letter, garbage, newer])
        store.publish()
    files = StoreFiles(tmp_path)
    for path in (files.public, files.private):
        with duckdb.connect(str(path)) as connection:
            columns = connection.execute(
                "SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal AND data_type IN ('VARCHAR', 'BLOB') "
                "AND table_name IN (SELECT table_name FROM duckdb_tables())"
            ).fetchall()
            for table, column in columns:
                longest = connection.execute(f'SELECT max(octet_length("{column}"::BLOB)) FROM "{table}"').fetchall()[0][0] or 0
                assert longest <= 33_000, (table, column, longest)


@pytest.mark.slow
def test_memory_is_bounded_however_long_the_trajectories(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LONG_WRITER, str(tmp_path)], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    # Before it may stand DuckDB's progress bar: to it, `python -c` is somebody at a prompt.
    assert int(done.stdout.split()[-1]) < 700 * 1024
    assert answer(tmp_path, "SELECT count(*), min(length(messages ->> '$[1].content')) FROM trajectories") == [(2500, 100_000)]


LONG_WRITER = """
import random, re, string, sys
from pathlib import Path
from tests.events import Attempt, Log, task_submitted
from tests.stores import writing

log, task, words = Log(), task_submitted(attempts=2500), random.Random(1)
text = "".join(words.choices(string.ascii_letters, k=200_000))
with writing(Path(sys.argv[1])) as store:
    for first in range(0, 2500, 50):
        cut = words.randrange(100_000)
        attempts = [Attempt(task, index=first + n, answer=text[cut : cut + 100_000]) for n in range(50)]
        store.apply([log.record(attempt.scored()) for attempt in attempts])
    store.publish()
# Not getrusage: what that says begins with the memory of the process that started this one.
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
WRITER = """
import sys
from pathlib import Path
from tests.events import Attempt, Log, task_submitted
from tests.stores import SETTINGS
from rollstream.store.projection import Store

store = Store.open(Path(sys.argv[1]), SETTINGS)
print("open", flush=True)
log = Log()
for number in range(100):
    task = task_submitted(f"task-{number}")
    store.apply(log.records(task, *Attempt(task).events()))
    if number % 10 == 9:
        store.publish()
store.publish()
print("done", flush=True)
"""


def test_killed_at_any_moment_nothing_is_lost_and_nothing_is_doubled(tmp_path: Path) -> None:
    # The writer builds the same log each time and begins at offset 0, as if every record were delivered again.
    moments = random.Random(7)
    kills = 0
    for attempt in range(9):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            try:
                writer.wait(timeout=0.05 + moments.random() * 0.5 if attempt < 8 else 120)
            except subprocess.TimeoutExpired:
                writer.send_signal(signal.SIGKILL)
                kills += 1
    assert kills > 4
    assert answer(tmp_path, EVENTS) == [(600, 600)]
    assert answer(tmp_path, "SELECT sum(next_offset) FROM lag") == [(600,)]
    with duckdb.connect(str(StoreFiles(tmp_path).private)) as private:
        assert private.execute("SELECT count(*), count(DISTINCT group_id) FROM task_rows").fetchall() == [(100, 100)]


def test_every_attempt_of_a_group_is_one_rollout(tmp_path: Path) -> None:
    task = task_submitted(attempts=3)
    publish_events(tmp_path, task, *(event for attempt in attempts(task, 1.0, 0.0, 0.0) for event in attempt.events()))
    assert answer(tmp_path, "SELECT environment, count(*), avg(reward) FROM rollouts GROUP BY 1") == [("math", 3, 1 / 3)]
