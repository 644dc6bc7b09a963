"""`rollstream sql`: any question, to the published store, or to the store_worker itself.

The table is for eyes: it shortens long values and says so with `…`. The other formats give everything.
"""

import sys
from itertools import islice
from typing import Annotated, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from rollstream.cli.common import Config, DataDir, out, read_settings, table
from rollstream.store.formats import FORMATS, cell, visible
from rollstream.store.reader import Answer, ask, open_snapshot

MAX_ROWS = 200
MAX_CELL = 60
MAX_VALUE = 500
"""Of a value that has a line of its own."""
UNLIMITED = 1_000_000

Format = Literal["table", "json", "csv", "markdown"]


def sql(
    query: Annotated[str, typer.Argument(help="One SELECT; `-` reads it from standard input. Views: docs/sql.md.")],
    format: Annotated[Format, typer.Option("--format", "-f", help="All but `table` give everything.")] = "table",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ask the running store_worker, for what the published copy has not yet.")
    ] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Ask the published store anything, in SQL.

    Example: rollstream sql "SELECT environment, count(*), avg(reward) FROM rollouts GROUP BY 1"
    """
    question = sys.stdin.read() if query == "-" else query
    directory = read_settings(data_dir, config).data_dir
    if fresh:
        # Here, because it costs a fifth of a second that no other question pays.
        from rollstream.store.fresh import ask_fresh

        _print(ask_fresh(directory, question), format)
        return
    with open_snapshot(directory) as connection:
        _print(ask(connection, question), format)


def _print(answer: Answer, format: Format) -> None:
    if format == "table":
        _print_table(answer)
        return
    for text in FORMATS[format](answer):
        sys.stdout.write(text)


def _print_table(answer: Answer) -> None:
    rows = [[shown(value, UNLIMITED) for value in row] for row in islice(answer.rows, MAX_ROWS)]
    more = next(answer.rows, None) is not None
    grid = [[shorten(value, MAX_CELL) for value in row] for row in rows]
    if out.is_terminal and _width(answer.columns, grid) > out.width:
        _print_records(answer.columns, rows)
    else:
        # As wide as it gets: a column that does not fit would be cut away.
        Console(file=sys.stdout, highlight=False, markup=False, width=UNLIMITED).print(_grid(answer.columns, grid))
    if more:
        out.print(f"the first {MAX_ROWS} rows; --format json gives all of them")


def _grid(columns: list[str], rows: list[list[str]]) -> Table:
    made = table(*columns)
    for row in rows:
        made.add_row(*row)
    return made


def _print_records(columns: list[str], rows: list[list[str]]) -> None:
    """One line a value, for rows that are wider than the terminal."""
    margin = max(map(cell_len, columns))
    for number, row in enumerate(rows, 1):
        out.print(f"── row {number} " + "─" * 20)
        for name, value in zip(columns, row, strict=True):
            out.print(f"{name:{margin}}  {shorten(value, MAX_VALUE)}")


def _width(columns: list[str], rows: list[list[str]]) -> int:
    return sum(max(map(cell_len, values)) + 2 for values in zip(columns, *rows, strict=True))


def shown(value: object, limit: int = MAX_CELL) -> str:
    """A value in one line of at most `limit` characters."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.6g}"
    return shorten(visible(" ".join(cell(value).split())), limit)


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
