"""docs/sql.md is true: every view and column is in it, and every query runs and finds something."""

import re
from pathlib import Path

import duckdb
import pytest

from rollstream.store.reader import ask, open_snapshot
from rollstream.store.schema import PUBLIC
from tests.events import Attempt, run_published, task_submitted
from tests.stores import answer, publish_events
from tests.unit.test_store_views import two_groups

PAGE = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#)", PAGE, re.DOTALL | re.MULTILINE))
INTERNAL = {"counting_records", "whole_payloads", "long_payloads", "schema_version", "projector_offsets", "dead_rows"}
"""What other views are made of."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    again = [Attempt(task_submitted(name, run="run-2", attempts=1), reward=1.0) for name in ("a", "b")]
    events = [event for attempt in again for event in (attempt.task, *attempt.events())]
    return publish_events(tmp_path_factory.mktemp("store"), *two_groups(), run_published("run-2", groups=2), *events)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.split("\n")[0][:60])
def test_every_query_runs_and_finds_something(store: Path, query: str) -> None:
    assert answer(store, query)


def test_there_are_queries() -> None:
    assert len(QUERIES) >= 12


def test_every_view_is_described_with_its_columns(store: Path) -> None:
    with open_snapshot(store) as connection:
        views = {name for (name,) in ask(connection, "SELECT view_name FROM duckdb_views() WHERE NOT internal").rows}
        for name in sorted((views | {"snapshot_info", "unknown_events"}) - INTERNAL):
            told = re.findall(r"`(\w+)`", SECTIONS[name].partition("Columns:")[2].partition("\n\n")[0])
            if name == "trajectories":
                told = [column for column in told if column != "rollouts"]
                expected = {"messages", "tools"}
            else:
                expected = columns(connection, name)
            assert told == [column for column in columns_in_order(connection, name) if column in expected], name


def columns_in_order(connection: duckdb.DuckDBPyConnection, name: str) -> list[str]:
    return [str(row[0]) for row in ask(connection, f"DESCRIBE {name}").rows]


def columns(connection: duckdb.DuckDBPyConnection, name: str) -> set[str]:
    return set(columns_in_order(connection, name))


def test_every_event_table_is_named() -> None:
    missing = [name for name in PUBLIC if f"`{name}`" not in PAGE and f"### {name}" not in PAGE and name not in INTERNAL]
    assert missing == []
