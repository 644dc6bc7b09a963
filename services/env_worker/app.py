"""Wires env_worker: tasks.in -> sessions.ready."""

from rollstream.eventlog.apps import Wiring, WorkerApp, worker_app
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.sealing import Sealer, load_sealer
from rollstream.settings import Settings
from schemas.task import TaskSubmitted
from services.env_worker.handler import SeedHandler
from topics.catalogue import DEAD_LETTERS, ROLLOUTS_SCORED, SESSIONS_READY, TASKS_IN

BOUNDARY = Boundary("env_worker", "seed", TaskSubmitted)
LANES = 256
"""Seeding itself is fast; lanes overlap the round trips of the producer."""


def build(settings: Settings, sealer: Sealer | None = None) -> WorkerApp:
    producer = EventProducer(settings.bootstrap_servers, settings.kafka, client_id="rollstream-env_worker")
    handler = SeedHandler(settings, sealer or load_sealer(settings), producer)

    async def seed(record: Record) -> None:
        await handler.seed(record)

    wiring = Wiring(
        boundary=BOUNDARY, consumes=TASKS_IN, publishes=(SESSIONS_READY, ROLLOUTS_SCORED, DEAD_LETTERS), lanes=LANES
    )
    return worker_app(settings, wiring, producer, seed, read=lambda record: record)
