"""Questions to the store while it is written: what is newest, nothing but the public file, nothing but questions."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.flight as flight
import pytest
import typer
from typer.testing import CliRunner

from rollstream.cli.sql import sql
from rollstream.errors import StoreUnavailable, UsageError
from rollstream.store import fresh
from rollstream.store.projection import Store
from tests.events import CANARY, Attempt, Log, task_submitted
from tests.stores import writing
from tests.unit.test_store_docs import QUERIES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An open store with an attempt that no copy has."""
    task = task_submitted()
    with writing(tmp_path) as store:
        server = fresh.serve(store.public, tmp_path / "store")
        store.apply(Log().records(task, *Attempt(task).events()))
        yield store
        fresh.close(server, tmp_path / "store")


def asked(data_dir: Path, query: str) -> list[tuple[object, ...]]:
    return list(fresh.ask_fresh(data_dir, query).rows)


def test_what_is_not_published_yet_is_answered(store: Store, tmp_path: Path) -> None:
    assert asked(tmp_path, "SELECT environment, count(*), avg(reward) FROM rollouts GROUP BY 1") == [("math", 1, 1.0)]
    assert not (tmp_path / "trajectories.duckdb").exists()


def test_the_command_prints_it(store: Store, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(sql)
    query = "SELECT messages, scored_at, event_id FROM trajectories JOIN rollout_scored USING (rollout_id)"
    result = CliRunner().invoke(app, [query, "--fresh", "--format", "json", "--data-dir", str(tmp_path)])
    (row,) = json.loads(result.output)
    assert row["messages"][1] == {"role": "assistant", "content": "It is 2."}
    assert row["scored_at"] == "2026-03-01T12:00:05"


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[title[:40] for title, _ in QUERIES])
def test_documented_queries_can_be_asked(store: Store, tmp_path: Path, query: str) -> None:
    asked(tmp_path, query)


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH '/tmp/x.duckdb' AS x",
        "COPY rollouts TO '/tmp/x.csv'",
        "COPY (SELECT 1) TO '/dev/stdout'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('/proc/self/environ')",
        "FROM '/etc/passwd.csv'",
        "FROM glob('/**')",
        "SELECT * FROM private.task_rows",
        "SELECT * FROM task_rows",
        "SELECT getenv('HOME')",
        "PRAGMA database_list",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "RESET ALL",
        "SELECT 1; DROP TABLE rollout_scored",
        "INSTALL httpfs",
        "LOAD httpfs",
        "EXPORT DATABASE '/tmp/x'",
        "IMPORT DATABASE '/tmp/x'",
        "CALL force_checkpoint()",
        "SELECT * FROM force_checkpoint()",
        "SELECT * FROM checkpoint('store')",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM query_table(['rollouts'])",
        "WITH x AS (SELECT * FROM enable_logging()) SELECT * FROM x",
        "SELECT (SELECT count(*) FROM read_csv('/etc/passwd'))",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM parquet_scan('/etc/passwd')",
        "DELETE FROM rollout_scored",
        "UPDATE rollout_scored SET reward = 1",
        "CREATE TABLE x (i INTEGER)",
        "CREATE TEMP TABLE x AS FROM rollouts",
        "DROP VIEW rollouts",
        "DETACH store",
        "USE memory",
        "CHECKPOINT",
        "BEGIN",
        "COMMIT",
        "EXPLAIN ANALYZE DELETE FROM rollout_scored",
        "PREPARE x AS SELECT 1",
        "VACUUM",
        "",
        "SELEC 1",
    ],
)
def test_hostile_statements_are_refused_and_change_nothing(store: Store, tmp_path: Path, query: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked(tmp_path, query)
    assert "\n" not in str(caught.value)
    assert "root:" not in str(caught.value)
    assert asked(tmp_path, "SELECT count(*) FROM rollouts") == [(1,)]
    store.publish()


def test_no_catalogue_names_what_is_private(store: Store, tmp_path: Path) -> None:
    for query in (
        "SELECT * FROM information_schema.tables",
        "SELECT * FROM information_schema.schemata",
        "SELECT * FROM duckdb_tables()",
        "SELECT * FROM pg_catalog.pg_tables",
    ):
        found = repr(asked(tmp_path, query))
        assert "task_rows" not in found
        assert "raw_records" not in found
    for table in ("task_submitted", "session_ready", "events", "trajectories"):
        assert CANARY not in repr(asked(tmp_path, f"FROM {table}"))


def test_without_the_token_nobody_is_answered(store: Store, tmp_path: Path) -> None:
    endpoint = fresh.read_endpoint(tmp_path)
    with flight.connect(endpoint.location) as client:
        for headers in ([], [(b"authorization", b"Bearer wrong")]):
            with pytest.raises(flight.FlightUnauthenticatedError):
                client.do_get(flight.Ticket(b"SELECT 1"), flight.FlightCallOptions(headers=headers)).read_all()
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.list_flights(options=flight.FlightCallOptions(headers=headers)))


def test_the_token_is_its_owners_and_the_address_is_this_machines(store: Store, tmp_path: Path) -> None:
    assert (tmp_path / "store" / "fresh.json").stat().st_mode & 0o777 == 0o600
    assert fresh.read_endpoint(tmp_path).location.startswith("grpc://127.0.0.1:")


def test_a_question_that_takes_too_long_is_ended(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "TIMEOUT_S", 0.3)
    with pytest.raises(UsageError, match=r"no answer within 0\.3 s"):
        asked(tmp_path, "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b")
    store.publish()


def test_an_answer_that_is_too_long_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "MAX_ANSWER_BYTES", 2**20)
    with pytest.raises(UsageError, match="longer than 1 MiB: ask the published copy"):
        asked(tmp_path, "SELECT repeat('x', 1000) FROM range(10000)")


def test_without_a_store_worker_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"no store_worker of .* runs; ask without --fresh"):
        asked(tmp_path, "SELECT 1")


def test_a_worker_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with writing(tmp_path) as store:
        server = fresh.serve(store.public, tmp_path / "store")
        told = (tmp_path / "store" / "fresh.json").read_text()
        fresh.close(server, tmp_path / "store")
    (tmp_path / "store" / "fresh.json").write_text(told)
    with pytest.raises(StoreUnavailable, match="does not answer") as caught:
        asked(tmp_path, "SELECT 1")
    assert "\n" not in str(caught.value)
