"""What happens to the files of a store: removed, cut, filled up, pruned, compacted, of an older make."""

import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import duckdb
import pytest

from rollstream.errors import UsageError
from rollstream.store.database import StoreFiles, StoreLost
from rollstream.store.lock import writer_of
from rollstream.store.projection import Store
from rollstream.store.rebuild import FOLDER, beside, compact
from tests.events import Attempt, Log, task_submitted
from tests.stores import SETTINGS, answer, publish_events, writing

REPOSITORY = Path(__file__).parents[2]
EVENTS = "SELECT count(*), count(DISTINCT event_id) FROM events"


def two_runs() -> list[object]:
    tasks = [task_submitted("a", run="keep"), task_submitted("b", run="drop")]
    return [event for task in tasks for event in (task, *Attempt(task, answer="long " * 10_000).events())]


def test_a_file_that_is_removed_while_it_is_written_is_noticed_and_built_anew(tmp_path: Path) -> None:
    batch = Log().records(*Attempt().events())
    with writing(tmp_path) as store:
        store.apply(batch[:2])
        StoreFiles(tmp_path).public.unlink()
        with pytest.raises(StoreLost, match=r"store\.duckdb was removed while the store_worker wrote it"):
            store.apply(batch[2:])
        with pytest.raises(StoreLost, match="was removed"):
            store.publish()
        store.reopen()
        assert store.offsets() == {}
        assert store.apply(batch) == 5
        store.publish()
    assert answer(tmp_path, EVENTS) == [(5, 5)]


@pytest.mark.parametrize("kept", [0, 5_000, 300_000], ids=lambda kept: f"{kept} bytes kept")
def test_a_file_that_is_cut_while_it_is_written_is_noticed_and_built_anew(
    tmp_path: Path, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    batch = Log().records(*Attempt(answer="x" * 400_000).events())
    path = StoreFiles(tmp_path).public
    with writing(tmp_path) as store:
        store.apply(batch)
        store.publish()
        with path.open("r+b") as file:
            file.truncate(kept)
        with pytest.raises(StoreLost, match=f"was cut to {kept} bytes"):
            store.publish()
        store.reopen()
        assert "is damaged" in caplog.text
        assert store.offsets() == {}
        store.apply(batch)
        store.publish()
    assert answer(tmp_path, EVENTS) == [(5, 5)]


@pytest.mark.parametrize("content", [b"", b"not a database" * 1_000], ids=["empty", "garbage"])
@pytest.mark.parametrize("name", ["public", "private"])
def test_a_file_that_is_no_store_is_set_aside_at_the_next_start(
    tmp_path: Path, content: bytes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish_events(tmp_path, *Attempt().events())
    path: Path = getattr(StoreFiles(tmp_path), name)
    path.write_bytes(content)
    with writing(tmp_path) as store:
        assert store.offsets() == {}
    assert "set aside, and built anew from the log" in caplog.text


def test_a_file_that_another_process_has_open_is_not_set_aside(tmp_path: Path) -> None:
    publish_events(tmp_path, *Attempt().events())
    holder = f"import duckdb, sys; c = duckdb.connect({str(StoreFiles(tmp_path).public)!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(StoreLost, match=r"cannot be opened: .*[Ll]ock"):
            Store.open(tmp_path, SETTINGS)
        process.communicate("\n")
    with writing(tmp_path) as store:
        assert sum(store.offsets().values()) == 5


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE rollout_scored DROP COLUMN verify_s",
        "ALTER TABLE rollout_scored RENAME COLUMN reward TO points",
        "DROP TABLE duplicate_records CASCADE",
        "UPDATE schema_version SET version = 3",
        "DELETE FROM schema_version",
    ],
)
def test_a_store_with_other_tables_than_this_version_has_is_built_anew(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish_events(tmp_path, *Attempt().events())
    with duckdb.connect(str(StoreFiles(tmp_path).public)) as connection:
        for (view,) in connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall():
            connection.execute(f'DROP VIEW IF EXISTS "{view}"')
        connection.execute(change)
    with writing(tmp_path) as store:
        assert store.offsets() == {}
        assert "older schema: set aside, and built anew from the log" in caplog.text
        store.apply(Log().records(*Attempt().events()))
        store.publish()
    assert answer(tmp_path, EVENTS) == [(5, 5)]


def test_a_store_that_takes_anothers_place_keeps_no_write_ahead_log(tmp_path: Path) -> None:
    events = Log().records(*Attempt().events())
    with beside(tmp_path, SETTINGS) as store:
        store.apply(events)
        assert not list(StoreFiles(tmp_path, FOLDER).folder.glob("*.wal"))
    assert answer(tmp_path, EVENTS) == [(5, 5)]
    with writing(tmp_path) as store:
        assert sum(store.offsets().values()) == 5
        store.apply(Log().records(task_submitted()))
        assert list(StoreFiles(tmp_path).folder.glob("*.wal"))


FULL = """
import os, sys
from pathlib import Path
from rollstream.store.database import StoreLost
from tests.events import Attempt, Log, task_submitted
from tests.stores import SETTINGS, answer
from rollstream.store.projection import Store

root, what = Path(sys.argv[1]), sys.argv[2]
store, log, records, lost = Store.open(root, SETTINGS), Log(), [], 0
ballast = root / "ballast"

def fill(left):
    with ballast.open("wb") as file:
        try:
            while os.statvfs(root).f_bavail * os.statvfs(root).f_frsize > left:
                file.write(bytes(65536)); file.flush()
        except OSError:
            pass

def attempt(call):
    global lost
    try:
        call()
    except StoreLost as error:
        assert "No space left" in str(error), error
        lost += 1
        return False
    return True

for number in range(6):
    task = task_submitted(f"task-{number}")
    batch = log.records(task, *Attempt(task, answer=os.urandom(60_000).hex()).events())
    records += batch
    if number == 0:
        assert attempt(lambda: store.apply(batch)) and attempt(store.publish)
        fill(0 if what == "batch" else 1 << 19)
        continue
    attempt(lambda: store.apply(batch)) and attempt(store.publish)
    if lost:
        break
assert lost == 1, lost
# What was published last is still there, whole.
assert answer(root, "SELECT count(*) FROM events")[0][0] >= 6
assert not (root / ".trajectories.duckdb.tmp").exists()
ballast.unlink()
store.reopen()
offsets = store.offsets()
store.apply([record for record in records if record.offset >= offsets.get((record.topic, record.partition), 0)])
store.publish()
store.close()
assert answer(root, "SELECT count(*), count(DISTINCT event_id) FROM events") == [(len(records), len(records))]
print("nothing lost")
"""


@pytest.mark.parametrize("what", ["batch", "publication"])
def test_a_full_disk_loses_nothing(tmp_path: Path, what: str) -> None:
    # In a mount namespace of its own, so that the small disk is gone with the process.
    script = f'mount -t tmpfs -o size=16m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$FULL" "{tmp_path}" {what}'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        env={"FULL": FULL, "PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "nothing lost\n", done.stderr


def test_a_copy_that_a_user_opens_for_writing_hurts_nobody(tmp_path: Path) -> None:
    log = Log()
    published = StoreFiles(tmp_path).published
    with writing(tmp_path) as store:
        store.apply(log.records(Attempt().scored()))
        store.publish()
        # Root ignores 0444. Whoever writes has the old file; the next copy takes its place.
        published.chmod(0o644)
        user = duckdb.connect(str(published))
        user.execute("DELETE FROM rollout_scored")
        store.apply(log.records(Attempt(task_submitted("b")).scored()))
        store.publish()
        user.close()
        store.remove_leftovers()
    assert answer(tmp_path, "SELECT count(*) FROM rollouts") == [(2,)]


def test_what_is_pruned_is_gone_from_both_files_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    log = Log()
    records = log.records(*two_runs(), *two_runs())  # type: ignore[arg-type]
    with writing(tmp_path) as store:
        store.apply(records)
        removed = store.prune(None, "drop")
        store.publish()
        # Six events, as many repeated, and the long payloads' parts.
        assert removed > 12
        assert store.apply(records) == 0
    assert answer(tmp_path, "SELECT DISTINCT run_id FROM events") == [("keep",)]
    assert answer(tmp_path, "SELECT count(*) FROM long_payloads WHERE run_id = 'drop'") == [(0,)]
    assert answer(tmp_path, "SELECT count(*) FROM duplicate_records") == [(6,)]
    with duckdb.connect(str(StoreFiles(tmp_path).private)) as private:
        assert private.execute("SELECT DISTINCT run_id FROM task_rows").fetchall() == [("keep",)]


def test_pruning_by_time_goes_by_the_logs_own(tmp_path: Path) -> None:
    log = Log()
    old = log.raw("verdicts", Attempt().verdict().to_json(), at=datetime(2026, 1, 1))
    new = log.raw("verdicts", Attempt(index=1).verdict().to_json(), at=datetime(2026, 2, 1))
    with writing(tmp_path) as store:
        store.apply([old, new])
        assert store.prune(datetime(2026, 1, 15), None) == 1
        store.publish()
    assert answer(tmp_path, "SELECT group_index FROM verdict_reached") == [(1,)]


def test_a_pruned_store_that_is_built_anew_for_a_new_version_stays_pruned(tmp_path: Path) -> None:
    records = Log().records(*two_runs())  # type: ignore[arg-type]
    with writing(tmp_path) as store:
        store.apply(records)
        store.prune(None, "drop")
    for path in (StoreFiles(tmp_path).public, StoreFiles(tmp_path).private):
        with duckdb.connect(str(path)) as connection:
            connection.execute("UPDATE schema_version SET version = 1")
    with writing(tmp_path) as store:
        for start in range(0, len(records), 5):
            store.apply(records[start : start + 5])
        later = Attempt(task_submitted("later", run="drop"))
        log = Log()
        log._ends = {("verdicts", 0): store.offsets()["verdicts", 0]}
        store.apply([log.record(later.verdict())])
        store.publish()
    assert answer(tmp_path, "SELECT run_id, count(*) FROM events GROUP BY 1 ORDER BY 1") == [("drop", 1), ("keep", 6)]


def test_a_compacted_store_is_smaller_and_says_the_same(tmp_path: Path) -> None:
    log = Log()
    everything = "FROM events ORDER BY event_id"
    with writing(tmp_path) as store:
        for number in range(40):
            task = task_submitted(f"task-{number}", run="drop" if number % 10 else "keep")
            store.apply(log.records(task, *Attempt(task, answer=f"{number} " * 20_000).events()))
            store.publish()
        store.prune(None, "drop")
        store.publish()
        offsets = store.offsets()
    before = answer(tmp_path, everything)
    was, now = compact(tmp_path, SETTINGS)
    assert now < was
    assert answer(tmp_path, everything) == before
    with writing(tmp_path) as store:
        assert store.offsets() == offsets
        assert answer(tmp_path, "SELECT count(*) > 0 FROM prunings") == [(True,)]


def test_a_store_that_is_written_is_not_compacted(tmp_path: Path) -> None:
    with writing(tmp_path), pytest.raises(UsageError, match="is being written by process"):
        compact(tmp_path, SETTINGS)


def test_who_writes_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert writer_of(tmp_path) is None
    with writing(tmp_path):
        assert writer_of(tmp_path) is not None
    assert writer_of(tmp_path) is None
