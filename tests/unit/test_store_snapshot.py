"""The published copy: whole, read-only, without grading data, and in nobody's way."""

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from rollstream.store.database import StoreFiles
from rollstream.store.snapshot import Schedule
from schemas.failure import DeadLettered
from tests.events import CANARY, START, Attempt, Log, run_published, task_submitted
from tests.stores import answer, publish_events, writing

REPOSITORY = Path(__file__).parents[2]


def published_file(data_dir: Path) -> Path:
    return data_dir / "trajectories.duckdb"


def canary_everywhere(tmp_path: Path) -> None:
    """A published store of records that all carry the canary where grading data may stand."""
    log = Log()
    task = task_submitted()
    bare = log.raw("tasks.in", b'{"question": "?", "answer": "%s"}' % CANARY.encode())
    garbage = log.raw("tasks.in", b'{"answer": "%s"' % CANARY.encode())
    newer = log.raw("sessions.ready", b'{"kind": "SessionReady", "schema_version": 9, "ticket": "%s"}' % CANARY.encode())
    letter = DeadLettered.of_record(
        boundary="env_worker",
        reason="expected a task, found none",
        topic="tasks.in",
        partition=0,
        offset=1,
        key=CANARY.encode(),
        value=CANARY.encode(),
        headers=[("canary", CANARY.encode())],
        recorded_at=START,
        traceback=f"ValueError: {CANARY}",
    )
    with writing(tmp_path) as store:
        store.apply([bare, garbage, newer, *log.records(run_published(), task, *Attempt(task).interaction(), letter)])
        store.publish()


def test_grading_data_is_in_no_table_of_the_published_file(tmp_path: Path) -> None:
    canary_everywhere(tmp_path)
    with duckdb.connect(str(published_file(tmp_path)), read_only=True) as connection:
        tables = [name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()]
        views = [name for (name,) in connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()]
        assert len(tables) > 10
        for name in (*tables, *views):
            for row in connection.execute(f'SELECT * FROM "{name}"').fetchall():
                assert CANARY not in repr(row), name


def test_grading_data_is_nowhere_in_the_bytes_of_the_published_file(tmp_path: Path) -> None:
    # The tables see through compression; the bytes see free blocks, dictionaries and statistics.
    canary_everywhere(tmp_path)
    assert CANARY.encode() not in published_file(tmp_path).read_bytes()
    assert CANARY.encode() not in StoreFiles(tmp_path).public.read_bytes()


def test_what_is_withheld_is_in_the_private_file(tmp_path: Path) -> None:
    canary_everywhere(tmp_path)
    with duckdb.connect(str(StoreFiles(tmp_path).private), read_only=True) as connection:
        tasks = connection.execute("SELECT count(*) FROM task_rows WHERE contains(payload, ?)", [CANARY]).fetchall()
        assert tasks == [(2,)]
        raw = connection.execute("SELECT why FROM raw_records ORDER BY why").fetchall()
        assert raw == [("dead letter",), ("dead row",), ("unknown event",)]


def test_a_dead_letter_tells_why_and_the_store_does_not_repeat_it(tmp_path: Path) -> None:
    canary_everywhere(tmp_path)
    found = answer(tmp_path, "SELECT boundary, reason, topic, kafka_partition, kafka_offset FROM dead_letters")
    assert found == [("env_worker", "expected a task, found none", "tasks.in", 0, 1)]


def test_the_copy_says_when_it_was_made_and_of_which_offsets(tmp_path: Path) -> None:
    publish_events(tmp_path, Attempt().scored())
    found = answer(tmp_path, "SELECT published_at IS NOT NULL, offsets ->> '$.\"rollouts.scored/0\"' FROM snapshot_info")
    assert found == [(True, "1")]


def test_the_copy_is_read_only(tmp_path: Path) -> None:
    publish_events(tmp_path)
    assert published_file(tmp_path).stat().st_mode & 0o777 == 0o444


def test_an_open_reader_keeps_its_copy_and_a_new_one_sees_the_next(tmp_path: Path) -> None:
    log = Log()
    with writing(tmp_path) as store:
        store.publish()
        with duckdb.connect(str(published_file(tmp_path)), read_only=True) as old:
            store.apply(log.records(Attempt().scored()))
            store.publish()
            assert old.execute("SELECT count(*) FROM rollouts").fetchall() == [(0,)]
        assert answer(tmp_path, "SELECT count(*) FROM rollouts") == [(1,)]


def test_what_a_crashed_reader_left_behind_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "trajectories.duckdb.wal"
    leftover.write_bytes(b"left by a crashed reader")
    publish_events(tmp_path, Attempt().scored())
    assert not leftover.exists()
    assert answer(tmp_path, "SELECT count(*) FROM rollouts") == [(1,)]


READER = """
import sys
from pathlib import Path
from tests.stores import answer

print("ready", flush=True)
seen = 0
for line in sys.stdin:
    break
for _ in range(60):
    count, distinct = answer(Path(sys.argv[1]), "SELECT count(*), count(DISTINCT rollout_id) FROM rollouts")[0]
    assert seen <= count == distinct, (seen, count, distinct)
    seen = count
print(seen, flush=True)
"""


def test_another_process_reads_while_the_writer_writes_and_publishes(tmp_path: Path) -> None:
    log = Log()
    task = task_submitted(attempts=10_000)
    command = [sys.executable, "-c", READER, str(tmp_path)]
    with (
        writing(tmp_path) as store,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as reader,
    ):
        assert reader.stdout is not None
        store.publish()
        assert reader.stdout.readline() == "ready\n"
        index = 0
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.close()
        while reader.poll() is None:
            store.apply(log.records(Attempt(task, index=index).scored()))
            index += 1
            store.publish()
        assert reader.returncode == 0
        assert 0 < int(reader.stdout.readline()) <= index


@pytest.mark.parametrize(
    ("changed", "now", "due"),
    [
        pytest.param(False, 1e9, False, id="nothing changed"),
        pytest.param(True, 4.9, False, id="within the interval"),
        pytest.param(True, 5.0, True, id="the interval is over"),
    ],
)
def test_a_copy_is_due_when_something_changed_and_the_interval_is_over(changed: bool, now: float, due: bool) -> None:
    schedule = Schedule(interval_s=5.0)
    schedule.published(started=0.0, finished=0.1)
    schedule.changed = changed
    assert schedule.due(now) is due


def test_the_first_copy_is_due_at_once() -> None:
    assert Schedule(interval_s=5.0).due(0.0)


def test_a_copy_that_takes_long_is_made_less_often() -> None:
    schedule = Schedule(interval_s=5.0)
    schedule.published(started=0.0, finished=2.0)
    schedule.changed = True
    assert not schedule.due(21.9)
    assert schedule.due(22.0)
