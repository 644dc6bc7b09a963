"""What lanes cost: bookkeeping per record, ten thousand sleeping handlers, throughput beside FastStream's own subscriber.

    python -m performance.lanes [--records 20000] [--sleepers 10000]

One run on this machine. Bookkeeping is measured without a broker: a record through `consume_one`, its task and its commits
included, with FastStream's pipeline taken out. Throughput is measured on the embedded broker, each subscriber in a process of
its own, with the same parser, decoder, records and a handler that does nothing.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import psutil
import uvloop
from aiokafka import ConsumerRecord, TopicPartition
from faststream import AckPolicy
from rich.console import Console
from rich.table import Table

from performance.processes import Measured
from rollstream.broker import EmbeddedBroker
from rollstream.eventlog.apps import Clients, Route, Wiring, WorkerApp, bare_broker, parse_record, worker_app
from rollstream.eventlog.commits import Commit
from rollstream.eventlog.connection import connect_admin, consumer_options
from rollstream.eventlog.failures import Boundary
from rollstream.eventlog.lanes import Hooks, LaneOptions, LaneSubscriber
from rollstream.eventlog.offsets import Membership
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.provisioning import ensure
from rollstream.settings import KafkaSettings, Settings, load_settings
from schemas.events import decode
from schemas.identities import event_id
from schemas.session import SessionReady
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from topics.catalogue import DEAD_LETTERS, ROLLOUTS_SCORED, SESSIONS_READY

MOST_BOOKKEEPING_US = 25
MOST_SLEEPERS_MIB = 300
MOST_SLEEPERS_CPU = 5
LEAST_SHARE = 0.7
ROUNDS = 5
SETTLE_S = 5
WATCH_S = 10


def sessions(count: int) -> list[SessionReady]:
    """Descriptors of single-turn episodes, of one task each."""
    return [session(number) for number in range(count)]


def session(number: int) -> SessionReady:
    task = TaskSubmitted.create(
        run="measured",
        environment="multiple_choice",
        task=TaskRef(id=f"q{number}", dataset="bench"),
        row={},
        composition=Composition(harness="chat"),
    )
    (ids,) = task.sessions()
    return SessionReady(
        event_id=event_id("SessionReady", ids.session),
        occurred_at=task.occurred_at,
        caused_at=task.occurred_at,
        **ids.ids(),
        environment_version="1",
        composition=task.composition,
        messages=[{"role": "user", "content": "Which of the following alternatives is the second one? " * 8}],
        limits=task.limits,
        ticket="x" * 1200,
        submitted_at=task.occurred_at,
    )


# Bookkeeping, without a broker.


class _Coordinator:
    generation = 1
    member_id = "me"


class _Consumer:
    """As much of a consumer as lanes look at while nothing goes wrong."""

    _coordinator = _Coordinator()

    def seek(self, partition: TopicPartition, offset: int) -> None: ...


class _Offsets:
    async def read(self, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Commit]:
        return {partition: Commit(-1, "") for partition in partitions}

    async def commit(self, group: str, membership: Membership, commits: Mapping[TopicPartition, Commit]) -> None: ...


async def _nothing(event: object) -> None: ...


async def measure_bookkeeping(count: int) -> float:
    """Microseconds of CPU per record that lanes take, best of several rounds."""
    settings = Settings(bootstrap_servers="localhost:1")
    app = app_of(settings, _nothing, lanes=count)
    (subscriber,) = app.brokers[0].subscribers
    assert isinstance(subscriber, LaneSubscriber)
    subscriber.process_message = _nothing  # type: ignore[method-assign, assignment]
    records = [record_of(event, offset) for offset, event in enumerate(sessions(count))]
    took_s = []
    for _ in range(ROUNDS):
        started = time.process_time()
        await through_lanes(subscriber, records)
        took_s.append(time.process_time() - started)
    return min(took_s) * 1e6 / count


async def through_lanes(subscriber: LaneSubscriber, records: list["ConsumerRecord[Any, Any]"]) -> None:
    async def settle(record: object, error: Exception) -> None:
        raise error

    def broke(error: BaseException) -> None:
        raise error

    offsets: Any = _Offsets()
    subscriber.set_up(
        LaneOptions(lanes=len(records), commit_interval_s=1, drain_timeout_s=1, session_timeout_s=60, once=True),
        Hooks(settle, lambda record: True, lambda: offsets, broke),
    )
    consumer: Any = _Consumer()
    subscriber.consumer = consumer
    await subscriber.on_assigned({TopicPartition("t", 0)})
    for number, record in enumerate(records, 1):
        await subscriber.consume_one(record)
        if number % 100 == 0:
            await asyncio.sleep(0)  # a fetch ends here and there, and handlers run
        if number % 500 == 0:
            await subscriber.commit_now()
    await subscriber.work.all_end(60)
    await subscriber.commit_now()


def record_of(event: SessionReady, offset: int) -> "ConsumerRecord[Any, Any]":
    return ConsumerRecord("t", 0, offset, 0, 0, event.key(), event.to_json(), None, 0, 0, event.headers())


# On the broker, in processes of their own.


def app_of(settings: Settings, handle: Callable[[Any], Awaitable[None]], lanes: int, group: str = "lanes") -> WorkerApp:
    route = Route(SESSIONS_READY, handle, lanes=lanes, once=True)
    wiring = Wiring(Boundary(group, "agent"), [route], (ROLLOUTS_SCORED, DEAD_LETTERS))
    return worker_app(settings, wiring, Clients.of(settings, group))


async def consume_in_lanes(count: int, group: str) -> None:
    """Handle so many records in lanes, and print how long it took."""
    clock = Clock(count)
    app = app_of(load_settings(), clock.handle, 256, group)
    await app.start()
    print(json.dumps(await clock.figures()), flush=True)
    await app.stop()


async def consume_plainly(count: int, group: str) -> None:
    """The same with a subscriber as FastStream makes it."""
    settings = load_settings()
    broker = bare_broker(settings, "plain")
    options = consumer_options(settings.kafka)
    options.pop("enable_auto_commit")
    subscriber = broker.subscriber(
        settings.kafka.topic_prefix + SESSIONS_READY.name,
        group_id=settings.kafka.topic_prefix + group,
        ack_policy=AckPolicy.ACK_FIRST,
        **options,
    )
    clock = Clock(count)

    async def decoded(message: Any) -> SessionReady:
        return decode(message.body, SessionReady)

    subscriber(clock.handle, parser=parse_record, decoder=decoded)
    await broker.start()
    print(json.dumps(await clock.figures()), flush=True)
    await broker.stop()


class Clock:
    """Counts records, and the time from the first to the last."""

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._started = self._cpu_started = 0.0
        self._done = asyncio.Event()

    async def handle(self, event: object) -> None:
        if self._left == self._count:
            self._started, self._cpu_started = time.monotonic(), time.process_time()
        self._left -= 1
        if self._left == 0:
            self._done.set()

    async def figures(self) -> dict[str, float]:
        """Records a second, and microseconds of this process's CPU per record."""
        await self._done.wait()
        elapsed_s, cpu_s = time.monotonic() - self._started, time.process_time() - self._cpu_started
        return {"rate": self._count / elapsed_s, "cpu_us": cpu_s * 1e6 / self._count}


async def sleep_all(count: int, group: str) -> None:
    """Handle so many records at once, each by sleeping; print memory and CPU while they do."""
    clock = Clock(count)

    async def sleep(event: object) -> None:
        await clock.handle(event)
        await asyncio.sleep(3600)

    settings = load_settings()
    settings = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"drain_timeout_s": 0.1})})
    app = app_of(settings, sleep, count, group)
    await app.start()
    await clock.figures()
    await asyncio.sleep(SETTLE_S)
    process = psutil.Process()
    process.cpu_percent()
    await asyncio.sleep(WATCH_S)
    print(json.dumps({"rss_mib": process.memory_info().rss / 2**20, "cpu": process.cpu_percent()}), flush=True)
    await app.stop()


CHILDREN: dict[str, Callable[[int, str], Awaitable[None]]] = {
    "lanes": consume_in_lanes,
    "plain": consume_plainly,
    "sleepers": sleep_all,
}


async def measure(records: int, sleepers: int) -> dict[str, float]:
    """All figures, by name."""
    figures = {"bookkeeping_us": await measure_bookkeeping(min(records, 5_000))}
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        broker = EmbeddedBroker(Path(folder))
        bootstrap = (await asyncio.to_thread(broker.start)).bootstrap
        try:
            figures |= await in_processes(bootstrap, Path(folder), records, sleepers)
        finally:
            await asyncio.to_thread(broker.stop)
    return figures


async def in_processes(bootstrap: str, root: Path, records: int, sleepers: int) -> dict[str, float]:
    async def run(name: str, prefix: str, count: int, turn: int = 0) -> dict[str, float]:
        environment = {
            **os.environ,
            "ROLLSTREAM_DATA_DIR": str(root),
            "KAFKA_BOOTSTRAP_SERVERS": bootstrap,
            "ROLLSTREAM_KAFKA__TOPIC_PREFIX": prefix,
        }
        arguments = ("--count", str(count), "--group", f"{name}-{turn}")
        child = Measured(root / "logs")
        try:
            child.start(name, "performance.lanes", "--child", name, *arguments, environment=environment)
            line = await asyncio.to_thread(child.wait_for_line, name, "{", 300)
        finally:
            await asyncio.to_thread(child.stop)
        figures: dict[str, float] = json.loads(line)
        return figures

    await fill(bootstrap, "flow.", records)
    await fill(bootstrap, "sleep.", sleepers)
    found: dict[str, list[dict[str, float]]] = {"lanes": [], "plain": []}
    for turn in range(ROUNDS):
        for name, of_name in found.items():
            of_name.append(await run(name, "flow.", records, turn))
    asleep = await run("sleepers", "sleep.", sleepers)
    return {
        "lanes_rate": max(one["rate"] for one in found["lanes"]),
        "plain_rate": max(one["rate"] for one in found["plain"]),
        "lanes_cpu_us": min(one["cpu_us"] for one in found["lanes"]),
        "plain_cpu_us": min(one["cpu_us"] for one in found["plain"]),
        "sleepers_mib": asleep["rss_mib"],
        "sleepers_cpu": asleep["cpu"],
    }


async def fill(bootstrap: str, prefix: str, count: int) -> None:
    kafka = KafkaSettings(topic_prefix=prefix)
    admin = await connect_admin(bootstrap)
    await ensure(admin, kafka)
    await admin.close()
    async with EventProducer(bootstrap, kafka) as producer:
        await producer.publish(sessions(count))


def show(figures: Mapping[str, float], sleepers: int) -> None:
    share = figures["lanes_rate"] / figures["plain_rate"]
    table = Table(title="lanes, this machine, one run")
    for column in ("", "measured", "target"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("bookkeeping per record", f"{figures['bookkeeping_us']:.1f} us", f"<= {MOST_BOOKKEEPING_US} us")
    table.add_row(f"{sleepers} sleeping handlers, RSS", f"{figures['sleepers_mib']:.0f} MiB", f"< {MOST_SLEEPERS_MIB} MiB")
    table.add_row(f"{sleepers} sleeping handlers, CPU", f"{figures['sleepers_cpu']:.1f} %", f"< {MOST_SLEEPERS_CPU} %")
    for name, label in (("lanes", "handler that does nothing"), ("plain", "FastStream's own subscriber")):
        table.add_row(f"{label}, records/s", f"{figures[f'{name}_rate']:.0f}", "")
        table.add_row(f"{label}, CPU per record", f"{figures[f'{name}_cpu_us']:.0f} us", "")
    table.add_row("share of records/s", f"{share:.0%}", f">= {LEAST_SHARE:.0%}")
    Console(width=max(100, Console().width)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--sleepers", type=int, default=10_000)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        uvloop.run(_run(CHILDREN[options.child], options.count, options.group))
        sys.exit()
    show(uvloop.run(measure(options.records, options.sleepers)), options.sleepers)


async def _run(child: Callable[[int, str], Awaitable[None]], count: int, group: str) -> None:
    await child(count, group)


if __name__ == "__main__":
    main()
