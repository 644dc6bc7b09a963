"""What bites a store, through the whole path: from bytes on a topic to the published copy and back to the log."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from rollstream.cli.store import app
from rollstream.errors import UsageError
from rollstream.eventlog.producer import EventProducer
from rollstream.settings import Settings, StoreSettings
from rollstream.store.database import StoreFiles
from rollstream.store.decoding import READABLE
from rollstream.store.planned import open_planned
from schemas.envelope import Event
from tests.events import Attempt, run_published, task_submitted
from tests.flow.flows import publish
from tests.flow.test_store_flow import eventually, projecting, published
from tests.flow.test_store_upkeep import rebuilt, verified
from topics.catalogue import BY_EVENT

pytestmark = pytest.mark.kafka

REPOSITORY = Path(__file__).parents[2]
MARK = "BITE"
BITES: dict[str, tuple[bytes, bool]] = {
    "a lone surrogate": (rb'"a\ud800z"', True),
    "invalid UTF-8": (b'"a\xff\xfez"', True),
    "a surrogate as UTF-8": (b'"a\xed\xa0\x80z"', True),
    "NUL": (rb'"a\u0000z"', False),
    "NaN": (b"NaN", True),
    "Infinity": (b"-Infinity", True),
    "1e400": (b"1e400", True),
    "2^63": (b"9223372036854775808", False),
    "2^64": (b"18446744073709551616", True),
    "a long integer": (b"1" * 400, True),
    "a duplicate key": (b'{"a": 1, "a": 2}', False),
    "an emoji in escapes": (rb'"\ud83d\ude00"', False),
    "a list": (b"[[]]", False),
    "null": (b"null", False),
}
"""JSON values that readers differ on, and whether they have to be spelled out to be stored."""
DEADLINE_S = 240.0
NEEDED = {"kind", "event_id"}
"""Without them a record is no event of its topic."""


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"store": StoreSettings(publish_interval_s=0.2)})


def bitten(event: Event) -> Iterator[tuple[str, bytes]]:
    """The event with each of its texts replaced by each of what bites; its id by another one."""
    for path in _texts(orjson.loads(event.to_json()), ()):
        if path[0] in NEEDED:
            continue
        for name, (raw, _) in BITES.items():
            body = orjson.loads(event.to_json())
            parent = body
            for step in path[:-1]:
                parent = parent[step]
            parent[path[-1]] = MARK
            body["event_id"] = f"{event.kind}/{'.'.join(map(str, path))}/{name}"
            yield name, orjson.dumps(body).replace(b'"' + MARK.encode() + b'"', raw)


def _texts(value: object, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, str):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _texts(inner, (*path, key))


async def test_every_text_of_every_event_survives_whatever_stands_in_it(settings: Settings, topics: None) -> None:
    task = task_submitted()
    attempt = Attempt(task)
    events = [run_published(), task, *attempt.events(), attempt.failed(), attempt.retry()]
    records = [(BY_EVENT[type(event)].name, raw) for event in events for _, raw in bitten(event)]
    assert len(records) > 1_500
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await asyncio.gather(*(producer.publish_raw(topic, None, raw) for topic, raw in records))
    async with projecting(settings) as projector, asyncio.timeout(DEADLINE_S):
        while projector.last_apply is None or projector.behind:
            await asyncio.sleep(0.1)
    assert published(settings, "SELECT sum(next_offset) FROM lag") == [(len(records),)]
    tables = ("events", "duplicate_records", "dead_rows", "unknown_events")
    counts = [published(settings, f"SELECT count(*) FROM {table}")[0][0] for table in tables]
    assert sum(map(int, map(str, counts))) == len(records)
    assert published(settings, "SELECT count(*) FROM events WHERE NOT json_valid(payload)") == [(0,)]
    # What had to be spelled out says so, wherever it stood; a task without its ids is kept as one in another form.
    kinds = ("session_ready", "agent_stepped", "verdict_reached", "rollout_scored")
    escaped = " UNION ALL ".join(f"SELECT escaped FROM {table}" for table in kinds)
    told = dict(published(settings, f"SELECT escaped, count(*) FROM ({escaped}) GROUP BY 1"))
    assert told[True] > told[False] > 0
    # No number that is none, and nothing that a reader stumbles over.
    for view in ("rollouts", "trajectories", "steps", "groups", "pass_at_k", "failures", "usage", "runs", "retries"):
        published(settings, f"SELECT count(*), max(v::VARCHAR) FROM {view} AS v")
    found = await verified(settings)
    assert (found.is_clean, found.records) == (True, len(records)), found.differences


async def test_events_out_of_order_and_repeated_give_the_same_answers(settings: Settings, topics: None) -> None:
    task = task_submitted(attempts=2)
    first, second = Attempt(task), Attempt(task, index=1, reward=0.0)
    events = [*first.events(), *second.events(), task, run_published(attempts=2)]
    await publish(settings, *reversed(events), *events)
    async with projecting(settings):
        await eventually(settings, "SELECT sum(next_offset) FROM lag", (2 * len(events),))
    assert published(settings, "SELECT count(*), count(DISTINCT event_id) FROM events") == [(len(events), len(events))]
    assert published(settings, "SELECT count(*) FROM duplicate_records") == [(len(events),)]
    assert published(settings, "SELECT scored, succeeded, complete FROM groups") == [(2, 1, True)]


async def test_events_of_a_later_version_get_their_rows_from_a_rebuild_after_the_upgrade(
    settings: Settings, topics: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = orjson.dumps(orjson.loads(Attempt().scored().to_json()) | {"schema_version": 2})
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish_raw("rollouts.scored", None, later)
    async with projecting(settings):
        await eventually(settings, "SELECT kind, schema_version FROM unknown_events", ("RolloutScored", 2))
    assert published(settings, "SELECT count(*) FROM rollouts") == [(0,)]
    monkeypatch.setitem(READABLE, "RolloutScored", 2)
    upgraded = partial(open_planned, module="tests.flow.upgraded_planner")
    monkeypatch.setattr("rollstream.store.rebuild.open_planned", upgraded)
    status = CliRunner().invoke(app, ["status", "--data-dir", str(settings.data_dir)])
    assert "unknown RolloutScored v2" in status.output
    assert "known now: `rollstream store rebuild`" in status.output
    await rebuilt(settings)
    assert published(settings, "SELECT count(*) FROM rollouts") == [(1,)]
    assert published(settings, "SELECT count(*) FROM unknown_events") == [(0,)]


async def test_files_that_are_removed_under_a_running_worker_are_built_anew(
    settings: Settings, topics: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with projecting(settings):
        await publish(settings, *Attempt().events())
        await eventually(settings, "SELECT count(*) FROM events", (5,))
        StoreFiles(settings.data_dir).public.unlink()
        await publish(settings, *Attempt(task_submitted("another")).events())
        await eventually(settings, "SELECT count(*), count(DISTINCT event_id) FROM events", (10, 10))
    assert "store.duckdb was removed while the store_worker wrote it; trying again" in caplog.text
    assert (await verified(settings)).is_clean


async def test_a_second_store_worker_says_who_writes_and_exits(settings: Settings, topics: None) -> None:
    environment = {
        **os.environ,
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(settings.kafka.partitions),
    }
    command = [sys.executable, "-m", "services", "store_worker"]
    async with projecting(settings):
        second = await asyncio.to_thread(
            subprocess.run, command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
        )
        assert second.returncode == 2
        assert f"is being written by process {os.getpid()}; stop it" in second.stderr
        assert "Traceback" not in second.stderr


async def test_the_commands_say_what_they_did(settings: Settings, topics: None) -> None:
    await publish(settings, task_submitted(), *Attempt().events())
    directory = ["--data-dir", str(settings.data_dir)]

    def told(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, *directory])
        assert result.exit_code == 0, result.exception
        return result.output

    async with projecting(settings):
        await eventually(settings, "SELECT count(*) FROM events", (6,))
        assert f"process {os.getpid()}" in told("status")
        for refused in (["prune", "--run", "run-1"], ["compact"]):
            error = CliRunner().invoke(app, [*refused, *directory]).exception
            assert isinstance(error, UsageError)
            assert "is being written by process" in str(error)
    assert "nobody" in told("status")
    assert "nothing removed: the store has no rows of run other" in told("prune", "--run", "other")
    assert "removed 6 rows of run run-1; the log keeps them" in told("prune", "--run", "run-1")
    assert "MiB now" in told("compact")
    assert published(settings, "SELECT count(*) FROM events") == [(0,)]
    found = await verified(settings)
    assert (found.is_clean, found.records) == (True, 0)
    async with projecting(settings):
        await publish(settings, Attempt(task_submitted("later")).scored())
        await eventually(settings, "SELECT count(*) FROM events", (1,))
    assert (await verified(settings)).is_clean
    assert await rebuilt(settings) == 7
    assert published(settings, "SELECT count(*) FROM events") == [(7,)]


@pytest.mark.parametrize("arguments", [["prune"], ["prune", "--run", "a", "--before", "2026-01-01"]])
def test_prune_wants_one_of_two(arguments: list[str], tmp_path: Path) -> None:
    error = CliRunner().invoke(app, [*arguments, "--data-dir", str(tmp_path)]).exception
    assert isinstance(error, UsageError)
    assert "expected one of --before and --run" in str(error)
