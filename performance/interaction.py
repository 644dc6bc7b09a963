"""What talking through the log costs: one action and its observation, and a thousand episodes that do so at once.

    python -m performance.interaction [--actions 1500] [--episodes 1000]

One run on this machine, embedded broker. There and back is measured for one session, in turns with a bare aiokafka request and
reply of the same sizes, so that both meet the same machine. The episodes have ten actions each and an instant model.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic
from rich.console import Console
from rich.table import Table

from performance.processes import Measured, Usage
from rollstream.broker import EmbeddedBroker
from rollstream.environments.tickets import Tickets
from rollstream.eventlog.connection import connect_admin, consumer_options, producer_options
from rollstream.eventlog.following import FETCH_WAIT_MS, SessionFollower
from rollstream.eventlog.lanes import Assignment
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.provisioning import ensure
from rollstream.eventlog.reading import open_reader
from rollstream.sealing import load_sealer
from rollstream.settings import KafkaSettings, Settings
from schemas.action import ActionRequested, ObservationReturned, ToolCall, action_id, observation_id
from schemas.envelope import now
from schemas.events import decode
from schemas.rollout import RolloutScored
from schemas.step import Execution
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from topics.catalogue import AGENT_STEPS, ENV_ACTIONS, ENV_OBSERVATIONS, ROLLOUTS_SCORED, Topic

PREFIX = "bench."
STEPS = 10
WARM_UP = 100
BLOCK = 50
MOST_P50, MOST_P99 = 2.5, 3.0
MOST_AGENT_MIB = 350
DEADLINE_S = 900


def task(number: int, run: str) -> TaskSubmitted:
    return TaskSubmitted.create(
        run=run,
        environment="counter",
        task=TaskRef(id=f"c{number}", dataset="bench", index=number),
        row={
            "messages": [{"role": "user", "content": f"Counter {number}: add 1 ten times, then say so."}],
            "initial_count": number,
            "expected_count": number + STEPS,
        },
        composition=Composition(harness="tools", models={"policy": "default"}),
    )


# There and back.


class Actor:
    """One session that acts, with what an agent_worker acts with."""

    def __init__(self, settings: Settings, producer: EventProducer, follower: SessionFollower) -> None:
        self._settings = settings
        self._producer = producer
        self._follower = follower
        self._task = task(0, "latency")
        (self._ids,) = self._task.sessions()
        self._index = 0
        self._receipt: str | None = None
        self._ticket = ""
        self.sizes = (0, 0)

    async def begin(self) -> None:
        partitions = range(self._settings.kafka.partitions)
        self._follower.assigned(Assignment(dict.fromkeys(partitions), frozenset(partitions)))
        for number in partitions:
            await self._follower.known(number, 0)
        await self._seal()

    async def act(self) -> float:
        """One action; seconds until its observation was there."""
        name = action_id(self._ids.session, "latency", "agent", self._index)
        request = ActionRequested(
            event_id=name,
            occurred_at=now(),
            caused_at=now(),
            **self._ids.ids(),
            execution=Execution(id="latency"),
            index=self._index,
            action=ToolCall(id=f"call-{self._index}", name="increment_counter", arguments={"count": 1}),
            composition=self._task.composition,
            max_output_bytes=1_000_000,
            ticket=self._ticket,
            receipt=self._receipt,
        )
        with self._follower.inbox(self._ids.session, 0) as inbox:
            started = time.perf_counter()
            await self._producer.publish([request])
            raw = await inbox.wait(observation_id(name))
            took_s = time.perf_counter() - started
        observed = decode(raw, ObservationReturned)
        assert observed.failure is None, observed.failure
        self._receipt = observed.receipt
        self._index += 1
        # A receipt grows with every step; an episode of ten has a short one.
        if self._index % STEPS == 0:
            self.sizes = (len(request.to_json()), len(raw))
            self._index, self._receipt = 0, None
            self._task = task(int(self._task.task.id[1:]) + 1, "latency")
            (self._ids,) = self._task.sessions()
            await self._seal()
        return took_s

    async def _seal(self) -> None:
        tickets = Tickets.of(self._settings, load_sealer(self._settings))
        self._ticket = await tickets.seal_task(self._task.row, self._ids.session)


class Bare:
    """The same there and back with nothing of ours in it."""

    def __init__(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer, size: int) -> None:
        self._producer = producer
        self._consumer = consumer
        self._payload = os.urandom(size // 3).hex().encode()[:size].ljust(size, b"x")

    async def ask(self) -> float:
        started = time.perf_counter()
        await self._producer.send_and_wait("bare.requests", self._payload, key=b"k")
        await self._consumer.getone()
        return time.perf_counter() - started


async def measure_latency(settings: Settings, root: Path, actions: int) -> tuple[list[float], list[float]]:
    """Seconds of each action, and of each bare request, in turns."""
    bootstrap = str(settings.bootstrap_servers)
    children = Measured(root / "logs")
    ours: list[float] = []
    bare: list[float] = []
    try:
        children.start("env", "services", "env_worker", environment=environment_of(settings))
        children.wait_for_line("env", '"event": "ready"')
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(EventProducer.prompt(settings, "latency"))
            follower = SessionFollower(settings)
            await follower.start()
            stack.push_async_callback(follower.close)
            actor = Actor(settings, producer, follower)
            await actor.begin()
            for _ in range(WARM_UP):
                await actor.act()
            bare_end = await bare_peer(stack, children, bootstrap, actor.sizes)
            for _ in range(WARM_UP):
                await bare_end.ask()
            while len(ours) < actions:
                ours += [await actor.act() for _ in range(BLOCK)]
                bare += [await bare_end.ask() for _ in range(BLOCK)]
    finally:
        children.stop()
    return ours, bare


async def bare_peer(stack: AsyncExitStack, children: Measured, bootstrap: str, sizes: tuple[int, int]) -> Bare:
    admin = await connect_admin(bootstrap)
    await admin.create_topics([NewTopic(name, 1, 1) for name in ("bare.requests", "bare.replies")])
    await admin.close()
    arguments = (bootstrap, "bare.requests", "bare.replies", str(sizes[1]))
    children.start("echo", "performance.echo", *arguments, environment=os.environ)
    children.wait_for_line("echo", "ready")
    kafka = KafkaSettings()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **producer_options(kafka, linger_ms=0))
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=None, **consumer_options(kafka) | {"fetch_max_wait_ms": FETCH_WAIT_MS}
    )
    for client in (producer, consumer):
        await client.start()
        stack.push_async_callback(client.stop)
    replies = TopicPartition("bare.replies", 0)
    await consumer._client.add_topic(replies.topic)
    consumer.assign([replies])
    await consumer.seek_to_end(replies)
    return Bare(producer, consumer, sizes[0])


# A thousand at once.


@dataclass(frozen=True, slots=True)
class Crowd:
    """Episodes that ran at once."""

    episodes: int
    elapsed_s: float
    used: Usage
    right: int
    steps: int
    actions: int
    observations: int


async def measure_crowd(settings: Settings, root: Path, episodes: int) -> Crowd:
    environment = environment_of(settings) | {
        "ROLLSTREAM_LIMITS__MAX_CONCURRENT_EPISODES": str(episodes),
        "ROLLSTREAM_MODELS__DEFAULT__TIMEOUT_S": "300",
    }
    server, children = Measured(root / "logs"), Measured(root / "logs")
    tool = ("--tool", "increment_counter", "--arguments", '{"count": 1}', "--calls", str(STEPS))
    try:
        server.start("model", "rollstream.testing.instant_model", "--answer", "Done.", *tool, environment=environment)
        environment["OPENAI_BASE_URL"] = json.loads(server.wait_for_line("model", "http"))["base_url"]
        for name in ("env_worker", "agent_worker", "verifier_worker"):
            children.start(name, "services", name, environment=environment)
        for name in ("env_worker", "agent_worker", "verifier_worker"):
            children.wait_for_line(name, '"event": "ready"')
        bootstrap = str(settings.bootstrap_servers)
        async with (
            EventProducer(bootstrap, settings.kafka) as producer,
            open_reader(bootstrap, settings.kafka, [ROLLOUTS_SCORED]) as reader,
        ):
            children.begin()
            started = time.monotonic()
            await producer.publish([task(number, "crowd") for number in range(episodes)])
            ended: dict[str, bool] = {}
            async with asyncio.timeout(DEADLINE_S):
                while len(ended) < episodes:
                    for record in await reader.poll(0.2):
                        scored = decode(record.value, RolloutScored)
                        ended[scored.rollout] = scored.reward == 1.0 and len(scored.steps) == STEPS
            elapsed_s = time.monotonic() - started
        used = children.usage()
    finally:
        children.stop()
        server.stop()
    counts = [await count(settings, topic) for topic in (AGENT_STEPS, ENV_ACTIONS, ENV_OBSERVATIONS)]
    return Crowd(episodes, elapsed_s, used, sum(ended.values()), *counts)


async def count(settings: Settings, topic: Topic) -> int:
    """Records of the crowd in a topic."""
    async with open_reader(str(settings.bootstrap_servers), settings.kafka, [topic]) as reader:
        return sum([record.header_map()["run_id"] == "crowd" async for batch in reader.to_end() for record in batch])


def environment_of(settings: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        "KAFKA_BOOTSTRAP_SERVERS": str(settings.bootstrap_servers),
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
    }


# What is told.


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    return statistics.quantiles(seconds, n=100)[percent - 1] * 1000


def show_latency(ours: Sequence[float], bare: Sequence[float]) -> None:
    table = Table(title="action -> observation, one session, this machine, one run")
    for column in ("", "there and back", "p50 ms", "p90 ms", "p99 ms"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in (("rollstream", ours), ("bare aiokafka request/reply", bare)):
        table.add_row(name, str(len(seconds)), *(f"{percentile_ms(seconds, percent):.2f}" for percent in (50, 90, 99)))
    ratios = [percentile_ms(ours, percent) / percentile_ms(bare, percent) for percent in (50, 90, 99)]
    table.add_section()
    table.add_row("rollstream : bare", "", *(f"{ratio:.2f}" for ratio in ratios))
    console = Console(width=100)
    console.print(table)
    verdicts = (("p50", ratios[0], MOST_P50), ("p99", ratios[2], MOST_P99))
    for name, ratio, most in verdicts:
        console.print(f"{name} is {ratio:.2f} times the bare one (at most {most:g}): {'kept' if ratio <= most else 'NOT KEPT'}")


def show_crowd(crowd: Crowd) -> None:
    agent_mib = crowd.used.rss_by_name.get("agent_worker", 0.0)
    table = Table(title=f"{crowd.episodes} concurrent episodes of {STEPS} actions, instant model, this machine, one run")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "episodes/s": f"{crowd.episodes / crowd.elapsed_s:.1f}",
        "actions/s": f"{crowd.actions / crowd.elapsed_s:.0f}",
        "episodes that ended right": f"{crowd.right} of {crowd.episodes}",
        "steps in the log": f"{crowd.steps} of {crowd.episodes * (STEPS + 1)}",
        "actions, observations in the log": f"{crowd.actions}, {crowd.observations} of {crowd.episodes * STEPS}",
        "agent_worker, MiB at the peak of all": f"{agent_mib:.0f} (at most {MOST_AGENT_MIB})",
        **{f"CPU-ms/action, {name}": f"{s * 1000 / crowd.actions:.2f}" for name, s in crowd.used.cpu_by_name.items()},
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=100).print(table)


async def measure(actions: int, episodes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        root = Path(folder)
        broker = EmbeddedBroker(root)
        bootstrap = (await asyncio.to_thread(broker.start)).bootstrap
        settings = Settings(data_dir=root, bootstrap_servers=bootstrap, kafka=KafkaSettings(topic_prefix=PREFIX))
        try:
            admin = await connect_admin(bootstrap)
            await ensure(admin, settings.kafka)
            await admin.close()
            if actions:
                show_latency(*await measure_latency(settings, root, actions))
            if episodes:
                show_crowd(await measure_crowd(settings, root, episodes))
        finally:
            await asyncio.to_thread(broker.stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=1_500, help="there and back; 0 leaves that part out")
    parser.add_argument("--episodes", type=int, default=1_000, help="at once; 0 leaves that part out")
    options = parser.parse_args()
    uvloop.run(measure(options.actions, options.episodes))


if __name__ == "__main__":
    main()
