"""Leases: said before a box starts, renewed by use and while it lasts, and released when the box is gone."""

import asyncio
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import SandboxUnavailable
from rollstream.sandboxes.leases import Leases
from rollstream.sandboxes.local import LocalProvider
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxReleased, SandboxSpec
from tests.unit.test_reaper import Sink

OPEN = SandboxSpec(cpus=None, memory_mib=None, pids=None, disk_mib=None, network="public", files={"f": "text"}, env={"K": "v"})
HOLDER = SandboxHolder(worker="w@here:1", run="r", session="s", consumer_group="agent_worker", fence=1)


def leases(tmp_path: Path, sink: Sink, lease_s: float = 600.0) -> Leases:
    return Leases(LocalProvider("agent", state_dir=tmp_path), sink, installation="i", lease_s=lease_s)


async def test_a_box_is_leased_before_it_starts_and_released_after_it_is_gone(tmp_path: Path) -> None:
    class Watching(Sink):
        async def publish(self, events: Any) -> None:
            boxes = len(os.listdir(tmp_path))
            assert boxes == 0, "said while a box was there"
            await super().publish(events)

    sink = Watching()
    async with leases(tmp_path, sink).lease(OPEN, HOLDER) as box:
        assert (await box.exec(["cat", "f"])).stdout.text == "text"
        assert len(os.listdir(tmp_path)) == 1
    leased, released = sink.events
    assert isinstance(leased, SandboxLeased)
    assert isinstance(released, SandboxReleased)
    assert (leased.sandbox, released.sandbox, released.how) == (box.id, box.id, "closed")
    assert (leased.spec.files, leased.spec.env) == ({}, {})


async def test_use_renews_a_lease_only_when_half_of_it_is_over(tmp_path: Path) -> None:
    sink = Sink()
    async with leases(tmp_path, sink, 600).lease(OPEN, HOLDER) as box:
        for _ in range(5):
            await box.exec(["true"])
    assert len(sink.events) == 2


async def test_a_lease_is_kept_while_a_command_runs(tmp_path: Path) -> None:
    sink = Sink()
    async with leases(tmp_path, sink, 0.2).lease(OPEN, HOLDER) as box:
        await box.exec(["sleep", "1"])
    renewals = [event for event in sink.events if isinstance(event, SandboxLeased)]
    assert [event.renewal for event in renewals] == list(range(len(renewals)))
    assert len(renewals) >= 4
    assert len({event.event_id for event in renewals}) == len(renewals)
    assert all(after.expires_at > before.expires_at for before, after in pairwise(renewals))


@pytest.mark.parametrize("ending", [RuntimeError("boom"), asyncio.CancelledError()])
async def test_a_box_is_released_however_its_use_ends(tmp_path: Path, ending: BaseException) -> None:
    sink = Sink()
    with pytest.raises(type(ending)):
        async with leases(tmp_path, sink).lease(OPEN, HOLDER):
            raise ending
    assert os.listdir(tmp_path) == []
    assert isinstance(sink.events[-1], SandboxReleased)


async def test_a_box_that_cannot_be_removed_stays_leased_for_the_reaper(tmp_path: Path) -> None:
    class Stuck(LocalProvider):
        async def destroy(self, sandbox_id: str) -> None:
            raise SandboxUnavailable("stuck", stage="agent")

    sink = Sink()
    async with Leases(Stuck("agent", state_dir=tmp_path), sink, installation="i", lease_s=60).lease(OPEN, HOLDER):
        pass
    assert [type(event) for event in sink.events] == [SandboxLeased]
    await LocalProvider("agent", state_dir=tmp_path).destroy(sink.events[0].subject())


async def test_a_box_that_is_given_up_while_its_lease_is_being_said_is_released(tmp_path: Path) -> None:
    class Slow(Sink):
        """Takes events at once, and says so late: what is on its way to the log cannot be taken back."""

        said = asyncio.Event()

        async def publish(self, events: Any) -> None:
            await super().publish(events)
            if not self.said.is_set():
                self.said.set()
                await asyncio.Event().wait()

    sink = Slow()
    starting = asyncio.create_task(leases(tmp_path, sink).start(OPEN, HOLDER))
    await sink.said.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [type(event) for event in sink.events] == [SandboxLeased, SandboxReleased]
    assert len({event.subject() for event in sink.events}) == 1
    assert os.listdir(tmp_path) == []
