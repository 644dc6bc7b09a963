"""Wires env_worker: tasks.in -> sessions.ready, and retries that ask for a new session -> sessions.ready."""

from rollstream.eventlog.apps import Clients, Route, Wiring, WorkerApp, worker_app
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.reading import Record
from rollstream.eventlog.waiting import MAX_WAITING, WaitingRoom
from rollstream.sealing import Sealer, load_sealer
from rollstream.settings import Settings
from schemas.retry import RetryScheduled
from services.env_worker.handler import SeedHandler
from topics.catalogue import DEAD_LETTERS, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, SESSIONS_READY, TASKS_IN

BOUNDARY = Boundary("env_worker", "seed")
LANES = 256
"""Seeding itself is fast; lanes overlap the round trips of the producer."""


def build(settings: Settings, sealer: Sealer | None = None) -> WorkerApp:
    clients = Clients.of(settings, BOUNDARY.worker)
    handler = SeedHandler(settings, sealer or load_sealer(settings), clients.producer, clients.control)
    waiting = WaitingRoom(clients.control, LANES)

    async def seed(record: Record) -> None:
        await handler.seed(record)

    async def seed_again(retry: RetryScheduled) -> None:
        await waiting.admit(retry, handler.seed_again)

    wiring = Wiring(
        boundary=BOUNDARY,
        routes=[
            Route(TASKS_IN, seed, lanes=LANES, read=lambda record: record),
            Route(
                ROLLOUTS_RETRIES,
                seed_again,
                lanes=MAX_WAITING,
                wants=lambda headers: headers.get("stage", "agent") == "agent",
            ),
        ],
        publishes=(SESSIONS_READY, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, DEAD_LETTERS),
    )
    return worker_app(settings, wiring, clients)
