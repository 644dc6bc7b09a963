"""A worker of one topic that ends every task at once, but blocks its event loop on the first: once in a marker's life.

Whoever was blocked adds a dot to the marker for each task that it ends afterwards.

python -m tests.chaos.blocking_worker --block-s 9 --marker PATH
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from rollstream.eventlog.apps import Clients, Route, Wiring, worker_app
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.lanes import LaneSubscriber
from rollstream.settings import load_settings
from schemas.failure import ErrorInfo
from schemas.rollout import RolloutScored
from schemas.task import TaskSubmitted
from topics.catalogue import DEAD_LETTERS, ROLLOUTS_SCORED, TASKS_IN

BOUNDARY = Boundary("blocking_worker", "seed")
TOLD = ErrorInfo(kind="told_to", stage="seed", message="it was told to end so", retryable=False)


async def run(block_s: float, marker: Path, max_poll_ms: int | None, session_s: float | None) -> None:
    settings = load_settings()
    if session_s is not None:
        settings = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"session_timeout_s": session_s})})
    clients = Clients.of(settings, BOUNDARY.worker)

    blocked: list[Path] = []

    def block_once() -> None:
        with suppress(FileExistsError), marker.open("x"):
            blocked.append(marker)
            time.sleep(block_s)

    async def end(task: TaskSubmitted) -> None:
        for file in blocked:
            file.write_text(file.read_text() + ".")
        block_once()
        await clients.producer.publish([RolloutScored.of_failure(ids, TOLD, task.occurred_at) for ids in task.sessions()])

    wiring = Wiring(BOUNDARY, [Route(TASKS_IN, end, lanes=8)], (ROLLOUTS_SCORED, DEAD_LETTERS))
    app = worker_app(settings, wiring, clients)
    for subscriber in app.brokers[0].subscribers:
        assert isinstance(subscriber, LaneSubscriber)
        if max_poll_ms is not None:
            subscriber._connection_args["max_poll_interval_ms"] = max_poll_ms
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await app.start()
    print(json.dumps({"event": "ready"}), file=sys.stderr, flush=True)
    done = [asyncio.create_task(stop.wait()), asyncio.create_task(app.broken.wait())]
    await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
    await app.stop()
    sys.exit(f"error: {app.failure}" if app.broken.is_set() else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-s", type=float, required=True)
    parser.add_argument("--marker", type=Path, required=True)
    parser.add_argument("--max-poll-ms", type=int)
    parser.add_argument("--session-s", type=float)
    given = parser.parse_args()
    asyncio.run(run(given.block_s, given.marker, given.max_poll_ms, given.session_s))
