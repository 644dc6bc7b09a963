"""Wires store_worker: every topic -> DuckDB. It joins no consumer group, because its offsets stand in the store."""

import asyncio

from faststream.kafka import KafkaBroker

from rollstream.eventlog.apps import WorkerApp, bare_broker
from rollstream.eventlog.connection import close_admin, connect_admin
from rollstream.eventlog.provisioning import require
from rollstream.settings import Settings
from services.store_worker.handler import Projector
from topics.catalogue import CATALOGUE

NAME = "store_worker"


def build(settings: Settings) -> WorkerApp:
    projector = Projector(settings)
    running: list[asyncio.Task[None]] = []

    async def start() -> None:
        assert settings.bootstrap_servers is not None, "the broker is resolved before a worker starts"
        admin = await connect_admin(settings.bootstrap_servers)
        try:
            await require(admin, settings.kafka)
        finally:
            await close_admin(admin)
        await projector.start()
        task = asyncio.create_task(projector.run())
        task.add_done_callback(ended)
        running.append(task)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            app.break_with(error)

    async def stop() -> None:
        for task in running:
            task.cancel()
            await asyncio.wait([task])
        await projector.close()

    app = WorkerApp(bare_broker(settings, NAME), NAME, start=[start], stop=[stop])
    return app


def describe(settings: Settings) -> KafkaBroker:
    """What the projector reads, as FastStream subscribers: for the AsyncAPI document only, never started."""
    broker = bare_broker(settings, NAME)

    async def project(record: bytes) -> None:
        """Projected into DuckDB."""

    for topic in CATALOGUE:
        name = settings.kafka.topic_prefix + topic.name
        broker.subscriber(name, title=f"{NAME}:{topic.name}", description=topic.purpose)(project)
    return broker
