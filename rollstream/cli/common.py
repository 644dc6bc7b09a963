"""What several commands share: the options that say where things are, the settings, and how lines are printed."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollstream.errors import UsageError
from rollstream.settings import CONFIG_FILE, Settings, load_settings

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Embedded broker's log, store and keys. Default: the setting `data_dir`, else .rollstream.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", help=f"Settings file. Default: {CONFIG_FILE} here, if any.", show_default=False)
]

PIPED_WIDTH = 200
"""Columns for tables that go to a file or another program, which have no width of their own."""

# Nothing of a user's data is ever read as markup, and a line is never wrapped: others grep what is printed.
out = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPED_WIDTH)
err = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)


def table(*columns: str) -> Table:
    """An empty table; its first column is what people copy, and is never cut."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, no_wrap=number == 0, overflow="fold")
    return made


@contextmanager
def progress_bar(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing elsewhere, where the summary is enough."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task(doing, total=total)
        yield lambda count: progress.advance(bar, count)


def read_settings(data_dir: Path | None = None, config: Path | None = None, pool: str | None = None) -> Settings:
    """The settings of this command; child processes inherit the choice of file through the environment.

    Raises:
        UsageError: the settings file is missing or malformed, or a setting is.
    """
    if config is not None:
        os.environ["ROLLSTREAM_CONFIG"] = str(config.absolute())
    return load_settings(data_dir=data_dir, pool=pool)


def pairs(texts: list[str], option: str) -> list[tuple[str, str]]:
    """`NAME=VALUE` texts, split at the first `=`.

    Raises:
        UsageError: one of them has no name or no `=`.
    """
    split = [text.partition("=") for text in texts]
    for text, (name, equals, _) in zip(texts, split, strict=True):
        if not name or not equals:
            raise UsageError(f"{option} expects NAME=VALUE, found {text!r}")
    return [(name, value) for name, _, value in split]


class Terminated(KeyboardInterrupt):
    """Another signal that is treated as Ctrl-C is."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and the end of the terminal unwind the command as Ctrl-C does, so that what it started is stopped.

    Exits with 128 + the signal.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    # What is ignored stays so: that is how `nohup` works.
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield
    except Terminated as end:
        sys.exit(128 + end.number)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
