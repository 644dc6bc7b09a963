"""Plans batches of records that it makes, as `rollstream.store.planner` does of the log's.

python -m performance.store_planner DESCRIPTOR
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice

import uvloop

from performance.store_log import EVENTS_PER_ATTEMPT, Log
from rollstream.store import handover
from rollstream.store.planner import Gathered, serve


@dataclass(frozen=True, slots=True)
class Made:
    """Which records to make."""

    first: int
    """Of the attempts."""
    offsets: dict[str, int]
    """Where each topic goes on."""
    batches: int
    batch_records: int


async def make(asked: Made) -> AsyncIterator[Gathered]:
    """First nothing, once all are made."""
    attempts = asked.batches * asked.batch_records // EVENTS_PER_ATTEMPT + 1
    log = Log(attempts, asked.first, asked.offsets).records()
    batches = [list(islice(log, asked.batch_records)) for _ in range(asked.batches)]
    yield Gathered([], {}, 0)
    for number, records in enumerate(batches, 1):
        yield Gathered(records, {}, 0, number == asked.batches)


async def run(connection: socket.socket) -> None:
    asked: Made = await asyncio.to_thread(handover.receive, connection)
    connection.setblocking(False)
    await serve(connection, make(asked), {(topic, 0): offset for topic, offset in asked.offsets.items()})


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        uvloop.run(run(connection))
