"""Wires agent_worker: sessions.ready -> agent.steps, episodes.completed."""

from rollstream.eventlog.apps import Clients, Route, Wiring, WorkerApp, worker_app, worker_name
from rollstream.eventlog.failures import Boundary
from rollstream.models.openai import ModelPool
from rollstream.settings import Settings
from schemas.session import SessionReady
from services.agent_worker.handler import PlayHandler
from services.agent_worker.pauses import Pauses
from topics.catalogue import (
    AGENT_STEPS,
    DEAD_LETTERS,
    EPISODES_COMPLETED,
    ROLLOUTS_RETRIES,
    ROLLOUTS_SCORED,
    RUNS_CONTROL,
    SESSIONS_READY,
)

BOUNDARY = Boundary("agent_worker", "agent")


def build(settings: Settings) -> WorkerApp:
    clients = Clients.of(settings, BOUNDARY.worker)
    models = ModelPool(settings)
    name = worker_name(BOUNDARY.worker)
    pauses = Pauses(clients.control, clients.producer, name)
    handler = PlayHandler(models, clients.producer, pauses, name, settings.limits.cleanup_timeout_seconds)

    async def play(descriptor: SessionReady) -> None:
        await handler.play(descriptor)

    wiring = Wiring(
        boundary=BOUNDARY,
        routes=[Route(SESSIONS_READY, play, lanes=settings.limits.max_concurrent_episodes, once=True)],
        publishes=(AGENT_STEPS, EPISODES_COMPLETED, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, RUNS_CONTROL, DEAD_LETTERS),
        stop=[models.close],
    )
    return worker_app(settings, wiring, clients)
