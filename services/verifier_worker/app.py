"""Wires verifier_worker: episodes.completed -> verdicts, rollouts.scored."""

from rollstream.environments.graders import GraderPool
from rollstream.environments.protocol import Services
from rollstream.eventlog.apps import Clients, Route, Wiring, WorkerApp, worker_app, worker_name
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.waiting import MAX_WAITING, WaitingRoom
from rollstream.sealing import Sealer, load_sealer
from rollstream.settings import Settings
from schemas.episode import EpisodeCompleted
from schemas.retry import RetryScheduled
from services.verifier_worker.handler import VerifyHandler
from topics.catalogue import DEAD_LETTERS, EPISODES_COMPLETED, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, VERDICTS

BOUNDARY = Boundary("verifier_worker", "verification")


def build(settings: Settings, sealer: Sealer | None = None) -> WorkerApp:
    clients = Clients.of(settings, BOUNDARY.worker)
    graders = GraderPool(settings.verifier.grader_processes, settings.verifier.grader_timeout_s)
    handler = VerifyHandler(
        settings.limits,
        sealer or load_sealer(settings),
        Services(graders=graders),
        clients.producer,
        worker_name(BOUNDARY.worker),
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
        publishes=(VERDICTS, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, DEAD_LETTERS),
        start=[graders.start],
        stop=[graders.close],
    )
    return worker_app(settings, wiring, clients)
