"""The store built anew from offset zero, beside the one that there is, and put in its place when it is complete.

Until then nothing of the old store is touched, so a rebuild can be interrupted at any moment; the next removes what it left.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rollstream.settings import KafkaSettings, StoreSettings
from rollstream.store import pruning, snapshot
from rollstream.store.columns import Row
from rollstream.store.database import Database, DatabaseFile, StoreFiles, storage
from rollstream.store.feed import Feed
from rollstream.store.lock import WriterLock
from rollstream.store.planned import Request, open_planned
from rollstream.store.projection import Store

FOLDER = "store.rebuilding"

Advance = Callable[[int], None]


async def rebuild(
    bootstrap: str,
    kafka: KafkaSettings,
    data_dir: Path,
    settings: StoreSettings,
    *,
    keep_pruned: bool = False,
    begin: Callable[[int], Advance] = lambda records: lambda count: None,
) -> int:
    """Build the store of `data_dir` from the whole log, up to where it ends now; returns how many records that were.

    Args:
        keep_pruned: whether what was pruned from the old store stays out of the new one.
        begin: told how many records there are, returns what is told of each batch.

    Raises:
        UsageError: a store_worker, or another rebuild, writes the store.
        BrokerUnavailable: nobody answers.
        StoreLost: the disk is full.
    """
    with beside(data_dir, settings) as store:
        if keep_pruned:
            store.keep_out(_pruned(data_dir, settings))
        feed = await Feed.open(bootstrap, kafka, {})
        try:
            starts, ends = await feed.whole_log()
        finally:
            await feed.close()
        return await _follow(Request(bootstrap, kafka, until=ends), store, begin(sum(ends.values()) - sum(starts.values())))


def compact(data_dir: Path, settings: StoreSettings) -> tuple[int, int]:
    """Write the store again without the room that removed rows have left; returns its size before and after, in bytes.

    Raises:
        UsageError: a store_worker writes the store.
        StoreLost: the disk has no room for a second copy.
    """
    files = StoreFiles(data_dir)
    before = _size(files)
    with beside(data_dir, settings) as store, storage(files.folder):
        old = Store(files, settings, Database.open(files, settings), store.lock)
        try:
            old.copy_to(store)
        finally:
            old.close_files()
    return before, _size(files)


@contextmanager
def beside(data_dir: Path, settings: StoreSettings) -> Iterator[Store]:
    """An empty store, which takes the place of the one of `data_dir` unless filling it fails.

    Raises:
        UsageError: a store_worker writes the store.
        StoreLost: the disk is full.
    """
    lock = WriterLock.of(data_dir)
    built = StoreFiles(data_dir, FOLDER)
    try:
        shutil.rmtree(built.folder, ignore_errors=True)
        built.folder.mkdir(parents=True)
        store = Store(built, settings, Database.open(built, settings, are_copies=True), lock)
        try:
            yield store
            with storage(built.folder):
                store.finish()
        finally:
            store.close_files()
        with storage(built.folder):
            _put_in_place(built, StoreFiles(data_dir))
    finally:
        shutil.rmtree(built.folder, ignore_errors=True)
        lock.release()


def _pruned(data_dir: Path, settings: StoreSettings) -> list[Row]:
    files = StoreFiles(data_dir)
    if not files.public.exists():
        return []
    file = DatabaseFile(files.public, settings.memory_limit_mib)
    try:
        return pruning.read(file.connection)
    finally:
        file.close()


def _size(files: StoreFiles) -> int:
    return sum(path.stat().st_size for path in (files.public, files.private) if path.exists())


async def _follow(request: Request, store: Store, advance: Advance) -> int:
    """Read what is asked for into `store`; while one batch is written, the next one is planned."""
    loop = asyncio.get_running_loop()
    count = 0
    with ThreadPoolExecutor(1, "write") as writer:
        async with open_planned(request) as log:
            async for planned in log.batches():
                advance(await loop.run_in_executor(writer, store.commit, planned.batch))
                count += planned.batch.records
    return count


def _put_in_place(built: StoreFiles, wanted: StoreFiles) -> None:
    """A crash on the way leaves a store without its public file, which the store_worker builds anew from the log."""
    wanted.public.unlink(missing_ok=True)
    for source, target in ((built.private, wanted.private), (built.public, wanted.public)):
        target.with_name(f"{target.name}.wal").unlink(missing_ok=True)
        os.replace(source, target)
    snapshot.publish(wanted.public, wanted.published)
