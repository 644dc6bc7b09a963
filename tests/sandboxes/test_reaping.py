"""Orphans: boxes whose holder was killed, on a real engine and a real log; and whose boxes are left alone."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from rollstream.errors import Refused, SandboxUnavailable
from rollstream.eventlog.producer import EventProducer
from rollstream.reaping import SandboxKeeping, reaper_of
from rollstream.sandboxes import registry
from rollstream.sandboxes.docker import DockerProvider
from rollstream.sandboxes.protocol import Sandbox, SandboxProvider, SandboxTag
from rollstream.settings import SandboxSettings, Settings
from schemas.envelope import now
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxReleased, SandboxSpec
from tests.flow.flows import pipeline, read_events

pytestmark = [pytest.mark.docker, pytest.mark.kafka, pytest.mark.slow]
SMALL = SandboxSpec(memory_mib=64, disk_mib=8)
DEADLINE_S = 90


@pytest.fixture(params=["docker", "bubblewrap"])
def sandboxed(request: pytest.FixtureRequest, settings: Settings, sandbox_image: str, bubblewrap: None) -> Settings:
    """The installation with a provider, and leases that run out while somebody watches."""
    section = SandboxSettings(provider=request.param, image=sandbox_image, lease_seconds=5, reap_interval_seconds=0.5)
    return settings.model_copy(update={"sandboxes": section})


@pytest.fixture
async def provider(sandboxed: Settings) -> AsyncIterator[SandboxProvider]:
    provider = registry.load(sandboxed.sandboxes, "cleanup")
    yield provider
    await provider.close()


async def made(provider: SandboxProvider, installation: str, *, expired: bool = False) -> Sandbox:
    """A started box that no lease in the log speaks of."""
    expires_at = now() + (timedelta(seconds=-1) if expired else timedelta(hours=1))
    tag = SandboxTag(installation, await provider.host(), SandboxHolder(worker="w"), expires_at)
    box = provider.create(f"test-{uuid4().hex[:12]}", SMALL, tag)
    await box.start()
    return box


async def kill_a_holder_of(count: int, settings: Settings) -> list[str]:
    """Let a process lease boxes, and kill it. Returns their ids."""
    environment = os.environ | {
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
        "ROLLSTREAM_KAFKA": settings.kafka.model_dump_json(),
        "ROLLSTREAM_SANDBOXES": settings.sandboxes.model_dump_json(exclude_none=True),
    }
    command = [sys.executable, "-m", "tests.sandboxes.holder", str(count)]
    holder = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    ids = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (line := (await holder.stdout.readline()).decode().strip()) != "held":
                assert line, "the holder died"
                ids.append(line)
    finally:
        holder.kill()
        await holder.wait()
    return ids


async def ids_of(provider: SandboxProvider) -> set[str]:
    return {box.id for box in await provider.found()}


async def test_boxes_of_a_killed_holder_are_reaped_and_another_installations_are_not_touched(
    topics: None, sandboxed: Settings, provider: SandboxProvider
) -> None:
    foreign = await made(provider, "another-cluster/", expired=True)
    orphans = await kill_a_holder_of(5, sandboxed)
    assert len(orphans) == 5
    assert {*orphans, foreign.id} <= await ids_of(provider)

    async with pipeline(sandboxed, ["verifier_worker"]), asyncio.timeout(DEADLINE_S):
        while {*orphans} & await ids_of(provider):
            await asyncio.sleep(0.2)

    assert foreign.id in await ids_of(provider)
    assert (await foreign.exec(["echo", "untouched"])).stdout.text == "untouched\n"
    await foreign.close()
    released = [event for event in await read_events(sandboxed, SandboxReleased) if event.sandbox in orphans]
    leased = [event for event in await read_events(sandboxed, SandboxLeased) if event.sandbox in orphans]
    assert sorted(event.sandbox for event in released) == sorted(orphans)
    assert {event.how for event in released} == {"expired"}
    assert {event.sandbox for event in leased if event.renewal == 0} == set(orphans)


async def test_workers_whose_settings_name_no_provider_reap_what_the_log_says_was_left_on_their_host(
    topics: None, sandboxed: Settings, provider: SandboxProvider
) -> None:
    orphans = await kill_a_holder_of(2, sandboxed)
    unnamed = sandboxed.model_copy(update={"sandboxes": sandboxed.sandboxes.model_copy(update={"provider": None})})

    async with pipeline(unnamed, ["env_worker"]), asyncio.timeout(DEADLINE_S):
        while {*orphans} & await ids_of(provider):
            await asyncio.sleep(0.2)
        while len(await read_events(sandboxed, SandboxReleased)) < 2:
            await asyncio.sleep(0.2)

    released = await read_events(sandboxed, SandboxReleased)
    assert {event.sandbox: event.by.partition("@")[0] for event in released} == dict.fromkeys(orphans, "env_worker")


async def test_a_worker_starts_without_the_engine_that_its_settings_name(
    topics: None, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    section = SandboxSettings(provider="docker", reap_interval_seconds=0.2)
    away = settings.model_copy(update={"sandboxes": section})
    async with pipeline(away, ["agent_worker"]), EventProducer(away.bootstrap_servers, away.kafka) as producer:
        keeping = SandboxKeeping(away, producer, stage="agent", by="w")
        await keeping.start()
        with pytest.raises(SandboxUnavailable, match="no Docker engine answers"):
            async with keeping.lease("docker", SMALL, SandboxHolder(worker="w")):
                pass
        await keeping.stop()


async def test_sessions_that_ask_at_once_share_one_provider(topics: None, sandboxed: Settings) -> None:
    name = str(sandboxed.sandboxes.provider)
    unnamed = sandboxed.model_copy(update={"sandboxes": sandboxed.sandboxes.model_copy(update={"provider": None})})
    async with EventProducer(unnamed.bootstrap_servers, unnamed.kafka) as producer:
        keeping = SandboxKeeping(unnamed, producer, stage="agent", by="w")
        await keeping.start()
        try:
            leases = await asyncio.gather(*(keeping.leases(name) for _ in range(5)))
            with pytest.raises(Refused, match="found 'nonsense'"):
                await keeping.leases("nonsense")
            assert len({id(one) for one in leases}) == 1
            async with keeping.lease(name, SMALL, SandboxHolder(worker="w")) as box:
                assert (await box.exec(["true"])).ok
        finally:
            await keeping.stop()


async def test_a_box_that_is_in_use_is_not_reaped_however_long_it_lasts(topics: None, sandboxed: Settings) -> None:
    # Half a lease is how late a renewal may come on a machine that has other things to do.
    async with EventProducer(sandboxed.bootstrap_servers, sandboxed.kafka) as producer:
        keeping = SandboxKeeping(sandboxed, producer, stage="agent", by="w")
        await keeping.start()
        try:
            async with keeping.lease(str(sandboxed.sandboxes.provider), SMALL, SandboxHolder(worker="w")) as box:
                assert (await box.exec(["sleep", str(2 * sandboxed.sandboxes.lease_seconds)])).ok
        finally:
            await keeping.stop()
    assert [event.how for event in await read_events(sandboxed, SandboxReleased)] == ["closed"]


async def test_fifty_orphans_are_reaped_at_once(topics: None, settings: Settings, sandbox_image: str) -> None:
    provider = DockerProvider("cleanup", image=sandbox_image)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        reaper = await reaper_of(settings, provider, producer, "test")
        boxes = await asyncio.gather(*(made(provider, reaper.installation, expired=True) for _ in range(50)))
        started = time.monotonic()
        reaped = await reaper.reap()
        print(f"\n50 orphans reaped in {time.monotonic() - started:.1f} s")
    left = await ids_of(provider)
    await provider.close()
    assert {judged.box.id for judged in reaped} == {box.id for box in boxes}
    assert not left & {box.id for box in boxes}
    assert len(await read_events(settings, SandboxReleased)) == 50


def command(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
        "ROLLSTREAM_KAFKA": json.dumps({"topic_prefix": settings.kafka.topic_prefix}),
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
    }
    return subprocess.run(
        [sys.executable, "-m", "rollstream.cli", "sandboxes", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )


async def test_the_command_lists_and_reaps_what_is_its_own(
    topics: None, sandboxed: Settings, provider: SandboxProvider
) -> None:
    async with EventProducer(sandboxed.bootstrap_servers, sandboxed.kafka) as producer:
        own = (await reaper_of(sandboxed, provider, producer, "test")).installation
    held, orphan = await made(provider, own), await made(provider, own, expired=True)
    foreign = await made(provider, "another-cluster/", expired=True)
    option = ("--provider", provider.name)

    listed = await asyncio.to_thread(command, sandboxed, "list", *option)
    listed_unnamed = await asyncio.to_thread(command, sandboxed, "list")
    listed_all = await asyncio.to_thread(command, sandboxed, "list", *option, "--all")
    reaped = await asyncio.to_thread(command, sandboxed, "reap", *option)
    forced = await asyncio.to_thread(command, sandboxed, "reap", *option, "--force")

    left = await ids_of(provider)
    for box in (held, orphan, foreign):
        await box.close()
    assert held.id in listed.stdout
    assert f"{orphan.id}" in listed.stdout
    assert "ran out" in listed.stdout
    assert foreign.id not in listed.stdout
    assert [line.split()[:2] for line in listed_unnamed.stdout.splitlines() if held.id in line] == [[held.id, provider.name]]
    assert foreign.id in listed_all.stdout
    assert reaped.stdout == f"removed {orphan.id}: its lease had run out\n1 removed, 1 still held\n"
    assert forced.stdout == f"removed {held.id}: forced\n1 removed, 0 still held\n"
    assert left & {held.id, orphan.id, foreign.id} == {foreign.id}
    assert {done.returncode for done in (listed, listed_unnamed, listed_all, reaped, forced)} == {0}
