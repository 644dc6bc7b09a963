"""Boxes for tests: a class to make them with, and what tests do with them. The suite for providers is `sandboxes`."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_args
from uuid import uuid4

from rollstream.sandboxes.held import SessionBoxes
from rollstream.sandboxes.leases import Leases
from rollstream.sandboxes.protocol import Enforces, ExecResult, Limit, Sandbox, SandboxProvider, SandboxTag
from schemas.envelope import Event
from schemas.sandbox import SandboxHolder, SandboxSpec

S = TypeVar("S")

UNKEPT_LEASE_S = 3600.0

SMALL: dict[str, Any] = {"cpus": 1.0, "memory_mib": 128, "pids": 64, "disk_mib": 32}
"""Limits of the suite's boxes, as far as the provider has them."""
TAG = SandboxTag(
    f"conformance-{os.getpid()}",
    "host",
    SandboxHolder(worker="suite", run="r", session="s", consumer_group="g", fence=3),
    datetime(2040, 1, 1, tzinfo=UTC),
)
PATIENCE_S = 60.0


def in_loop(test: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """Run an async test without a plug-in of pytest's."""

    def run(self: S) -> None:
        asyncio.run(test(self))

    functools.update_wrapper(run, test)
    return run


class BoxMaking:
    """Makes boxes of one provider with small limits."""

    def provider(self) -> SandboxProvider:
        raise NotImplementedError("return a new provider")

    def image(self) -> str | None:
        """The image of the suite's boxes; None for the provider's own."""
        return None

    @asynccontextmanager
    async def providing(self) -> AsyncIterator[SandboxProvider]:
        provider = self.provider()
        try:
            yield provider
        finally:
            await provider.close()

    @asynccontextmanager
    async def box(self, *, gateway: Path | None = None, **changes: Any) -> AsyncIterator[Sandbox]:
        """A started box with small limits."""
        async with self.providing() as provider:
            box = await self.made(provider, gateway=gateway, **changes)
            try:
                await box.start()
                yield box
            finally:
                await box.close()

    async def made(self, provider: SandboxProvider, *, gateway: Path | None = None, **changes: Any) -> Sandbox:
        """A box that is not started."""
        can = await provider.enforces()
        spec = SandboxSpec(image=self.image(), **{**fitting(can), **changes})
        return provider.create(f"test-{uuid4().hex[:12]}", spec, TAG, gateway=gateway)


class NoLog:
    """An `EventSink` that keeps nothing: for boxes that end with their process."""

    async def publish(self, events: Iterable[Event]) -> None:
        for _ in events:
            pass


class OwnBoxes:
    """`Sandboxes` of this process, from one provider. No log knows of them; each ends after its `ttl_s` at the latest."""

    def __init__(self, provider: SandboxProvider, worker: str) -> None:
        self._provider = provider.name
        self._leases = Leases(provider, NoLog(), installation=f"own:{worker}", lease_s=UNKEPT_LEASE_S)
        self._holder = SandboxHolder(worker=worker)

    def fresh(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self._leases.lease(spec, self._holder)

    def held(self, session: str, journals: Path) -> SessionBoxes:
        """Those that an environment holds for a session."""

        async def leases(provider: str) -> Leases:
            return self._leases

        holder = self._holder.model_copy(update={"session": session})
        return SessionBoxes(leases, self._provider, holder, journals)


def fitting(can: Enforces) -> dict[str, Any]:
    """The suite's limits, as far as a provider has them; what it cannot enforce is not asked for."""
    limits = {limit: SMALL[limit] if limit in can.limits else None for limit in get_args(Limit)}
    return {**limits, "network": "none" if "none" in can.networks else "public", "ttl_s": 600.0}


async def sh(box: Sandbox, script: str, **options: Any) -> ExecResult:
    return await box.exec(["sh", "-c", script], **options)


async def beats(box: Sandbox) -> int:
    return int((await sh(box, "cat beat 2>/dev/null | wc -l")).stdout.text)


async def until(measure: Callable[[], Awaitable[int]], *, more_than: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await measure() <= more_than:
            await asyncio.sleep(0.05)


async def raises(expected: type[BaseException], call: Awaitable[object]) -> None:
    try:
        await call
    except expected:
        return
    raise AssertionError(f"expected {expected.__name__}, found no failure")
