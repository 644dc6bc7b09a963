"""Waiting retries: each costs a timer, and only those whose time has come take part in the work."""

import asyncio
from collections.abc import Awaitable, Callable

from rollstream.eventlog.control import RunControl
from rollstream.eventlog.running import only_waiting
from schemas.envelope import now
from schemas.retry import RetryScheduled

MAX_WAITING = 100_000
"""Lanes of a subscription to retries: a lane that only waits is a timer."""


class WaitingRoom:
    """Holds retries until they are due and their run is not paused, then lets so many at a time do their work."""

    def __init__(self, control: RunControl, at_once: int) -> None:
        self._control = control
        self._slots = asyncio.Semaphore(at_once)

    async def admit(self, retry: RetryScheduled, work: Callable[[RetryScheduled], Awaitable[None]]) -> None:
        """Wait, then work; nothing happens if the run is cancelled meanwhile."""
        # Never longer than was planned, whatever the clocks of two hosts say.
        delay = min(retry.not_before - now(), retry.not_before - retry.occurred_at)
        with only_waiting():
            if delay.total_seconds() > 0:
                await asyncio.sleep(delay.total_seconds())
            await self._control.until_unpaused(retry.run)
        async with self._slots:
            if not self._control.cancelled(retry.run):
                await work(retry)
