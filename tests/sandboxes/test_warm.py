"""Boxes that wait for sessions, on real engines: handed over once, refilled, replaced, and gone when their worker stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from rollstream.errors import Refused
from rollstream.sandboxes import registry
from rollstream.sandboxes.leases import Leases
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.sandboxes.warm import Supply, WarmPool
from rollstream.settings import SandboxSettings
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxReleased, SandboxSpec
from tests.unit.test_reaper import Sink

pytestmark = [pytest.mark.docker, pytest.mark.slow]
SPEC = SandboxSpec(memory_mib=64, disk_mib=8, ttl_s=300)
SESSION = SandboxHolder(worker="w", run="r", session="s", consumer_group="g", fence=1)
PATIENCE_S = 60


@pytest.fixture(params=["docker", "bubblewrap"])
async def provider(request: pytest.FixtureRequest, sandbox_image: str, bubblewrap: None) -> AsyncIterator[SandboxProvider]:
    provider = registry.load(SandboxSettings(image=sandbox_image), "agent", request.param)
    yield provider
    await provider.close()


class Watched:
    """A pool of one supply, its installation, and what it said to the log."""

    def __init__(self, provider: SandboxProvider, count: int, idle_s: float, spec: SandboxSpec = SPEC) -> None:
        self.provider = provider
        self.installation = f"warm-{uuid4().hex[:8]}/"
        self.sink = Sink()
        self.leases = Leases(provider, self.sink, installation=self.installation, lease_s=120)
        self.pool = WarmPool(self.leases, [Supply(spec, count, idle_s)], SandboxHolder(worker="w"))

    async def boxes(self) -> set[str]:
        return {one.id for one in await self.provider.found() if one.tag.installation == self.installation}

    async def waiting(self, count: int) -> set[str]:
        """The boxes, once so many are started and wait."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.pool.waiting) != count:
                await asyncio.sleep(0.05)
        return {*self.pool.waiting}

    def leased(self, sandbox: str) -> list[str | None]:
        """The sessions of a box's leases, in their order."""
        found = [event for event in self.sink.events if isinstance(event, SandboxLeased) and event.sandbox == sandbox]
        return [event.holder.session for event in found]

    @property
    def released(self) -> list[tuple[str, str | None]]:
        return [(event.sandbox, event.session) for event in self.sink.events if isinstance(event, SandboxReleased)]


@asynccontextmanager
async def warm(provider: SandboxProvider, count: int, idle_s: float = 600) -> AsyncIterator[Watched]:
    watched = Watched(provider, count, idle_s)
    try:
        yield watched
    finally:
        await watched.pool.close()
    assert await watched.boxes() == set()


async def test_a_session_gets_a_box_that_waited_with_its_own_files_and_variables_and_nobody_gets_it_again(
    provider: SandboxProvider,
) -> None:
    async with warm(provider, 2) as watched:
        before = await watched.waiting(2)
        asked = SPEC.model_copy(update={"files": {"a/b.txt": "hello"}, "env": {"FROM_SPEC": "1"}, "ttl_s": 60})
        async with watched.pool.lease(asked, SESSION) as box:
            done = await box.exec(["sh", "-c", 'cat a/b.txt; echo "$FROM_SPEC$FROM_CALL"'], env={"FROM_CALL": "2"})
            taken = box.id
            after = await watched.waiting(2)
        async with watched.pool.lease(asked, SESSION.model_copy(update={"session": "t"})) as other:
            assert (await other.exec(["cat", "a/b.txt"])).stdout.text == "hello"
            second = other.id
        assert done.stdout.text == "hello12\n"
        assert taken in before
        assert second in after
        assert taken not in after
        assert watched.leased(taken) == [None, "s"]
        assert watched.leased(second) == [None, "t"]
        assert watched.released == [(taken, "s"), (second, "t")]


async def test_a_session_that_asks_for_another_kind_or_a_gateway_starts_its_own(provider: SandboxProvider) -> None:
    async with warm(provider, 1) as watched:
        waiting = await watched.waiting(1)
        async with watched.pool.lease(SPEC.model_copy(update={"pids": 99}), SESSION) as box:
            assert box.id not in waiting
        assert await watched.waiting(1) == waiting


async def test_more_sessions_than_boxes_wait_for_nobody(provider: SandboxProvider) -> None:
    async with warm(provider, 1) as watched:
        await watched.waiting(1)
        ids = []

        async def play(number: int) -> None:
            async with watched.pool.lease(SPEC, SESSION.model_copy(update={"session": f"s{number}"})) as box:
                assert (await box.exec(["true"])).ok
                ids.append(box.id)

        await asyncio.gather(*map(play, range(4)))
        assert len(set(ids)) == 4


async def test_a_box_that_waited_too_long_or_is_gone_is_replaced(
    provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.sandboxes.warm.LOOK_S", 0.2)
    async with warm(provider, 1) as watched:
        (gone,) = await watched.waiting(1)
        await provider.destroy(gone)
        async with asyncio.timeout(PATIENCE_S):
            while gone in await watched.waiting(1):
                await asyncio.sleep(0.05)
        async with watched.pool.lease(SPEC, SESSION) as box:
            assert (await box.exec(["true"])).ok
    async with warm(provider, 1, idle_s=1.5) as watched:
        async with asyncio.timeout(PATIENCE_S):
            while not watched.released:
                await asyncio.sleep(0.05)
        replaced, session = watched.released[0]
        assert session is None
        assert watched.leased(replaced)[0] is None
        assert replaced not in await watched.boxes()
        assert replaced not in await watched.waiting(1)


async def test_files_that_cannot_be_written_are_refused_as_when_a_box_starts(provider: SandboxProvider) -> None:
    async with warm(provider, 1) as watched:
        await watched.waiting(1)
        with pytest.raises(Refused):
            async with watched.pool.lease(SPEC.model_copy(update={"files": {"f": "x", "f/below": "y"}}), SESSION):
                pass
