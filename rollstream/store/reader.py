"""Reading the published store: from any process, at any time, without a lock that anybody waits for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from rollstream.errors import StoreUnavailable, UsageError
from rollstream.store import snapshot

# PIVOT is several statements to DuckDB; what it creates is temporary, and the file is read-only anyway.
_QUESTIONS = {
    duckdb.StatementType.SELECT,
    duckdb.StatementType.EXPLAIN,
    duckdb.StatementType.MULTI,
    duckdb.StatementType.RELATION,
}


_PAGE = 1_000
"""Rows fetched at once."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query returned."""

    columns: list[str]
    """Their names, each once."""
    types: list[str]
    """DuckDB's names of their types."""
    rows: Iterator[tuple[object, ...]]
    """Read as they are asked for; raises UsageError when DuckDB fails on the way."""


def open_snapshot(data_dir: Path) -> duckdb.DuckDBPyConnection:
    """A connection to the published store of `data_dir`, which can do nothing but read it.

    Raises:
        StoreUnavailable: nothing was published yet, or what stands there cannot be read.
    """
    path = data_dir / snapshot.PUBLISHED
    if not path.is_file():
        raise StoreUnavailable(f"no trajectories yet at {path}: start a worker with `rollstream up`")
    try:
        # The file stands alone, so no query has a reason to touch another one.
        return duckdb.connect(str(path), read_only=True, config={"enable_external_access": False, "lock_configuration": True})
    except duckdb.Error as error:
        raise StoreUnavailable(f"{path} cannot be read: {first_line(error)}") from None


def ask(connection: duckdb.DuckDBPyConnection, query: str) -> Answer:
    """The answer to one question in SQL.

    Raises:
        UsageError: the query is not one question, or DuckDB refuses it.
    """
    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1:
            raise UsageError(f"expected one SQL statement, found {len(statements)}")
        if statements[0].type not in _QUESTIONS:
            kind = statements[0].type.name
            raise UsageError(f"expected a SELECT, found a statement of type {kind}: the published store is only read")
        cursor = connection.execute(statements[0])
        described = cursor.description or []
    except duckdb.Error as error:
        raise UsageError(f"SQL: {first_line(error)}") from None
    return Answer(unique([column[0] for column in described]), [str(column[1]) for column in described], _rows(cursor))


def query(connection: duckdb.DuckDBPyConnection, statement: str, **parameters: object) -> list[dict[str, Any]]:
    """The rows of one of our own statements, by column name."""
    cursor = connection.execute(statement, parameters)
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _rows(cursor: duckdb.DuckDBPyConnection) -> Iterator[tuple[object, ...]]:
    try:
        while rows := cursor.fetchmany(_PAGE):
            yield from rows
    except duckdb.Error as error:
        raise UsageError(f"SQL: {first_line(error)}") from None


def unique(names: list[str]) -> list[str]:
    """`names` told apart: SELECT may name two columns alike, an object may not."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in unique:
            candidate, number = f"{name}_{number}", number + 1
        unique.append(candidate)
    return unique


def first_line(error: duckdb.Error) -> str:
    """What DuckDB says, in one line, with what it suggests."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate"))]
    return " ".join([lines[0], *hints])
