"""Wires agent_worker: sessions.ready -> agent.steps, env.actions, episodes.completed; env.observations on the side."""

from rollstream.blobs import BlobStore
from rollstream.eventlog.apps import Clients, Route, Wiring, WorkerApp, worker_app, worker_name
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.following import SessionFollower
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.models.openai import ModelPool
from rollstream.reaping import SandboxKeeping
from rollstream.settings import Settings
from schemas.events import decode
from schemas.session import SessionReady
from services.agent_worker.boxes import AgentBoxes
from services.agent_worker.egress import Egress
from services.agent_worker.handler import Delivery, PlayHandler
from services.agent_worker.pauses import Pauses
from topics.catalogue import (
    AGENT_STEPS,
    DEAD_LETTERS,
    ENV_ACTIONS,
    EPISODES_COMPLETED,
    ROLLOUTS_RETRIES,
    ROLLOUTS_SCORED,
    RUNS_CONTROL,
    SANDBOXES_LEASES,
    SESSIONS_READY,
)

BOUNDARY = Boundary("agent_worker", "agent")


def build(settings: Settings) -> WorkerApp:
    clients = Clients.of(settings, BOUNDARY.worker)
    models = ModelPool(settings)
    name = worker_name(BOUNDARY.worker)
    keeping = SandboxKeeping(settings, clients.producer, stage=BOUNDARY.stage, by=name, warm_of=BOUNDARY.worker)
    pauses = Pauses(clients.control, clients.producer, name)
    prompt = EventProducer.prompt(settings, f"{BOUNDARY.worker}-steps")
    sessions = SessionFollower(settings)
    egress = Egress(settings)
    boxes = AgentBoxes(settings, keeping, egress, BlobStore.of(settings), name)
    handler = PlayHandler(
        models, clients.producer, pauses, name, settings.limits.cleanup_timeout_seconds, sessions, prompt, boxes
    )

    async def play(delivery: Delivery) -> None:
        await handler.receive(delivery)

    def read(record: Record) -> Delivery:
        return Delivery(decode(record.value, SessionReady), record.partition, record.offset)

    wiring = Wiring(
        boundary=BOUNDARY,
        routes=[
            Route(
                SESSIONS_READY,
                play,
                lanes=settings.limits.max_concurrent_episodes,
                read=read,
                once=True,
                queue_timeout_s=settings.limits.queue_timeout_seconds,
                assigned=sessions.assigned,
            )
        ],
        publishes=(
            ENV_ACTIONS,
            AGENT_STEPS,
            EPISODES_COMPLETED,
            ROLLOUTS_RETRIES,
            ROLLOUTS_SCORED,
            RUNS_CONTROL,
            SANDBOXES_LEASES,
            DEAD_LETTERS,
        ),
        start=[prompt.start, sessions.start, keeping.start],
        stop=[sessions.close, prompt.stop, models.close, egress.close, keeping.stop],
    )
    app = worker_app(settings, wiring, clients)
    sessions.broke = app.break_with
    return app
