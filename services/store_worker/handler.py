"""Follows the log into the store, and publishes the store now and then.

The log is read in a process of its own, which plans the next batch while this one writes the last. Everything that touches
DuckDB runs in one thread, so that the store has one caller, and the event loop stays free to answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.connection import UNCONNECTED
from rollstream.settings import Settings
from rollstream.store import fresh
from rollstream.store.batch import Batch
from rollstream.store.database import StoreFiles, StoreLost
from rollstream.store.planned import LogInterrupted, Request, open_planned
from rollstream.store.projection import Store
from rollstream.store.snapshot import Schedule

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0


class Projector:
    """The store_worker: `start`, `run` until cancelled, `close`.

    Attributes:
        last_apply: when records were last stored.
        behind: how many records the log has that the store has not.
    """

    def __init__(self, settings: Settings) -> None:
        self.last_apply: datetime | None = None
        self.behind = 0
        self._settings = settings
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._writing: asyncio.Future[int] | None = None
        self._schedule = Schedule(settings.store.publish_interval_s)
        self._store: Store | None = None
        self._is_lost = False
        self._server: fresh.FreshServer | None = None
        self._backoff_s = FIRST_BACKOFF_S

    async def start(self) -> None:
        """Become the store's writer.

        Raises:
            UsageError: another process is, or a newer rollstream made the store.
        """
        self._store = await self._in_writer(lambda: Store.open(self._settings.data_dir, self._settings.store))
        self._answer(self._store)

    async def run(self) -> None:
        """Follow the log until cancelled, through any outage of the broker, and of the disk.

        Raises:
            UsageError: the store is of another log.
        """
        store = self._store
        assert store is not None, "start() first"
        while True:
            try:
                await self._follow(store)
            except (LogInterrupted, BrokerUnavailable) as error:
                log.warning("store_worker: %s; trying again in %.1f s", error, self._backoff_s)
            except StoreLost as error:
                self._is_lost = True
                log.error("store_worker: %s; trying again in %.1f s, nothing is lost from the log", error, self._backoff_s)
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    async def close(self) -> None:
        """Publish what is stored, and let go of the store; what was only fetched is in the log."""
        store, self._store = self._store, None
        if store is not None:
            try:
                await self._written()
                if self._schedule.changed and not self._is_lost:
                    await self._publish(store)
            except StoreLost as error:
                log.error("store_worker: %s; what is missing is read again at the next start", error)
            finally:
                await self._stop_answering()
                await self._in_writer(store.close)
        self._writer.shutdown()

    async def _follow(self, store: Store) -> None:
        if self._is_lost:
            await self._reopen(store)
        await self._written()
        await self._publish_if_due(store)
        request = Request(
            self._settings.bootstrap_servers or UNCONNECTED,
            self._settings.kafka,
            store.offsets(),
            most_records=self._settings.store.batch_max_records,
        )
        async with open_planned(request) as log_ahead:
            while True:
                planned = await log_ahead.next()
                self._backoff_s = FIRST_BACKOFF_S
                self.behind = planned.behind + planned.batch.records
                await self._write(store, planned.batch)
                self.behind = planned.behind
                await self._publish_if_due(store)

    async def _reopen(self, store: Store) -> None:
        await self._stop_answering()
        self._writing = None
        await self._in_writer(store.reopen)
        self._is_lost = False
        self._schedule.changed = True
        self._answer(store)

    def _answer(self, store: Store) -> None:
        self._server = fresh.serve(store.public, StoreFiles(self._settings.data_dir).folder)

    async def _stop_answering(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(fresh.close, server, StoreFiles(self._settings.data_dir).folder)

    async def _write(self, store: Store, batch: Batch) -> None:
        if batch.records:
            self._writing = asyncio.ensure_future(self._in_writer(lambda: store.commit(batch)))
            await self._written()

    async def _written(self) -> None:
        """Wait until the batch that is being written is stored."""
        if self._writing is None:
            return
        # Cancelled or not, the writer finishes it.
        await asyncio.shield(self._writing)
        self._writing = None
        self.last_apply = datetime.now(UTC)
        self._schedule.changed = True

    async def _publish_if_due(self, store: Store) -> None:
        if self._schedule.due(time.monotonic()):
            await self._publish(store)
        else:
            store.remove_leftovers()

    async def _publish(self, store: Store) -> None:
        started = time.monotonic()
        await self._in_writer(store.publish)
        self._schedule.published(started, time.monotonic())

    async def _in_writer(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)
