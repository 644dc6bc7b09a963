"""Follows the log into the store, and publishes the store now and then.

Everything that touches DuckDB runs in one thread of its own: the event loop stays free to fetch, and the store has one caller.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

from aiokafka.errors import KafkaError

from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.connection import UNCONNECTED
from rollstream.eventlog.reading import Record
from rollstream.settings import Settings
from rollstream.store.feed import MAX_BATCH_BYTES, Feed, size_of
from rollstream.store.projection import Position, Store
from rollstream.store.snapshot import Schedule

log = logging.getLogger(__name__)
T = TypeVar("T")

GATHER_S = 1.0
"""How long records of a quiet log are gathered into one transaction. A backlog fills batches faster than that."""
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
        self._schedule = Schedule(settings.store.publish_interval_s)
        self._store: Store | None = None
        self._feed: Feed | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._fetched: list[Record] = []
        self._ends: Mapping[Position, int] = {}

    async def start(self) -> None:
        """Become the store's writer.

        Raises:
            UsageError: another process is, or a newer rollstream made the store.
        """
        self._store = await self._in_writer(lambda: Store.open(self._settings.data_dir, self._settings.store))

    async def run(self) -> None:
        """Follow the log until cancelled, through any outage of the broker.

        Raises:
            UsageError: the store is of another log.
        """
        store = self._store
        assert store is not None, "start() first"
        while True:
            try:
                await self._follow(store)
            except (KafkaError, BrokerUnavailable) as error:
                log.warning("store_worker: %s; trying again in %.1f s", error, self._backoff_s)
            await self._drop_feed()
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    async def close(self) -> None:
        """Store what is fetched, publish it, and let go of the store."""
        await self._drop_feed()
        store, self._store = self._store, None
        if store is not None:
            await self._store_fetched(store)
            if self._schedule.changed:
                await self._publish(store)
            await self._in_writer(store.close)
        self._writer.shutdown()

    async def _follow(self, store: Store) -> None:
        await self._publish_if_due(store)
        await self._store_fetched(store)
        bootstrap = self._settings.bootstrap_servers or UNCONNECTED
        feed = self._feed = await Feed.open(bootstrap, self._settings.kafka, store.offsets())
        while True:
            await self._gather(feed)
            self._backoff_s = FIRST_BACKOFF_S
            await self._store_fetched(store)
            self.behind = feed.behind()
            await self._publish_if_due(store)

    async def _gather(self, feed: Feed) -> None:
        """Fetch until a batch is full, or its time is over: large transactions under backlog, few of them when idle."""
        deadline = time.monotonic() + GATHER_S
        room = self._settings.store.batch_max_records
        size = 0
        while room > 0 and size < MAX_BATCH_BYTES and (left := deadline - time.monotonic()) > 0:
            records = await feed.fetch(left, room)
            self._fetched += records
            room -= len(records)
            size += size_of(records)
        self._ends = feed.ends()
        self.behind = feed.behind() + len(self._fetched)

    async def _store_fetched(self, store: Store) -> None:
        # Kept until it is stored: a cancelled call may or may not have stored it, and storing it again changes nothing.
        if await self._in_writer(lambda: store.apply(self._fetched, self._ends)):
            self.last_apply = datetime.now(UTC)
            self._schedule.changed = True
        self._fetched = []

    async def _publish_if_due(self, store: Store) -> None:
        if self._schedule.due(time.monotonic()):
            await self._publish(store)
        else:
            store.remove_leftovers()

    async def _publish(self, store: Store) -> None:
        started = time.monotonic()
        await self._in_writer(store.publish)
        self._schedule.published(started, time.monotonic())

    async def _drop_feed(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()

    async def _in_writer(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)
