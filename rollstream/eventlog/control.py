"""Which runs are paused or cancelled, as every worker sees it: `runs.control`, read whole and followed.

The last word by offset holds. A worker starts only when it knows the state of every run, so no cancelled work begins.
"""

import asyncio
import logging
from collections.abc import Callable

from rollstream.cancelling import ended
from rollstream.eventlog.reading import LogReader, Record, interrupted, open_reader
from rollstream.settings import KafkaSettings
from schemas.envelope import Event
from schemas.events import UndecodableEvent, decode_any
from schemas.run import RunCancelled, RunPaused, RunResumed
from topics.catalogue import RUNS_CONTROL

log = logging.getLogger(__name__)

POLL_S = 0.2
RECONNECT_S = 1.0


class RunStates:
    """What has been said about runs so far. Pure."""

    def __init__(self) -> None:
        self._paused: dict[str, RunPaused] = {}
        self._cancelled: set[str] = set()

    def learn(self, event: Event) -> None:
        """Take in the next event, in the order of the log."""
        if isinstance(event, RunPaused):
            self._paused[event.run] = event
        elif isinstance(event, RunResumed):
            self._paused.pop(event.run, None)
            self._cancelled.discard(event.run)
        elif isinstance(event, RunCancelled):
            self._paused.pop(event.run, None)
            self._cancelled.add(event.run)

    def paused(self, run: str) -> RunPaused | None:
        return self._paused.get(run)

    def cancelled(self, run: str) -> bool:
        return run in self._cancelled

    @property
    def any_cancelled(self) -> bool:
        return bool(self._cancelled)

    def paused_runs(self) -> dict[str, RunPaused]:
        """Every run that waits for somebody to resume it, and why."""
        return dict(self._paused)


class RunControl:
    """`RunStates` that follow the log. One per process; `start` before the first record, `close` after the last."""

    def __init__(self, bootstrap: str, kafka: KafkaSettings) -> None:
        self._bootstrap = bootstrap
        self._kafka = kafka
        self._states = RunStates()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.on_cancelled: Callable[[str], None] = lambda run: None
        """Told of each run that is cancelled, so that running work can be stopped."""

    async def start(self) -> None:
        """Read everything that was ever said, then follow.

        Raises:
            BrokerUnavailable: nobody answers.
        """
        async with open_reader(self._bootstrap, self._kafka, [RUNS_CONTROL]) as reader:
            async for batch in reader.to_end():
                for record in batch:
                    self._learn(record)
            positions = await reader.positions()
        self._task = asyncio.create_task(self._follow(positions))

    async def close(self) -> None:
        await ended(self._task)

    def paused(self, run: str) -> RunPaused | None:
        """The pause that holds for a run, or None when it may go on."""
        return self._states.paused(run)

    def cancelled(self, run: str) -> bool:
        return self._states.cancelled(run)

    @property
    def any_cancelled(self) -> bool:
        """Whether any run is: asked of every record, before its headers are looked at."""
        return self._states.any_cancelled

    async def tell(self, event: Event) -> None:
        """Let what this process has just published hold at once, before it comes back from the log."""
        self._states.learn(event)
        async with self._changed:
            self._changed.notify_all()

    async def until_unpaused(self, run: str) -> None:
        """Return once a run is not paused (any more); at once if it never was."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.paused(run) is None)

    async def _follow(self, positions: dict[int, int]) -> None:
        while True:
            if error := await interrupted(self._read_once(positions)):
                log.warning("cannot follow runs.control, trying again: %r", error)
            await asyncio.sleep(RECONNECT_S)

    async def _read_once(self, positions: dict[int, int]) -> None:
        async with open_reader(self._bootstrap, self._kafka, [RUNS_CONTROL]) as reader:
            reader.seek(RUNS_CONTROL, positions)
            await self._read_on(reader, positions)

    async def _read_on(self, reader: LogReader, positions: dict[int, int]) -> None:
        while True:
            for record in await reader.poll(POLL_S):
                positions[record.partition] = record.offset + 1
                self._learn(record)
                async with self._changed:
                    self._changed.notify_all()

    def _learn(self, record: Record) -> None:
        try:
            event = decode_any(record.value, RUNS_CONTROL.events)
        except UndecodableEvent as error:
            log.warning("runs.control/%d/%d is ignored: %s", record.partition, record.offset, error)
            return
        self._states.learn(event)
        if isinstance(event, RunCancelled):
            self.on_cancelled(event.run)
