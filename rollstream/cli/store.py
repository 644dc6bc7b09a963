"""`rollstream store`: looking after the store that the store_worker writes. The log is never touched."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Annotated

import duckdb
import typer

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, interruptible, out, progress_bar, read_settings, table
from rollstream.errors import StoreUnavailable, UsageError
from rollstream.settings import Settings
from rollstream.store.database import StoreFiles
from rollstream.store.decoding import READABLE
from rollstream.store.lock import writer_of
from rollstream.store.projection import Store
from rollstream.store.reader import open_snapshot
from rollstream.store.rebuild import compact as compact_store, rebuild as rebuild_store
from rollstream.store.verification import Verified, verify as verify_store

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look after the store: rebuild, verify, prune, compact.")


@app.command()
def rebuild(
    keep_pruned: Annotated[bool, typer.Option("--keep-pruned", help="Leave out what was pruned from the old one.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Build the store anew from the whole log, and put it in the place of the old one when it is complete.

    Until then everybody reads the old one, and an interrupted rebuild changes nothing. The store_worker must not run. What was
    pruned comes back, unless told otherwise.

    Example: rollstream store rebuild
    """
    settings = read_settings(data_dir, config)
    started = time.monotonic()
    with interruptible(), one_bar("rebuilding") as begin:
        bootstrap = find_broker(settings)
        building = rebuild_store(
            bootstrap, settings.kafka, settings.data_dir, settings.store, keep_pruned=keep_pruned, begin=begin
        )
        records = asyncio.run(building)
    seconds = time.monotonic() - started
    out.print(f"rebuilt from {records} records in {seconds:.1f} s ({records / max(seconds, 1e-9):,.0f} a second)")


@app.command()
def verify(data_dir: DataDir = None, config: Config = None) -> None:
    """Compare the published store with the log, record by record. Exits with 1 if they differ.

    Up to the offsets that the published copy has, so workers may run meanwhile.

    Example: rollstream store verify
    """
    settings = read_settings(data_dir, config)
    with interruptible(), open_snapshot(settings.data_dir) as connection, one_bar("verifying") as begin:
        found = asyncio.run(verify_store(find_broker(settings), settings.kafka, connection, begin))
    print_verified(found)
    if not found.is_clean:
        raise typer.Exit(1)


@app.command()
def prune(
    before: Annotated[
        datetime | None, typer.Option(help="What the log has from before this time, in UTC.", show_default=False)
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="What there is of this run.", show_default=False)] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Remove old records, or a run, from the store. The log keeps them, and `store rebuild` brings them back.

    What is recorded of a pruned run later is stored again. The store_worker must not run.

    Example: rollstream store prune --before 2026-01-01
    """
    if (before is None) == (run is None):
        raise UsageError("expected one of --before and --run, found " + ("none" if run is None else "both"))
    settings = read_settings(data_dir, config)
    require_store(settings)
    with interruptible():
        store = Store.open(settings.data_dir, settings.store)
        try:
            removed = store.prune(before, run)
            store.publish()
        finally:
            store.close()
    what = f"of run {run}" if run is not None else f"from before {before}"
    if not removed:
        out.print(f"nothing removed: the store has no rows {what}")
        return
    out.print(f"removed {removed} rows {what}; the log keeps them, and `rollstream store rebuild` brings them back")
    out.print("`rollstream store compact` gives their room back to the disk")


@app.command()
def compact(data_dir: DataDir = None, config: Config = None) -> None:
    """Write the store again, as small as it gets. Needs room for a second copy. The store_worker must not run.

    Example: rollstream store compact
    """
    settings = read_settings(data_dir, config)
    require_store(settings)
    with interruptible():
        before, after = compact_store(settings.data_dir, settings.store)
    out.print(f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB now")


@app.command()
def status(data_dir: DataDir = None, config: Config = None) -> None:
    """Say who writes the store, how old the published copy is, how far it has read, and what it could not read.

    Example: rollstream store status
    """
    settings = read_settings(data_dir, config)
    files = StoreFiles(settings.data_dir)
    shown = table("store of " + str(settings.data_dir), "")
    shown.add_row("written by", f"process {pid}" if (pid := writer_of(settings.data_dir)) else "nobody")
    for path in (files.public, files.private, files.published):
        shown.add_row(str(path), f"{path.stat().st_size / 2**20:.1f} MiB" if path.exists() else "none")
    with open_snapshot(settings.data_dir) as connection:
        for name, value in found_in(connection):
            shown.add_row(name, value)
    out.print(shown)


def found_in(connection: duckdb.DuckDBPyConnection) -> Iterator[tuple[str, str]]:
    """What a published copy says of itself."""
    ((published_at, version),) = connection.execute("SELECT published_at, rollstream_version FROM snapshot_info").fetchall()
    yield "published", f"{published_at:%Y-%m-%d %H:%M:%S} UTC, by rollstream {version}"
    for name, statement in _COUNTS.items():
        yield name, str(connection.execute(statement).fetchall()[0][0] or 0)
    unknown = connection.execute(
        "SELECT kind, schema_version, count(*) FROM unknown_events GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    for kind, version, count in unknown:
        known = READABLE.get(kind, -1) >= version
        yield f"unknown {kind} v{version}", f"{count}" + ("; known now: `rollstream store rebuild`" if known else "")


_COUNTS = {
    "records read": "SELECT sum(next_offset) FROM projector_offsets",
    "behind the log, then": "SELECT sum(behind) FROM lag",
    "repeated records": "SELECT count(*) FROM duplicate_records",
    "records that are no events": "SELECT count(*) FROM dead_rows",
    "prunings": "SELECT count(DISTINCT pruned_at) FROM prunings",
}


def require_store(settings: Settings) -> None:
    """See that there is a store before one is made to work on.

    Raises:
        StoreUnavailable: there is none.
    """
    path = StoreFiles(settings.data_dir).public
    if not path.exists():
        raise StoreUnavailable(f"there is no store at {path}: `rollstream store rebuild` makes one from the log")


def print_verified(found: Verified) -> None:
    """What differs, or that nothing does."""
    for (topic, partition), start in sorted(found.gone.items()):
        out.print(f"{topic}/{partition}: the log begins at offset {start}; what the store has from before is not compared")
    for name, count in found.repeated_events.items():
        out.print(f"table {name} has {count} rows whose event is in another row too")
    if found.differences:
        shown = table("partition", "records in the log", "in the store", "")
        for one in found.differences:
            what = "the content differs" if one.in_log == one.in_store else ""
            shown.add_row(f"{one.topic}/{one.partition}", str(one.in_log), str(one.in_store), what)
        out.print(shown)
    if found.is_clean:
        out.print(f"clean: {found.records} records of {found.partitions} partitions are in the store as they are in the log")
    else:
        out.print("the store differs from the log: stop the store_worker and `rollstream store rebuild`")


@contextmanager
def one_bar(doing: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A progress bar whose length is told when it is known."""
    with ExitStack() as stack:
        yield lambda total: stack.enter_context(progress_bar(doing, total))
