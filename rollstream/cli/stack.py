"""Broker, topics and workers of one data directory, for as long as a command needs them.

A command stops what it started and nothing else: a broker or workers that it found stay as they were.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollstream.broker import EmbeddedBroker, ensure_broker
from rollstream.errors import UsageError
from rollstream.eventlog import provisioning
from rollstream.eventlog.connection import close_admin, connect_admin
from rollstream.eventlog.groups import open_groups
from rollstream.settings import Settings
from rollstream.supervisor import ProcessSpec, Supervisor, SupervisorLock, running

READY_TIMEOUT_S = 90.0
KILL_MARGIN_S = 30.0
"""Beyond the workers' own drain timeout: clean-up of what they held."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the log is, and who keeps the workers alive."""

    bootstrap: str
    supervisor: Supervisor | None
    """None when the workers were found running, under another process."""

    def check(self) -> None:
        """Look after the workers, if they are ours; call it often.

        Raises:
            WorkersFailed: they cannot be kept alive.
        """
        if self.supervisor is not None:
            self.supervisor.poll()


def home(settings: Settings) -> Path:
    """The data directory, whatever directory the commands that share it are called in."""
    return settings.data_dir.expanduser().resolve()


def grace_s(settings: Settings) -> float:
    """How long workers may take to stop before they are killed."""
    return settings.kafka.drain_timeout_s + KILL_MARGIN_S


@contextmanager
def started(settings: Settings, specs: Sequence[ProcessSpec], say: Say, environment: Mapping[str, str] = {}) -> Iterator[Stack]:
    """Start everything, and stop it at the end.

    Raises:
        AlreadyRunning: the data directory's workers run already.
        BrokerUnavailable: no broker answers and none can be started.
        TopicMismatch: the topics have other partitions than the settings say.
        WorkersFailed: a worker died too often, or was not ready in time.
    """
    begun = time.monotonic()
    with SupervisorLock(home(settings), settings.pool), _broker(settings, say) as bootstrap:
        asyncio.run(require_topics(bootstrap, settings))
        supervisor = Supervisor(
            home(settings),
            specs,
            _worker_command,
            bootstrap=bootstrap,
            environment={**_location(settings, bootstrap), **environment},
            say=say,
            pool=settings.pool,
        )
        try:
            supervisor.start()
            supervisor.await_ready(READY_TIMEOUT_S)
            say(f"{', '.join(worker for spec in specs for worker in spec.workers)} ready in {time.monotonic() - begun:.1f} s")
            yield Stack(bootstrap, supervisor)
        finally:
            say("stopping the workers (Ctrl-C ends them at once)")
            supervisor.stop(grace_s(settings))
            say("stopped the workers")


@contextmanager
def found_or_started(
    settings: Settings, specs: Sequence[ProcessSpec], say: Say, environment: Mapping[str, str] = {}
) -> Iterator[Stack]:
    """The workers that run already, or new ones for the time of the `with`.

    Raises:
        UsageError: those of this data directory consume from another broker than the settings name.
    """
    named = settings.bootstrap_servers
    found = running(home(settings), settings.pool)
    if found is not None:
        if named and named != found.bootstrap:
            raise UsageError(
                f"the workers of {home(settings)} consume from {found.bootstrap}, and the settings name {named}: "
                "stop them with `rollstream down`, or use another --data-dir"
            )
        say(f"using the workers that run already (pid {found.supervisor.pid}): {', '.join(found.workers())}")
        yield Stack(found.bootstrap, None)
    elif named and asyncio.run(_is_attended(named, settings)):
        # Workers of our own would share their work, with another sealing key and other models.
        say(f"using the workers that consume from {named} already")
        yield Stack(named, None)
    else:
        with started(settings, specs, say, environment) as stack:
            yield stack


async def _is_attended(bootstrap: str, settings: Settings) -> bool:
    async with open_groups(bootstrap, settings) as groups:
        return not any(one.pool == settings.pool for one in await groups.unattended())


@contextmanager
def _broker(settings: Settings, say: Say) -> Iterator[str]:
    """A broker: the user's own, one that was found, or one that ends with the `with`."""
    embedded = EmbeddedBroker(home(settings), notice=say)
    is_ours = settings.bootstrap_servers is None and embedded.status() is None
    try:
        bootstrap = ensure_broker(settings, notice=say)
        say(f"{'started the' if is_ours else 'using the'} broker at {bootstrap}")
        yield bootstrap
    finally:
        if is_ours and embedded.stop():
            say("stopped the broker")


async def require_topics(bootstrap: str, settings: Settings) -> None:
    """Make sure that the broker answers and has the topics.

    Raises:
        BrokerUnavailable: nobody answers.
        TopicMismatch: the topics have other partitions than the settings say.
    """
    admin = await connect_admin(bootstrap)
    try:
        await provisioning.require(admin, settings.kafka)
    finally:
        await close_admin(admin)


def _worker_command(spec: ProcessSpec) -> list[str]:
    return [sys.executable, "-m", "services", *spec.workers]


def _location(settings: Settings, bootstrap: str) -> dict[str, str]:
    """What a worker cannot find out by itself; all other settings come from the same file and environment as ours."""
    return {
        "ROLLSTREAM_DATA_DIR": str(home(settings)),
        "KAFKA_BOOTSTRAP_SERVERS": bootstrap,
        "ROLLSTREAM_BOOTSTRAP_SERVERS": bootstrap,
        "ROLLSTREAM_POOL": settings.pool,
    }
