"""Batches of the log, planned by a process of their own."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.errors import RollstreamError
from rollstream.settings import KafkaSettings
from rollstream.store import handover
from rollstream.store.batch import Batch, Position

END_S = 5.0
"""How long the process may take to end by itself."""
PLANNER = "rollstream.store.planner"
_LITTLE_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""What it takes for a batch, it gives back after it: one thread allocates, and batches are all of about one size."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to read, and how to plan it."""

    bootstrap: str
    kafka: KafkaSettings
    positions: Mapping[Position, int] = field(default_factory=dict)
    """What is stored; partitions that are not named are read from their start."""
    until: Mapping[Position, int] | None = None
    """Where to end; None follows the log for ever."""
    most_records: int = 10_000
    """Of a batch: many where nobody waits for the first of them."""
    gather_s: float = 1.0
    """How long records of a quiet log are gathered into one batch, if there is no end."""
    keep_repeated: bool = False
    """See `plan`."""


class Planned(NamedTuple):
    """A batch on top of those before it."""

    batch: Batch
    behind: int
    """How many records more the log is known to have."""
    is_last: bool = False


class LogInterrupted(RollstreamError):
    """The log could not be read on. Reading it anew from what is stored loses nothing."""


class PlannedLog:
    """What `Request` asks for, batch by batch; one task reads. Create it with `open_planned`."""

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self.pid = process.pid
        self._process = process
        self._connection = connection

    async def next(self) -> Planned:
        """The next batch, which is planned while the one before it is written: that one must not be used any more.

        Raises:
            LogInterrupted: the broker failed, or the process was killed.
            UsageError: no broker answers, or the log is not the one that the positions are from.
        """
        try:
            self._connection.send(b".")
            found = await asyncio.to_thread(handover.receive, self._connection)
        except (EOFError, ConnectionError):
            raise await self._end() from None
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Planned)
        return found

    async def batches(self) -> AsyncIterator[Planned]:
        """All batches, up to where the request ends. Raises as `next`."""
        while not (planned := await self.next()).is_last:
            yield planned
        yield planned

    async def close(self) -> None:
        """End the process. A `next` that waits ends, too."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._connection.close()

    async def _end(self) -> Exception:
        code = await self._process.wait()
        if code < 0:
            return LogInterrupted(f"the process that reads the log was ended by signal {-code}")
        return RollstreamError(f"the process that reads the log ended with {code}: what it said stands above")


@asynccontextmanager
async def open_planned(request: object, module: str = PLANNER) -> AsyncIterator[PlannedLog]:
    """Start to read and plan.

    Args:
        request: what `module` expects: a `Request`, unless it is another one.
        module: what the process runs.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(descriptor),
            pass_fds=[descriptor],
            stdin=asyncio.subprocess.DEVNULL,
            env={**_LITTLE_MEMORY, **os.environ},
        )
    log = PlannedLog(process, ours)
    try:
        handover.send(ours, request)
        yield log
    finally:
        await log.close()
