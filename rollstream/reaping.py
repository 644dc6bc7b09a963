"""The sandboxes of a process, wired: providers, leases, what is kept warm, and the reapers that read the log.

`SandboxKeeping` is what a worker's wiring starts and stops. Asking for a box is what brings a provider in, and so does a lease
in the log: boxes that others have left on this host are reaped by whoever is there.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from rollstream.cancelling import ended
from rollstream.errors import BoundaryFailure, Refused, SandboxUnavailable, Stage, UsageError
from rollstream.eventlog.connection import UNCONNECTED, installation_of
from rollstream.eventlog.reading import open_reader
from rollstream.sandboxes import registry
from rollstream.sandboxes.leases import EventSink, Leases
from rollstream.sandboxes.protocol import Mount, Sandbox, SandboxProvider
from rollstream.sandboxes.reaper import Reaper
from rollstream.sandboxes.warm import Supply, WarmPool
from rollstream.settings import KafkaSettings, Settings, WarmSettings
from schemas.envelope import Event, now
from schemas.events import UndecodableEvent, decode_any
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxReleased, SandboxSpec
from topics.catalogue import SANDBOXES_LEASES

log = logging.getLogger(__name__)

LOOK_BACK = timedelta(days=7)
"""How old a lease may be for its host to be looked at when a worker starts. A box that is older has ended by itself."""
OVERLAP = timedelta(minutes=5)
"""By how much two looks at the log overlap: a record's time is its producer's."""
LAST_REMOVALS_S = 10.0
"""How long a worker that stops waits for the boxes that it is removing, and for the log to know: it may be away."""


async def lease_events(bootstrap: str, kafka: KafkaSettings, since: datetime) -> AsyncIterator[Event]:
    """Events of `sandboxes.leases` since a time; what cannot be read is said, and left out.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    async with open_reader(bootstrap, kafka, [SANDBOXES_LEASES]) as reader:
        await reader.seek_to_time(since)
        async for batch in reader.to_end():
            for record in batch:
                try:
                    yield decode_any(record.value, SANDBOXES_LEASES.events)
                except UndecodableEvent as error:
                    log.warning("sandboxes.leases/%d/%d is ignored: %s", record.partition, record.offset, error)


async def reaper_of(settings: Settings, provider: SandboxProvider, sink: EventSink, by: str) -> Reaper:
    """The reaper of a provider's host for this installation.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    bootstrap = settings.bootstrap_servers or UNCONNECTED
    installation = await installation_of(bootstrap, settings.kafka)

    async def read(since: datetime) -> Iterable[Event]:
        return [event async for event in lease_events(bootstrap, settings.kafka, since)]

    return Reaper(provider, read, sink, installation, by)


@dataclass(frozen=True, slots=True)
class _Kept:
    """One provider in use: boxes are leased from it, and what others have left behind is removed."""

    provider: SandboxProvider
    leases: Leases
    reaper: Reaper
    pool: WarmPool
    reaping: asyncio.Task[None]

    async def stop(self) -> None:
        self.reaping.cancel()
        await asyncio.wait([self.reaping], timeout=LAST_REMOVALS_S)
        await self.pool.close()
        await self.provider.close()


@dataclass(slots=True)
class OpenLeases:
    """Which hosts have boxes of an installation that nobody has released, by provider. Bounded by what is open."""

    installation: str
    _open: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Events of one box in their order."""
        if isinstance(event, SandboxLeased) and event.installation == self.installation:
            self._open[event.sandbox] = event.provider, event.host
        elif isinstance(event, SandboxReleased):
            self._open.pop(event.sandbox, None)

    def hosts(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for provider, host in self._open.values():
            found.setdefault(provider, set()).add(host)
        return found


class SandboxKeeping:
    """A worker's sandboxes, of whatever providers its sessions name. Each provider's orphans are reaped from its first use on;
    from the start, those of the one in the settings, and of all that open leases on this host name."""

    def __init__(self, settings: Settings, sink: EventSink, *, stage: Stage, by: str, warm_of: str | None = None) -> None:
        """
        Args:
            warm_of: the worker whose boxes of `[sandboxes.warm]` are kept here; None keeps none.
        """
        self._settings = settings
        self._bootstrap = settings.bootstrap_servers or UNCONNECTED
        self._sink = sink
        self._stage = stage
        self._by = by
        self._warm_of = warm_of
        self._kept: dict[str, asyncio.Task[_Kept]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._unknown: set[str] = set()
        """Providers that this process cannot load."""

    async def start(self) -> None:
        """Begin to reap, and to keep boxes warm. No engine need answer for that.

        Raises:
            Refused: there is no such provider as the settings name, or it may not be used.
        """
        named = {self._settings.sandboxes.provider, *(self._provider_of(one.provider) for one in self._warm())}
        for name in sorted(name for name in named if name):
            await self._of(name)
        self._looking = asyncio.create_task(self._look_for_leases())

    @asynccontextmanager
    async def lease(
        self,
        provider: str,
        spec: SandboxSpec,
        holder: SandboxHolder,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
    ) -> AsyncIterator[Sandbox]:
        """A started box of a provider, for the time of the `with`.

        Raises:
            SandboxUnavailable: the provider failed; a retry can help.
            Refused: there is none of that name, it may not be used, or it cannot hold the box to its specification.
        """
        kept = await self._of(provider)
        async with kept.pool.lease(spec, holder, gateway=gateway, mounts=mounts) as box:
            yield box

    async def leases(self, provider: str) -> Leases:
        """The leases of a provider, for boxes that outlive a `with`. Raises as `lease`."""
        return (await self._of(provider)).leases

    async def fence_off(self, provider: str, holder: SandboxHolder) -> None:
        """Remove what was left of a session by whoever played it under a lower fence.

        Raises:
            SandboxUnavailable: the provider failed; a retry can help.
        """
        kept = await self._of(provider)
        for box in await kept.reaper.fence_off(holder):
            log.info("removed sandbox %s of session %s, which was taken over", box, holder.session)

    def of_session(self, provider: str, holder: SandboxHolder) -> "SessionSandboxes":
        """What environments get boxes from, in the name of one session."""
        return SessionSandboxes(self, provider, holder)

    async def stop(self) -> None:
        await ended(self._looking)
        for opening in [*self._kept.values()]:
            # What is being opened only asks the broker who we are.
            with suppress(BoundaryFailure, UsageError):
                await (await opening).stop()
        self._kept.clear()

    async def _of(self, name: str) -> _Kept:
        if name not in self._kept:
            self._kept[name] = opening = asyncio.create_task(self._open(name))
            opening.add_done_callback(partial(self._forget_if_failed, name))
        # Others wait for it, too.
        return await asyncio.shield(self._kept[name])

    def _forget_if_failed(self, name: str, opening: asyncio.Task[_Kept]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._kept.pop(name, None)

    async def _open(self, name: str) -> _Kept:
        sandboxes = self._settings.sandboxes
        provider = registry.load(sandboxes, self._stage, name)
        reaper = await reaper_of(self._settings, provider, self._sink, self._by)
        leases = Leases(provider, self._sink, installation=reaper.installation, lease_s=sandboxes.lease_seconds)
        supplies = [
            Supply(one.spec, one.count, one.idle_seconds) for one in self._warm() if self._provider_of(one.provider) == name
        ]
        pool = WarmPool(leases, supplies, SandboxHolder(worker=self._by))
        return _Kept(provider, leases, reaper, pool, asyncio.create_task(reaper.run(sandboxes.reap_interval_seconds)))

    def _warm(self) -> list[WarmSettings]:
        """What this worker keeps warm."""
        return [one for one in self._settings.sandboxes.warm.values() if one.worker == self._warm_of]

    def _provider_of(self, named: str | None) -> str:
        return named or registry.default_name(self._settings.sandboxes)

    async def _look_for_leases(self) -> None:
        """Bring in, now and then for ever, providers that others use on this host. Who is away is asked again."""
        interval_s = self._settings.sandboxes.reap_interval_seconds
        since = now() - LOOK_BACK
        undecided: dict[str, set[str]] = {}
        while True:
            looked_at = now()
            try:
                found = OpenLeases(await installation_of(self._bootstrap, self._settings.kafka))
                async for event in lease_events(self._bootstrap, self._settings.kafka, since):
                    found.add(event)
                for name, hosts in found.hosts().items():
                    undecided.setdefault(name, set()).update(hosts)
                since = looked_at - OVERLAP
                for name in [*undecided]:
                    if await self._is_decided(name, undecided[name]):
                        del undecided[name]
            except (BoundaryFailure, UsageError) as error:
                log.warning("cannot look for leases of sandboxes, trying again in %g s: %s", interval_s, error)
            await asyncio.sleep(interval_s)

    async def _is_decided(self, name: str, hosts: set[str]) -> bool:
        """Bring a provider in if one of `hosts` is its own; False if it does not answer."""
        if name in self._kept or name in self._unknown:
            return True
        try:
            provider = registry.load(self._settings.sandboxes, self._stage, name)
        except (Refused, UsageError) as error:
            self._unknown.add(name)
            log.warning("sandboxes that others lease from %s are left to them: %s", name, error)
            return True
        try:
            host = await provider.host()
        except SandboxUnavailable as error:
            log.info("sandboxes of %s are not looked at yet: %s", name, error)
            return False
        finally:
            await provider.close()
        if host in hosts:
            await self._of(name)
        return True


@dataclass(frozen=True, slots=True)
class SessionSandboxes:
    """Boxes in the name of one session."""

    keeping: SandboxKeeping
    provider: str
    holder: SandboxHolder

    def fresh(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self.keeping.lease(self.provider, spec, self.holder)
