"""Wires verifier_worker: episodes.completed -> verdicts, rollouts.scored."""

from rollstream.blobs import BlobStore
from rollstream.environments.graders import GraderPool
from rollstream.environments.tickets import Tickets
from rollstream.eventlog.apps import Clients, Route, Wiring, WorkerApp, worker_app, worker_name
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.waiting import MAX_WAITING, WaitingRoom
from rollstream.models.openai import ModelPool
from rollstream.reaping import SandboxKeeping
from rollstream.sealing import Sealer, load_sealer
from rollstream.settings import Settings
from schemas.episode import EpisodeCompleted
from schemas.retry import RetryScheduled
from services.verifier_worker.handler import VerifyHandler
from topics.catalogue import (
    DEAD_LETTERS,
    EPISODES_COMPLETED,
    REWARDS_STEPS,
    ROLLOUTS_RETRIES,
    ROLLOUTS_SCORED,
    SANDBOXES_LEASES,
    VERDICTS,
)

BOUNDARY = Boundary("verifier_worker", "verification")


def build(settings: Settings, sealer: Sealer | None = None) -> WorkerApp:
    clients = Clients.of(settings, BOUNDARY.worker)
    name = worker_name(BOUNDARY.worker)
    graders = GraderPool(settings.verifier.grader_processes, settings.verifier.grader_timeout_s)
    models = ModelPool(settings)
    keeping = SandboxKeeping(settings, clients.producer, stage=BOUNDARY.stage, by=name, warm_of=BOUNDARY.worker)
    handler = VerifyHandler(
        settings.limits,
        Tickets.of(settings, sealer or load_sealer(settings)),
        graders,
        models,
        clients.producer,
        name,
        keeping,
        BlobStore.of(settings),
    )
    waiting = WaitingRoom(clients.control, settings.limits.max_concurrent_episodes)

    async def verify(episode: EpisodeCompleted) -> None:
        await handler.verify(episode)

    async def verify_again(retry: RetryScheduled) -> None:
        await waiting.admit(retry, handler.verify_again)

    wiring = Wiring(
        boundary=BOUNDARY,
        routes=[
            Route(EPISODES_COMPLETED, verify, lanes=settings.limits.max_concurrent_episodes, once=True),
            Route(
                ROLLOUTS_RETRIES,
                verify_again,
                lanes=MAX_WAITING,
                wants=lambda headers: headers.get("stage") == "verification",
            ),
        ],
        publishes=(VERDICTS, REWARDS_STEPS, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, SANDBOXES_LEASES, DEAD_LETTERS),
        start=[graders.start, keeping.start],
        stop=[graders.close, models.close, keeping.stop],
    )
    return worker_app(settings, wiring, clients)
