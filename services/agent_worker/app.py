"""Wires agent_worker: sessions.ready -> agent.steps, episodes.completed."""

from rollstream.eventlog.apps import Wiring, WorkerApp, worker_app, worker_name
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.producer import EventProducer
from rollstream.models.openai import ModelPool
from rollstream.settings import Settings
from schemas.session import SessionReady
from services.agent_worker.handler import PlayHandler
from topics.catalogue import AGENT_STEPS, DEAD_LETTERS, EPISODES_COMPLETED, ROLLOUTS_SCORED, SESSIONS_READY

BOUNDARY = Boundary("agent_worker", "agent", SessionReady)


def build(settings: Settings) -> WorkerApp:
    producer = EventProducer(settings.bootstrap_servers, settings.kafka, client_id="rollstream-agent_worker")
    models = ModelPool(settings)
    handler = PlayHandler(models, producer, worker_name(BOUNDARY.worker), settings.limits.cleanup_timeout_seconds)

    async def play(descriptor: SessionReady) -> None:
        await handler.play(descriptor)

    wiring = Wiring(
        boundary=BOUNDARY,
        consumes=SESSIONS_READY,
        publishes=(AGENT_STEPS, EPISODES_COMPLETED, ROLLOUTS_SCORED, DEAD_LETTERS),
        lanes=settings.limits.max_concurrent_episodes,
        stop=[models.close],
    )
    return worker_app(settings, wiring, producer, play)
