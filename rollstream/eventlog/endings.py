"""Which sessions have ended and how, for a worker that holds something open for them and gets no last record of them itself.

An agent that hands in, fails or is called off says so on topics of its own. They are read while something is held, from the
oldest action on for which something is, and not otherwise: most workers hold nothing, and transcripts are long. An action that
has waited in its topic may be of a session that ended meanwhile. No consumer group.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal

from rollstream.cancelling import ended
from rollstream.eventlog.connection import UNCONNECTED
from rollstream.eventlog.reading import Record, interrupted, open_reader
from rollstream.settings import Settings
from topics.catalogue import EPISODES_COMPLETED, ROLLOUTS_RETRIES, ROLLOUTS_SCORED

log = logging.getLogger(__name__)

Ending = Literal["handed_in", "verified", "failed"]
"""`handed_in`: its episode is to be verified, perhaps once more. `failed`: it gets no verdict (any more), or was called off."""

POLL_S = 0.2
RECONNECT_S = 1.0
CLOCK_SKEW = timedelta(minutes=1)
"""By which this host's clock may be ahead of the broker's."""
LONGEST_WAIT = timedelta(days=1)
"""Of an action in its topic; a session whose end is older is closed when nobody acts on it."""
LINGER_S = 30.0
"""How long to read on when nothing is held any more: the next session may begin at once."""


class SessionEndings:
    """Tells `ended(session, how)` of sessions whose end stands in the log, while `wanted()`."""

    def __init__(self, settings: Settings, wanted: Callable[[], bool], ended: Callable[[str, Ending], None]) -> None:
        self._bootstrap = settings.bootstrap_servers or UNCONNECTED
        self._kafka = settings.kafka
        self._wanted = wanted
        self._ended = ended
        self._since: datetime | None = None
        """From when on to read, when a reading begins."""
        self._known_since: datetime | None = None
        """Every end from then on has been told, or will be."""
        self._anew = False
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.broke: Callable[[BaseException], None] = lambda error: None
        """Told of a failure that nothing here can handle."""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._follow())
        self._task.add_done_callback(self._stopped)

    async def close(self) -> None:
        await ended(self._task)

    def wake(self, acted_at: datetime) -> None:
        """Something is held for an action of that time: read from then on, if that is not done already."""
        since = max(acted_at, datetime.now(UTC) - LONGEST_WAIT) - CLOCK_SKEW
        asleep = not self._awake.is_set()
        if asleep or self._known_since is None or since < self._known_since:
            self._since = self._known_since = since
            self._anew = not asleep
            self._awake.set()

    def _stopped(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self.broke(error)

    async def _follow(self) -> None:
        while True:
            await self._awake.wait()
            if error := await interrupted(self._read()):
                log.warning("cannot read which sessions have ended, trying again: %r", error)
                await asyncio.sleep(RECONNECT_S)

    async def _read(self) -> None:
        assert self._since is not None, "woken before"
        loop = asyncio.get_running_loop()
        topics = [EPISODES_COMPLETED, ROLLOUTS_RETRIES, ROLLOUTS_SCORED]
        self._anew = False
        async with open_reader(self._bootstrap, self._kafka, topics) as reader:
            await reader.seek_to_time(self._since)
            needed_at = loop.time()
            while loop.time() - needed_at < LINGER_S and not self._anew:
                began = datetime.now(UTC) - CLOCK_SKEW
                records = await reader.poll(POLL_S)
                for record in records:
                    self._tell(record)
                if self._wanted():
                    needed_at = loop.time()
                if not records and not self._anew:
                    # Whoever connects anew need not read again what was read.
                    self._since = began
            if not self._wanted() and not self._anew:
                self._awake.clear()

    def _tell(self, record: Record) -> None:
        headers = record.header_map()
        session = headers.get("session_id")
        if session is not None:
            self._ended(session, ending_of(record.topic, headers))


def ending_of(topic: str, headers: Mapping[str, str]) -> Ending:
    """How a session ended, by a record of one of the topics that tell of it."""
    if topic == EPISODES_COMPLETED.name:
        return "handed_in"
    if topic == ROLLOUTS_RETRIES.name:
        return "handed_in" if headers.get("stage") == "verification" else "failed"
    return "verified" if headers.get("status") in ("completed", "truncated") else "failed"
