"""Reading what is published: one question at a time, nothing but questions, and every failure one sentence."""

import csv
import io
import json
from pathlib import Path

import duckdb
import pytest

from rollstream.errors import StoreUnavailable, UsageError
from rollstream.store.formats import FORMATS, plain, visible
from rollstream.store.reader import ask, open_snapshot
from tests.stores import answer, publish_events
from tests.unit.test_store_views import two_groups


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_events(tmp_path_factory.mktemp("store"), *two_groups())


def formatted(store: Path, query: str, format: str) -> str:
    with open_snapshot(store) as connection:
        return "".join(FORMATS[format](ask(connection, query)))


def test_without_a_store_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"no trajectories yet at .*: start a worker with `rollstream up`"):
        open_snapshot(tmp_path)


def test_a_file_that_is_no_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "trajectories.duckdb").write_bytes(b"not a database" * 1_000)
    with pytest.raises(StoreUnavailable, match=r"cannot be read: ") as caught:
        open_snapshot(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "query",
    ["SELECT 1", "FROM rollouts", "WITH a AS (SELECT 1) SELECT * FROM a", "SHOW TABLES", "DESCRIBE rollouts",
     "SUMMARIZE groups", "EXPLAIN SELECT 1", "PIVOT rollouts ON status USING count(*)", "VALUES (1)", "SELECT 1;"],
)  # fmt: skip
def test_questions_are_answered(store: Path, query: str) -> None:
    assert answer(store, query)


@pytest.mark.parametrize(
    "query",
    ["CREATE TABLE x (i INTEGER)", "DROP TABLE dead_rows", "INSERT INTO dead_rows DEFAULT VALUES", "SET threads = 1",
     "COPY rollouts TO '/tmp/x'", "ATTACH '/tmp/x.duckdb'", "EXPORT DATABASE '/tmp/x'", "INSTALL httpfs", "LOAD httpfs",
     "PRAGMA database_list", "CALL pragma_version()", "CHECKPOINT", "UPDATE dead_rows SET topic = 'x'"],
)  # fmt: skip
def test_anything_but_a_question_is_refused(store: Path, query: str) -> None:
    with pytest.raises(UsageError, match="expected a SELECT, found a statement of type"):
        answer(store, query)


@pytest.mark.parametrize(
    "query",
    ["SELECT * FROM read_csv('/etc/passwd')", "FROM read_text('/etc/passwd')", "FROM glob('/*')", "FROM '/etc/passwd'",
     "EXPLAIN ANALYZE INSERT INTO schema_version VALUES (1)", "SELECT getenv('HOME')"],
)  # fmt: skip
def test_a_question_reaches_nothing_but_the_store(store: Path, query: str) -> None:
    with pytest.raises(UsageError, match="SQL: "):
        answer(store, query)


@pytest.mark.parametrize(("query", "found"), [("SELECT 1; SELECT 2", 2), ("", 0), ("-- nothing", 0)])
def test_one_statement_is_expected(store: Path, query: str, found: int) -> None:
    with pytest.raises(UsageError, match=f"expected one SQL statement, found {found}"):
        answer(store, query)


@pytest.mark.parametrize(
    ("query", "hint"),
    [("SELEC 1", "syntax error"), ("FROM rollout", 'Did you mean "rollouts"'), ("SELECT rewar FROM rollouts", '"reward"'),
     ("SELECT CAST('x' AS INTEGER)", "Could not convert"),
     ("SELECT error('later') FROM range(3000) t(i) WHERE i > 2500", "later")],
)  # fmt: skip
def test_a_query_that_fails_says_why_in_one_line(store: Path, query: str, hint: str) -> None:
    with pytest.raises(UsageError, match="SQL: ") as caught:
        answer(store, query)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_keeps_everything_and_nests_json(store: Path) -> None:
    query = "SELECT messages, reward, scored_at, success, error_kind FROM trajectories ORDER BY reward NULLS LAST"
    rows = json.loads(formatted(store, query, "json"))
    assert rows[0]["messages"][1] == {"role": "assistant", "content": "It is 2."}
    assert (rows[0]["reward"], rows[0]["success"], rows[0]["scored_at"]) == (0.0, False, "2026-03-01T12:00:05")
    assert (rows[-1]["reward"], rows[-1]["error_kind"]) == (None, "model_unavailable")


def test_columns_named_alike_are_told_apart(store: Path) -> None:
    assert json.loads(formatted(store, "SELECT 1 AS a, 2 AS a, 3 AS a_1", "json")) == [{"a": 1, "a_1": 2, "a_1_1": 3}]


def test_json_is_strict_whatever_the_value(store: Path) -> None:
    query = (
        "SELECT 'nan'::DOUBLE AS a, 2::HUGEINT ** 100 AS b, 1.5::DECIMAL(9, 2) AS c, '\\xff'::BLOB AS d, INTERVAL 1 MINUTE AS e"
    )
    rows = json.loads(formatted(store, query, "json"), parse_constant=pytest.fail)
    assert rows[0] == {"a": None, "b": 2.0**100, "c": 1.5, "d": "ff", "e": 60.0}


def test_an_empty_answer_is_an_empty_list(store: Path) -> None:
    assert json.loads(formatted(store, "SELECT 1 WHERE false", "json")) == []


def test_csv_can_be_read_back(store: Path) -> None:
    text = formatted(store, "SELECT 'a,\"b\"\nc' AS text, NULL AS nothing, 0.5 AS number, [1, 2] AS list", "csv")
    assert list(csv.DictReader(io.StringIO(text))) == [{"text": 'a,"b"\nc', "nothing": "", "number": "0.5", "list": "[1, 2]"}]


def test_markdown_cells_cannot_break_the_table(store: Path) -> None:
    text = formatted(store, "SELECT 'a|b' || chr(10) || 'c' AS text", "markdown")
    assert text == "| text |\n| --- |\n| a\\|b<br>c |\n"


def test_values_that_json_has_not_become_what_it_has() -> None:
    assert plain({"a": (1, float("inf"), b"\x00")}) == {"a": [1, None, "00"]}


def test_control_characters_are_spelled_out() -> None:
    assert visible("a\x1b[2J\tb\n\x9bc") == "a\\x1b[2J\tb\n\\x9bc"


def test_the_published_file_opens_with_plain_duckdb(store: Path) -> None:
    with duckdb.connect(str(store / "trajectories.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT environment, count(*), avg(reward) FROM rollouts GROUP BY 1").fetchall() == [
            ("math", 6, 0.7)
        ]
