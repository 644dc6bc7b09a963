"""Sandboxes under a lease: said to the log before they start, renewed by use, released when they are gone.

A holder that dies says nothing more, and that is enough: its leases run out, and the reaper removes the boxes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from rollstream.cancelling import ended, shielded
from rollstream.errors import SandboxUnavailable
from rollstream.sandboxes.protocol import (
    MAX_OUTPUT_BYTES,
    AttachingProvider,
    Downloaded,
    ExecResult,
    Mount,
    OnOutput,
    Sandbox,
    SandboxProvider,
    SandboxTag,
    Stdin,
)
from schemas.envelope import Event, now
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxReleased, SandboxSpec, User

log = logging.getLogger(__name__)


class EventSink(Protocol):
    """Where events go; returns once they are durable."""

    async def publish(self, events: Iterable[Event]) -> None: ...


class Leases:
    """Boxes of one provider for one installation. One per process."""

    def __init__(self, provider: SandboxProvider, sink: EventSink, *, installation: str, lease_s: float) -> None:
        self._provider = provider
        self._sink = sink
        self._installation = installation
        self._lease_s = lease_s

    @asynccontextmanager
    async def lease(
        self,
        spec: SandboxSpec,
        holder: SandboxHolder,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
        sandbox_id: str | None = None,
    ) -> AsyncIterator[Sandbox]:
        """A started box for the time of the `with`, destroyed afterwards whatever happened.

        Raises:
            SandboxUnavailable: the provider failed; a retry can help.
            Refused: the provider cannot hold the box to its specification.
        """
        box = await self.start(spec, holder, gateway=gateway, mounts=mounts, sandbox_id=sandbox_id)
        try:
            yield box
        finally:
            await shielded(self.release(box))

    async def start(
        self,
        spec: SandboxSpec,
        holder: SandboxHolder,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
        sandbox_id: str | None = None,
    ) -> "LeasedSandbox":
        """A started box that the caller releases; as `lease`."""
        sandbox_id = sandbox_id or uuid4().hex
        host = await self.host()
        leased = SandboxLeased.create(
            sandbox_id,
            provider=self._provider.name,
            installation=self._installation,
            host=host,
            holder=holder,
            spec=spec,
            lease_s=self._lease_s,
        )
        tag = SandboxTag(self._installation, host, holder, leased.expires_at)
        made = self._provider.create(sandbox_id, spec, tag, gateway=gateway, mounts=mounts)
        box = LeasedSandbox(made, leased, self._sink, self._lease_s)
        try:
            # An event that is on its way gets to the log, even if whoever waits for that is cancelled.
            await self._sink.publish([leased])
            await box.start()
        except BaseException:
            await shielded(self.release(box))
            raise
        return box

    @property
    def can_attach(self) -> bool:
        """Whether boxes outlive the process that started them."""
        return isinstance(self._provider, AttachingProvider)

    async def attach(self, sandbox_id: str, spec: SandboxSpec, worker: str) -> "LeasedSandbox":
        """A started box of this host that another process has left, leased from now on in the name of `worker`.

        Raises:
            SandboxUnavailable: it is not there any more, or its provider `can_attach` none.
        """
        if not isinstance(self._provider, AttachingProvider):
            message = f"sandbox {sandbox_id} is another process's, and boxes of {self._provider.name} end with theirs"
            raise SandboxUnavailable(message, stage="agent")
        for found in await self._provider.found():
            if found.id == sandbox_id and found.tag.installation == self._installation:
                break
        else:
            raise SandboxUnavailable(f"sandbox {sandbox_id} is gone: reaped, closed, or its time is over", stage="agent")
        box = await self._provider.attach(found, spec)
        leased = SandboxLeased.create(
            sandbox_id,
            provider=self._provider.name,
            installation=self._installation,
            host=found.tag.host,
            holder=found.tag.holder,
            spec=spec,
            lease_s=self._lease_s,
        ).taken_over(worker)
        await self._sink.publish([leased])
        return LeasedSandbox(box, leased, self._sink, self._lease_s)

    async def host(self) -> str:
        """The machine that boxes are made on."""
        return await self._provider.host()

    async def release(self, box: "LeasedSandbox") -> None:
        """Destroy a box, and say so."""
        holder = box.leased.holder
        try:
            await box.close()
        except SandboxUnavailable as error:
            # Still leased: whoever reaps next tries again.
            log.warning("not released: %s", error)
            return
        released = SandboxReleased.create(
            box.id, how="closed", by=holder.worker, run=holder.run, session=holder.session, caused_at=box.leased.occurred_at
        )
        await self._sink.publish([released])


class LeasedSandbox:
    """A `Sandbox` whose every use renews its lease, and that keeps it while the use lasts."""

    def __init__(self, box: Sandbox, leased: SandboxLeased, sink: EventSink, lease_s: float) -> None:
        self.id = box.id
        self.workdir = box.workdir
        self.leased = leased
        self._box = box
        self._sink = sink
        self._lease_s = lease_s
        self._renewing = asyncio.Lock()
        self._env: Mapping[str, str] = {}

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[None]:
        await self._renew()
        keeping = asyncio.create_task(self.keep())
        try:
            yield
        finally:
            await ended(keeping)
            if not keeping.cancelled() and (error := keeping.exception()):
                raise error

    async def keep(self) -> None:
        """Renew the lease for as long as this runs, whether the box is used or not."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            await self._renew()

    async def _renew(self) -> None:
        """Renew the lease if half of it is over: not with every use, which would be an event for every command."""
        async with self._renewing:
            if self.leased.expires_at - now() < timedelta(seconds=self._lease_s / 2):
                renewed = self.leased.renewed(self._lease_s)
                await self._sink.publish([renewed])
                self.leased = renewed

    async def hand_over(self, holder: SandboxHolder, env: Mapping[str, str]) -> None:
        """Give the box to a session, for good. The log says so before the session has it, since labels cannot.

        Args:
            env: of every command from now on, on top of what the box was started with.
        """
        async with self._renewing:
            handed = self.leased.handed_over(holder, self._lease_s)
            await self._sink.publish([handed])
            self.leased = handed
        self._env = env

    async def start(self) -> None:
        async with self._in_use():
            await self._box.start()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: Stdin = b"",
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        async with self._in_use():
            return await self._box.exec(
                argv,
                env={**self._env, **(env or {})},
                user=user,
                cwd=cwd,
                timeout_s=timeout_s,
                stdin=stdin,
                max_output_bytes=max_output_bytes,
                on_output=on_output,
            )

    async def kill(self, user: User | None = None) -> None:
        async with self._in_use():
            await self._box.kill(user)

    async def upload(self, source: Path, target: str) -> None:
        async with self._in_use():
            await self._box.upload(source, target)

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        async with self._in_use():
            await self._box.write(path, content, mode=mode)

    async def download(self, path: str, into: Path, *, max_bytes: int, max_files: int = 100_000) -> Downloaded:
        async with self._in_use():
            return await self._box.download(path, into, max_bytes=max_bytes, max_files=max_files)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        async with self._in_use():
            return await self._box.read(path, max_bytes=max_bytes)

    async def close(self) -> None:
        await self._box.close()
