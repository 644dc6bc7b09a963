"""Wires env_worker: tasks.in -> sessions.ready, retries that ask for a new session -> sessions.ready, and
env.actions -> env.observations, rewards.steps."""

from rollstream.blobs import BlobStore
from rollstream.environments.tickets import Tickets
from rollstream.eventlog.apps import Clients, Route, Wiring, WorkerApp, worker_app, worker_name
from rollstream.eventlog.endings import SessionEndings
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.groups import Consumption
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.eventlog.waiting import MAX_WAITING, WaitingRoom
from rollstream.models.openai import ModelPool
from rollstream.reaping import SandboxKeeping
from rollstream.sandboxes.held import SessionBoxes
from rollstream.sealing import Sealer, load_sealer
from rollstream.settings import Settings
from schemas.action import ActionRequested
from schemas.events import decode
from schemas.retry import RetryScheduled
from schemas.sandbox import SandboxHolder
from services.env_worker.handler import SeedHandler
from services.env_worker.sessions import OpenSessions, Outside
from services.env_worker.stepping import StepHandler
from services.env_worker.worlds import WorldCache
from topics.catalogue import (
    DEAD_LETTERS,
    ENV_ACTIONS,
    ENV_OBSERVATIONS,
    REWARDS_STEPS,
    ROLLOUTS_RETRIES,
    ROLLOUTS_SCORED,
    SANDBOXES_LEASES,
    SESSIONS_READY,
    TASKS_IN,
)

BOUNDARY = Boundary("env_worker", "seed")
JOURNALS = "journals"
"""In the data directory: what was done in boxes, by workers of this host."""
LANES = 256
"""Seeding itself is fast; lanes overlap the round trips of the producer."""


def build(settings: Settings, sealer: Sealer | None = None) -> WorkerApp:
    clients = Clients.of(settings, BOUNDARY.worker)
    tickets = Tickets.of(settings, sealer or load_sealer(settings))
    handler = SeedHandler(settings, tickets, clients.producer, clients.control)
    models = ModelPool(settings)
    prompt = EventProducer.prompt(settings, f"{BOUNDARY.worker}-observations")
    limits = settings.limits
    name = worker_name(BOUNDARY.worker)
    keeping = SandboxKeeping(settings, clients.producer, stage="agent", by=name)
    blobs = BlobStore.of(settings)
    group = Consumption(BOUNDARY.worker, ENV_ACTIONS, settings.pool).group(settings.kafka)

    def outside(request: ActionRequested) -> Outside:
        backend = request.composition.sandbox
        if backend is None:
            return Outside(blobs=blobs)
        holder = SandboxHolder(worker=name, run=request.run, session=request.session, consumer_group=group)
        return Outside(SessionBoxes(keeping.leases, backend, holder, settings.data_dir / JOURNALS), blobs)

    sessions = OpenSessions(
        settings.env.max_open_sessions, limits.cleanup_timeout_seconds, limits.default_episode_timeout_seconds, outside
    )
    endings = SessionEndings(settings, lambda: len(sessions) > 0, sessions.ended)
    sessions.opened = endings.wake
    stepper = StepHandler(
        tickets,
        models,
        prompt,
        WorldCache(settings.env.world_cache_mib * 2**20),
        sessions,
        limits.step_timeout_seconds,
        name,
    )
    waiting = WaitingRoom(clients.control, LANES)

    async def seed(record: Record) -> None:
        await handler.seed(record)

    async def seed_again(retry: RetryScheduled) -> None:
        await waiting.admit(retry, handler.seed_again)

    async def step(delivery: tuple[ActionRequested, int]) -> None:
        await stepper.step(*delivery)

    def action_of(record: Record) -> tuple[ActionRequested, int]:
        return decode(record.value, ActionRequested), record.partition

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
            Route(ENV_ACTIONS, step, lanes=settings.env.action_lanes, read=action_of, assigned=sessions.assigned),
        ],
        publishes=(
            SESSIONS_READY,
            ENV_OBSERVATIONS,
            REWARDS_STEPS,
            ROLLOUTS_RETRIES,
            ROLLOUTS_SCORED,
            SANDBOXES_LEASES,
            DEAD_LETTERS,
        ),
        start=[prompt.start, keeping.start, endings.start, sessions.start],
        stop=[endings.close, sessions.close, keeping.stop, prompt.stop, models.close],
    )
    app = worker_app(settings, wiring, clients)
    stop_run = clients.control.on_cancelled

    def cancelled(run: str) -> None:
        stop_run(run)
        sessions.cancelled(run)

    clients.control.on_cancelled = cancelled
    endings.broke = app.break_with
    return app
