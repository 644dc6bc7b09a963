"""Wires verifier_worker: episodes.completed -> verdicts, rollouts.scored."""

from rollstream.environments.graders import GraderPool
from rollstream.environments.protocol import Services
from rollstream.eventlog.apps import Wiring, WorkerApp, worker_app, worker_name
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.producer import EventProducer
from rollstream.sealing import Sealer, load_sealer
from rollstream.settings import Settings
from schemas.episode import EpisodeCompleted
from services.verifier_worker.handler import VerifyHandler
from topics.catalogue import DEAD_LETTERS, EPISODES_COMPLETED, ROLLOUTS_SCORED, VERDICTS

BOUNDARY = Boundary("verifier_worker", "verification", EpisodeCompleted)


def build(settings: Settings, sealer: Sealer | None = None) -> WorkerApp:
    producer = EventProducer(settings.bootstrap_servers, settings.kafka, client_id="rollstream-verifier_worker")
    graders = GraderPool(settings.verifier.grader_processes, settings.verifier.grader_timeout_s)
    handler = VerifyHandler(
        settings.limits,
        sealer or load_sealer(settings),
        Services(graders=graders),
        producer,
        worker_name(BOUNDARY.worker),
    )

    async def verify(episode: EpisodeCompleted) -> None:
        await handler.verify(episode)

    wiring = Wiring(
        boundary=BOUNDARY,
        consumes=EPISODES_COMPLETED,
        publishes=(VERDICTS, ROLLOUTS_SCORED, DEAD_LETTERS),
        lanes=settings.limits.max_concurrent_episodes,
        start=[graders.start],
        stop=[graders.close],
    )
    return worker_app(settings, wiring, producer, verify)
