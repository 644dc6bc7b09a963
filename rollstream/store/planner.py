"""A process that reads the log and plans batches, for the one that writes them: both work at once, with no lock between them.

Started by `open_planned`, and ends when its starter does, however that is. It has no state of its own: after any failure
another one goes on from what is stored.
"""

import argparse
import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from itertools import cycle
from typing import NamedTuple

import uvloop
from aiokafka.errors import KafkaError

from rollstream.cancelling import ended
from rollstream.errors import UsageError
from rollstream.eventlog.reading import Record
from rollstream.store import handover
from rollstream.store.batch import Position, plan
from rollstream.store.feed import MAX_BATCH_BYTES, Feed, size_of
from rollstream.store.planned import LogInterrupted, Planned, Request

FETCH_TIMEOUT_S = 0.5


class Gathered(NamedTuple):
    """Records for a batch."""

    records: list[Record]
    ends: Mapping[Position, int]
    behind: int
    is_last: bool = False


async def serve(
    connection: socket.socket,
    source: AsyncIterator[Gathered],
    positions: Mapping[Position, int],
    *,
    keep_repeated: bool = False,
) -> None:
    """Plan one batch after another, one ahead of what is asked for, until nobody asks any more."""
    asked = asyncio.Semaphore(0)
    working = asyncio.create_task(_answer(connection, source, positions, asked, keep_repeated=keep_repeated))
    listening = asyncio.create_task(_listen(connection, asked))
    await asyncio.wait([working, listening], return_when=asyncio.FIRST_COMPLETED)
    await ended(working, listening)
    if not working.cancelled():
        working.result()


async def _listen(connection: socket.socket, asked: asyncio.Semaphore) -> None:
    with suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(connection, 1):
            asked.release()


async def _answer(
    connection: socket.socket,
    source: AsyncIterator[Gathered],
    positions: Mapping[Position, int],
    asked: asyncio.Semaphore,
    *,
    keep_repeated: bool,
) -> None:
    # The writer asks when it has done with what it was sent last: so one is in use while the other is filled.
    memories = cycle([handover.Memory(), handover.Memory()])
    with suppress(BrokenPipeError):
        try:
            async for records, ends, behind, is_last in source:
                batch = plan(records, positions, ends, keep_repeated=keep_repeated)
                records.clear()
                positions = batch.offsets
                memory = next(memories)
                memory.put(Planned(batch, behind, is_last))
                del batch
                await asked.acquire()
                memory.send(connection)
        except (UsageError, LogInterrupted) as error:
            await asked.acquire()
            handover.send(connection, error)


async def read(request: Request) -> AsyncGenerator[Gathered, None]:
    """The log, as it is asked for.

    Raises:
        LogInterrupted: the broker failed.
        UsageError: nobody answers, or the log is not the one that the positions are from.
    """
    feed = await Feed.open(request.bootstrap, request.kafka, request.positions)
    try:
        if request.until is not None:
            await feed.whole_log()
        is_last = False
        while not is_last:
            records = await _gather(feed, request)
            if request.until is not None:
                records = within(records, request.until)
                is_last = await feed.reached(request.until)
            yield Gathered(records, feed.ends(), feed.behind(), is_last)
    except (KafkaError, OSError) as error:
        raise LogInterrupted(f"{type(error).__name__}: {error}") from error
    finally:
        await feed.close()


async def _gather(feed: Feed, request: Request) -> list[Record]:
    """Fetch until a batch is full, or its time or the log is over: large batches of a backlog, few when there is little."""
    until = request.until
    over = time.monotonic() + request.gather_s if until is None else float("inf")
    records: list[Record] = []
    size = 0
    while len(records) < request.most_records and size < MAX_BATCH_BYTES and (left_s := over - time.monotonic()) > 0:
        if until is not None and await feed.reached(until):
            break
        found = await feed.fetch(min(left_s, FETCH_TIMEOUT_S), request.most_records - len(records))
        records += found
        size += size_of(found)
    return records


def within(records: list[Record], ends: Mapping[Position, int]) -> list[Record]:
    """Those that stood in the log when its ends were looked up."""
    return [record for record in records if record.offset < ends.get((record.topic, record.partition), 0)]


async def _run(connection: socket.socket) -> None:
    with suppress(EOFError):
        request: Request = handover.receive(connection)
        connection.setblocking(False)
        async with aclosing(read(request)) as source:
            await serve(connection, source, request.positions, keep_repeated=request.keep_repeated)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollstream.store.planner", description=__doc__)
    parser.add_argument("descriptor", type=int, help="of a connected Unix socket; its other end is the writer's")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # It ends when its other end is closed: a Ctrl-C is for the writer, which still has to store what there is.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=parser.parse_args().descriptor) as connection:
        uvloop.run(_run(connection))


if __name__ == "__main__":
    main()
