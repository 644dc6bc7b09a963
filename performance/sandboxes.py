"""What boxes cost: to start one, to enter it, to reap fifty orphans, and episodes of code repair that work in them at once.

    python -m performance.sandboxes [--boxes 20] [--orphans 50] [--episodes 20] [--backends docker bubblewrap]

One run on this machine, embedded broker. The episodes are the harness `oracle` on examples/code_repair, with all workers in
this process: what it uses of the processor is ours, but for the few reads of the measurement itself. Commands of a docker box
run under the engine; those of bubblewrap are children of this process, and are counted apart.
"""

import argparse
import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any
from uuid import uuid4

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from rollstream.broker import EmbeddedBroker
from rollstream.environments import registry as environments
from rollstream.errors import BoundaryFailure, UsageError
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.provisioning import ensure
from rollstream.eventlog.reading import LogReader, open_reader
from rollstream.reaping import reaper_of
from rollstream.sandboxes import enter, registry
from rollstream.sandboxes.base import BaseSandbox
from rollstream.sandboxes.leases import Leases
from rollstream.sandboxes.protocol import SandboxProvider, SandboxTag
from rollstream.sandboxes.warm import Supply, WarmPool
from rollstream.settings import KafkaSettings, SandboxSettings, Settings
from schemas.envelope import now
from schemas.events import decode
from schemas.rollout import RolloutScored
from schemas.sandbox import SandboxHolder, SandboxSpec
from services.__main__ import build
from topics.catalogue import ROLLOUTS_SCORED

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "examples/code_repair/tasks.jsonl"
SPEC = SandboxSpec(memory_mib=64, disk_mib=16, ttl_s=900)
HOLDER = SandboxHolder(worker="bench")
WORKERS = ("env_worker", "agent_worker", "verifier_worker")
ACCOUNT = Path("/sys/fs/cgroup/cpuacct/rollstream-bench")
IDLE_S = 5.0
MOST_REAP_S = 10.0
MOST_CPU_MS = 150.0
DEADLINE_S = 900


@dataclass
class Times:
    """How long calls of boxes took, in seconds."""

    starts: list[float] = field(default_factory=list)
    commands: list[float] = field(default_factory=list)

    def watch(self, box: BaseSandbox) -> BaseSandbox:
        """The box, whose starts and commands are timed from now on."""
        box.start = _timed(box.start, self.starts)  # type: ignore[method-assign]
        box.run = _timed(box.run, self.commands)  # type: ignore[method-assign]
        return box


def _timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    async def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            return await call(*args, **kwargs)
        finally:
            into.append(time.monotonic() - started)

    return timed


def watched(provider: SandboxProvider, times: Times) -> SandboxProvider:
    """The provider, all of whose boxes are timed."""
    create = provider.create

    def created(self: SandboxProvider, *args: Any, **kwargs: Any) -> BaseSandbox:
        box = create(*args, **kwargs)
        assert isinstance(box, BaseSandbox), "shipped providers make these"
        return times.watch(box)

    provider.create = MethodType(created, provider)  # type: ignore[method-assign]
    return provider


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# One box.


@dataclass(frozen=True, slots=True)
class OneBox:
    """Medians, in milliseconds."""

    start_ms: float
    warm_ms: float
    exec_ms: float
    enter_cpu_ms: float
    """Of the way in and the command `true` itself; 0 where an engine is the way in."""
    close_ms: float


async def measure_box(provider: SandboxProvider, leases: Leases, boxes: int) -> OneBox:
    """One box after the other, on a machine that does nothing else."""
    starts, execs, closes, warm = [], [], [], []
    children = 0.0
    for _ in range(boxes):
        started = time.monotonic()
        box = await leases.start(SPEC, HOLDER)
        starts.append(time.monotonic() - started)
        assert (await box.exec(["true"])).ok
        before = door_cpu_s()
        for _ in range(5):
            started = time.monotonic()
            assert (await box.exec(["true"])).ok
            execs.append(time.monotonic() - started)
        children += door_cpu_s() - before
        started = time.monotonic()
        await leases.release(box)
        closes.append(time.monotonic() - started)
    pool = WarmPool(leases, [Supply(SPEC, 2, 600)], HOLDER)
    try:
        for _ in range(boxes):
            await until_waiting(pool, 2)
            started = time.monotonic()
            async with pool.lease(SPEC, HOLDER):
                warm.append(time.monotonic() - started)
    finally:
        await pool.close()
    return OneBox(*(median_ms(times) for times in (starts, warm, execs)), children / len(execs) * 1000, median_ms(closes))


async def until_waiting(pool: WarmPool, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(pool.waiting) < count:  # noqa: ASYNC110 (a pool tells nobody when it is full)
            await asyncio.sleep(0.01)


def door_cpu_s() -> float:
    """Processor time of what enters bubblewrap boxes, and of all that it has become; 0 where the kernel does not tell."""
    if not ACCOUNT.parent.is_dir():
        return 0.0
    ACCOUNT.mkdir(exist_ok=True)
    for child in psutil.Process().children():
        if enter.__file__ in child.cmdline():
            (ACCOUNT / "cgroup.procs").write_text(str(child.pid))
    return int((ACCOUNT / "cpuacct.usage").read_text()) / 1e9


# Orphans.


async def measure_orphans(settings: Settings, provider: SandboxProvider, count: int) -> float:
    """Seconds until so many boxes, whose leases have run out, are gone and said to be."""
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        reaper = await reaper_of(settings, provider, producer, "bench")
        tag = SandboxTag(reaper.installation, await provider.host(), HOLDER, now() - timedelta(seconds=1))
        boxes = [provider.create(uuid4().hex, SPEC, tag) for _ in range(count)]
        await asyncio.gather(*(box.start() for box in boxes))
        started = time.monotonic()
        reaped = await reaper.reap()
        took_s = time.monotonic() - started
        assert {judged.box.id for judged in reaped} == {box.id for box in boxes}
        for box in boxes:
            await box.close()
    return took_s


# Episodes.


@dataclass(frozen=True, slots=True)
class Crowd:
    episodes: int
    elapsed_s: float
    right: int
    times: Times
    wall_s: float
    """Of all episodes together, from seed to verdict."""
    cpu_s: float
    idle_cpu_s: float
    """Of it, what the workers would have used in that time without any episode."""

    @property
    def outside(self) -> float:
        """Share of the episodes' time in which none of their commands ran in a box."""
        return max(0.0, 1 - sum(self.times.commands) / self.wall_s)


async def measure_crowd(settings: Settings, backend: str, episodes: int) -> Crowd:
    """Episodes of the task file, all at once, by workers that have played one of each task before."""
    times = Times()
    make = registry.PROVIDERS[backend]
    registry.PROVIDERS[backend] = lambda section, stage: watched(make(section, stage), times)
    rows = sum(1 for line in TASKS.read_text().splitlines() if line.strip())
    attempts = -(-episodes // rows)
    try:
        async with AsyncExitStack() as stack:
            for app in [build(name, settings) for name in WORKERS]:
                await app.start()
                stack.push_async_callback(app.stop)
            reading = open_reader(str(settings.bootstrap_servers), settings.kafka, [ROLLOUTS_SCORED])
            reader = await stack.enter_async_context(reading)
            await played(settings, reader, f"first-{backend}", backend, 1, rows)
            times.starts.clear()
            times.commands.clear()
            before = cpu_s()
            await asyncio.sleep(IDLE_S)
            idle_rate = (cpu_s() - before) / IDLE_S
            before, started = cpu_s(), time.monotonic()
            ended = await played(settings, reader, f"crowd-{backend}", backend, attempts, rows * attempts)
            elapsed_s, used = time.monotonic() - started, cpu_s() - before
    finally:
        registry.PROVIDERS[backend] = make
    wall_s = sum((one.occurred_at - one.seeded_at).total_seconds() for one in ended if one.seeded_at)
    right = sum(one.reward == 1.0 for one in ended)
    return Crowd(len(ended), elapsed_s, right, times, wall_s, used, idle_rate * elapsed_s)


async def played(
    settings: Settings, reader: LogReader, run: str, backend: str, attempts: int, episodes: int
) -> list[RolloutScored]:
    """Publish the task file as a run, and wait until all its episodes have ended."""
    await publish(settings, run, backend, attempts)
    ended: list[RolloutScored] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(ended) < episodes:
            found = [record for record in await reader.poll(0.2) if record.header_map()["run_id"] == run]
            ended += [decode(record.value, RolloutScored) for record in found]
    return ended


async def publish(settings: Settings, run: str, backend: str, attempts: int) -> None:
    """Publish the task file as a user does."""
    command = ["rollstream.cli", "publish", str(TASKS), "-e", "code_repair", "--harness", "oracle", "--sandbox", backend]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, "-k", str(attempts), "--run", run),
        cwd=ROOT,
        env={
            **os.environ,
            "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
            "KAFKA_BOOTSTRAP_SERVERS": str(settings.bootstrap_servers),
            "ROLLSTREAM_KAFKA": settings.kafka.model_dump_json(),
        },
    )
    if await process.wait():
        raise SystemExit("the tasks could not be published")


# What is told.


def median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000 if seconds else 0.0


def kept(value: float, most: float) -> str:
    return f"(at most {most:g}): {'kept' if value <= most else 'NOT KEPT'}"


def show(title: str, columns: dict[str, dict[str, str]]) -> None:
    table = Table(title=title)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in next(iter(columns.values())):
        table.add_row(row, *(column[row] for column in columns.values()))
    Console(width=120).print(table)


def told_of_box(box: OneBox, orphans: int, reaped_s: float) -> dict[str, str]:
    return {
        "box start, p50 ms": f"{box.start_ms:.0f}",
        "the same from a warm pool, p50 ms": f"{box.warm_ms:.0f}",
        "exec of `true`, p50 ms": f"{box.exec_ms:.0f}",
        "CPU of entering a box, ms": f"{box.enter_cpu_ms:.1f}",
        "box closed, p50 ms": f"{box.close_ms:.0f}",
        f"{orphans} orphans reaped, s": f"{reaped_s:.1f} {kept(reaped_s, MOST_REAP_S)}",
    }


def told_of_crowd(crowd: Crowd, box: OneBox) -> dict[str, str]:
    commands = len(crowd.times.commands) / crowd.episodes
    own_ms = (crowd.cpu_s - crowd.idle_cpu_s) / crowd.episodes * 1000
    ours_ms = own_ms + commands * box.enter_cpu_ms
    return {
        "episodes that ended right": f"{crowd.right} of {crowd.episodes}",
        "episodes/min": f"{crowd.episodes / crowd.elapsed_s * 60:.0f}",
        "box start, p50 ms": f"{median_ms(crowd.times.starts):.0f}",
        "boxes, commands an episode": f"{len(crowd.times.starts) / crowd.episodes:.1f}, {commands:.1f}",
        "share of time outside of the boxes": f"{crowd.outside:.0%}",
        "our CPU an episode, ms": f"{ours_ms:.0f} {kept(ours_ms, MOST_CPU_MS)}",
        "of it in the workers; entering boxes": f"{own_ms:.0f}; {ours_ms - own_ms:.0f}",
        "CPU of workers with nothing to do, ms/s": f"{crowd.idle_cpu_s / crowd.elapsed_s * 1000:.0f}",
    }


async def measure(backends: Sequence[str], boxes: int, orphans: int, episodes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        broker = EmbeddedBroker(Path(folder))
        bootstrap = (await asyncio.to_thread(broker.start)).bootstrap
        kafka = KafkaSettings(topic_prefix="bench.")
        settings = Settings(data_dir=Path(folder), bootstrap_servers=bootstrap, kafka=kafka, sandboxes=SandboxSettings())
        try:
            admin = await connect_admin(bootstrap)
            await ensure(admin, settings.kafka)
            await admin.close()
            of_boxes = {name: await measure_alone(settings, name, boxes, orphans) for name in backends}
            show("boxes, one after the other, this machine, one run", {name: told for name, (_, told) in of_boxes.items()})
            if not episodes:
                return
            if not TASKS.is_file() or environments.find("code_repair") is None:
                Console().print("no episodes: the environment code_repair and its examples are not here")
                return
            crowds = {name: await measure_crowd(settings, name, episodes) for name in backends}
            title = f"code_repair by the oracle, {next(iter(crowds.values())).episodes} episodes at once, this machine, one run"
            show(title, {name: told_of_crowd(crowd, of_boxes[name][0]) for name, crowd in crowds.items()})
        finally:
            await asyncio.to_thread(broker.stop)


async def measure_alone(settings: Settings, name: str, boxes: int, orphans: int) -> tuple[OneBox, dict[str, str]]:
    provider = registry.load(settings.sandboxes, "agent", name)
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        try:
            box = await measure_box(provider, Leases(provider, producer, installation="bench/", lease_s=600), boxes)
            return box, told_of_box(box, orphans, await measure_orphans(settings, provider, orphans))
        except (BoundaryFailure, UsageError) as error:
            raise SystemExit(f"no {name}: {error}") from None
        finally:
            await provider.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=20, help="one after the other")
    parser.add_argument("--orphans", type=int, default=50)
    parser.add_argument("--episodes", type=int, default=20, help="at once; 0 leaves that part out")
    parser.add_argument("--backends", nargs="+", default=["docker", "bubblewrap"])
    options = parser.parse_args()
    try:
        uvloop.run(measure(options.backends, options.boxes, options.orphans, options.episodes))
    finally:
        with suppress(OSError):
            ACCOUNT.rmdir()


if __name__ == "__main__":
    main()
