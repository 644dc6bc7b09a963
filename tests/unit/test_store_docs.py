"""docs/sql.md is true: every view and column is in it, and every query runs and finds something."""

import re
from pathlib import Path

import duckdb
import pytest

from rollstream.store.reader import ask, open_snapshot
from rollstream.store.schema import PUBLIC
from tests.events import START, Attempt, run_published, task_submitted, with_tools
from tests.stores import answer, publish_events
from tests.unit.test_store_views import two_groups

PAGE = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
QUERIES = re.findall(r"^([^\n]+):\n\n```sql\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
"""Title and text."""
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#)", PAGE, re.DOTALL | re.MULTILINE))
INTERNAL = {
    *("counting", "counting_records", "trainable", "pass_estimates", "long_payloads", "schema_version", "projector_offsets"),
    "contaminated",
    "dead_rows",
}
"""What other views are made of."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; in the first also a retry, an attempt with tools and rewards of its steps, and a try that does not count."""
    again = [Attempt(task_submitted(name, run="run-2", attempts=1), reward=1.0) for name in ("a", "b")]
    events = [event for attempt in again for event in (attempt.task, *attempt.interaction())]
    tools = Attempt(task_submitted("tools"))
    lost = Attempt(tools.task, try_=1)
    return publish_events(
        tmp_path_factory.mktemp("store"),
        *two_groups(),
        *(tools.task, tools.ready(), tools.stepped(), tools.completed(), tools.verdict(), with_tools(tools.scored())),
        *(lost.stepped(), lost.retry()),
        run_published("run-2", groups=2),
        *events,
    )


EXPECTED: dict[str, list[tuple[object, ...]]] = {
    "Reward and success": [("math", "small", 9, 0.8125, 0.75)],
    "pass@k": [
        ("math", 1, 0.7778, 0.7778, "3 of 3", 0.667),
        ("math", 2, 0.8333, 0.5, "2 of 2", 0.625),
        ("math", 4, None, None, "0 of 2", 0.625),
    ],
    "Two runs": [("a", 0.5, 1.0, 0.5), ("b", 1.0, 1.0, 0.0)],
    "Tasks that are never": [("math", 0, 1, 4)],
    "What failed": [("agent", "model_unavailable", True, 1, "the model server answered 503")],
    "Attempts that are still out": [("run-1", "math", "b", 2, START.replace(tzinfo=None))],
    "Where the time goes": [("math", [1.0, 1.0], [1.5, 1.5], [0.25, 0.25], [0.25, 0.25], [0.5, 0.5], [5.0, 5.0])],
    "Finished attempts": [(START.replace(tzinfo=None), 9, 8)],
    "What a run cost": [("run-1", "small-1b", 35, 30), ("run-2", "small-1b", 10, 10)],
    "Reward by step": [("math", 0, 2, 0.5)],
    "Which tools": [("search", 2, 1, 1.0, '{"q": "2"}'), ("sum", 1, 1, 1.0, '{"a": 1}')],
    "Preference pairs": [("a", 1.0, "It is 2.", "It is 2.")],
}
"""By the beginning of a query's title, what it finds; of the others, `SHAPES` has how many rows there are."""
SHAPES = {
    "Long answers": 1, "One attempt, call by call": 2, "Examples for": 3, "Group-relative": 6, "Attempts that more": 1,
    "What an attempt did": 14, "What each action": 2, "One attempt's whole": 2, "Why a verdict": 8, "How fresh": 1,
}  # fmt: skip


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title[:40] for title, _ in QUERIES])
def test_every_query_finds_what_it_says(store: Path, title: str, query: str) -> None:
    found = answer(store, query)
    assert found
    for beginning, expected in EXPECTED.items():
        if title.startswith(beginning):
            assert found == [tuple(pytest.approx(v) if isinstance(v, float) else v for v in row) for row in expected]
            return
    assert len(found) == next(count for beginning, count in SHAPES.items() if title.startswith(beginning))


def test_there_are_twenty_queries() -> None:
    assert len(QUERIES) >= 20


def test_every_view_is_described_with_its_columns(store: Path) -> None:
    with open_snapshot(store) as connection:
        views = {name for (name,) in ask(connection, "SELECT view_name FROM duckdb_views() WHERE NOT internal").rows}
        for name in sorted((views | {"snapshot_info", "unknown_events", "duplicate_records", "prunings"}) - INTERNAL):
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
