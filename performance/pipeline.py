"""Episodes per second and CPU per episode of the whole pipeline, against a bare aiokafka chain of the same hops.

    python -m performance.pipeline [--groups 750] [--attempts 8] [--together]

One run on this machine: embedded broker, instant local model server, every worker, multiple-choice tasks. Then the bare chain,
with the payload sizes that the run really had. CPU of broker and model server is not counted; the store's is, up to the point
where it has everything.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from performance.processes import Measured, Usage
from rollstream.broker import EmbeddedBroker
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.provisioning import ensure
from rollstream.eventlog.reading import LogReader, open_reader
from rollstream.settings import KafkaSettings
from rollstream.store.reader import open_snapshot
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from topics.catalogue import (
    AGENT_STEPS,
    CATALOGUE,
    EPISODES_COMPLETED,
    ROLLOUTS_SCORED,
    SESSIONS_READY,
    TASKS_IN,
    VERDICTS,
)

WORKERS = ("env_worker", "agent_worker", "verifier_worker", "store_worker")
WARM_UP_GROUPS = 25
DEADLINE_S = 600


@dataclass(frozen=True, slots=True)
class Result:
    """One measured pipeline."""

    name: str
    episodes: int
    elapsed_s: float
    used: Usage

    @property
    def rate(self) -> float:
        return self.episodes / self.elapsed_s

    @property
    def cpu_ms(self) -> float:
        return self.used.cpu_s * 1000 / self.episodes


def tasks(run: str, groups: int, attempts: int) -> list[TaskSubmitted]:
    """Multiple-choice tasks of about the size of the public benchmarks'."""
    options = [
        {letter: f"the {word} of the alternatives"}
        for letter, word in zip("ABCDEFGH", ["one", "two", "three", "four", "five", "six", "seven", "eight"], strict=True)
    ]
    return [
        TaskSubmitted.create(
            run=run,
            environment="multiple_choice",
            task=TaskRef(id=f"q{number}", dataset="bench", index=number),
            row={
                "question": f"Question {number}: " + "which of the following alternatives is the second one? " * 6,
                "options": options,
                "expected_answer": "B",
            },
            attempts=attempts,
            composition=Composition(harness="chat", models={"policy": "default"}),
        )
        for number in range(groups)
    ]


async def count_terminal(reader: LogReader, wanted: int) -> float:
    """Wait for `wanted` distinct terminal records; the moment the last one was seen."""
    seen: set[str] = set()
    async with asyncio.timeout(DEADLINE_S):
        while len(seen) < wanted:
            seen |= {record.header_map()["rollout_id"] for record in await reader.poll(0.2)}
    return time.monotonic()


async def measure_rollstream(bootstrap: str, root: Path, groups: int, attempts: int, together: bool) -> Result:
    kafka = KafkaSettings(topic_prefix="bench.")
    await provision(bootstrap, kafka)
    children = Measured(root / "logs")
    environment = {
        **os.environ,
        "ROLLSTREAM_DATA_DIR": str(root),
        "KAFKA_BOOTSTRAP_SERVERS": bootstrap,
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": "bench.",
    }
    server = Measured(root / "logs")
    try:
        server.start("model", "rollstream.testing.instant_model", "--answer", r"\boxed{B}", environment=environment)
        environment["OPENAI_BASE_URL"] = json.loads(server.wait_for_line("model", "http"))["base_url"]
        commands = {"workers": WORKERS} if together else {name: (name,) for name in WORKERS}
        for name, workers in commands.items():
            children.start(name, "services", *workers, environment=environment)
        for name, workers in commands.items():
            for worker in workers:
                children.wait_for_line(name, f'"worker": "{worker}"')
        async with (
            EventProducer(bootstrap, kafka) as producer,
            open_reader(bootstrap, kafka, [ROLLOUTS_SCORED]) as reader,
        ):
            await producer.publish(tasks("warm-up", WARM_UP_GROUPS, attempts))
            await count_terminal(reader, WARM_UP_GROUPS * attempts)
            children.begin()
            started = time.monotonic()
            await producer.publish(tasks("measured", groups, attempts))
            elapsed = await count_terminal(reader, groups * attempts) - started
        await until_projected(root, groups * attempts)
        return Result("rollstream", groups * attempts, elapsed, children.usage())
    finally:
        children.stop()
        server.stop()


async def until_projected(root: Path, wanted: int) -> None:
    """Wait until the store has published the whole run, so that its CPU is counted."""
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        with open_snapshot(root) as connection:
            found = connection.execute("SELECT count(*) FROM rollouts WHERE run_id = 'measured'").fetchone()
        if found is not None and found[0] >= wanted:
            return
        await asyncio.sleep(0.5)
    raise SystemExit("the store did not project the run in time")


async def provision(bootstrap: str, kafka: KafkaSettings) -> None:
    admin = await connect_admin(bootstrap)
    await ensure(admin, kafka)
    await admin.close()


async def mean_sizes(bootstrap: str) -> dict[str, int]:
    """Mean size of a record of each topic in bytes, headers included, as the measured run wrote them."""
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    async with open_reader(bootstrap, KafkaSettings(topic_prefix="bench."), CATALOGUE) as reader:
        async for batch in reader.to_end():
            for record in batch:
                headers = sum(len(name) + len(value) for name, value in record.headers)
                total[record.topic] += len(record.value or b"") + headers
                count[record.topic] += 1
    return {topic: total[topic] // count[topic] for topic in total}


async def measure_bare(bootstrap: str, root: Path, groups: int, attempts: int) -> Result:
    sizes = await mean_sizes(bootstrap)
    prefix = "bare."
    kafka = KafkaSettings(topic_prefix=prefix)
    await provision(bootstrap, kafka)

    def write(topic: str, copies: int = 1) -> list[object]:
        return [topic, sizes[topic], copies]

    stages: dict[str, tuple[Collection[str], list[list[object]]]] = {
        "seed": ([TASKS_IN.name], [write(SESSIONS_READY.name, attempts)]),
        "play": ([SESSIONS_READY.name], [write(AGENT_STEPS.name), write(EPISODES_COMPLETED.name)]),
        "verify": ([EPISODES_COMPLETED.name], [write(VERDICTS.name), write(ROLLOUTS_SCORED.name)]),
        "store": ([topic.name for topic in CATALOGUE], []),
    }
    children = Measured(root / "logs-bare")
    try:
        for stage, (reads, writes) in stages.items():
            spec = json.dumps({"reads": list(reads), "writes": writes})
            children.start(stage, "performance.bare_chain", stage, prefix, bootstrap, spec, environment=os.environ)
        for stage in stages:
            children.wait_for_line(stage, "ready")
        wanted = groups * attempts
        payload = os.urandom(sizes[TASKS_IN.name] // 6).hex().encode().ljust(sizes[TASKS_IN.name], b"x")
        async with (
            EventProducer(bootstrap, kafka) as producer,
            open_reader(bootstrap, kafka, [ROLLOUTS_SCORED]) as reader,
        ):
            await asyncio.gather(*(producer.publish_raw(TASKS_IN.name, b"w%d" % n, payload) for n in range(WARM_UP_GROUPS)))
            await count_records(reader, WARM_UP_GROUPS * attempts)
            children.begin()
            started = time.monotonic()
            await asyncio.gather(*(producer.publish_raw(TASKS_IN.name, b"%d" % n, payload) for n in range(groups)))
            elapsed = await count_records(reader, wanted) - started
        return Result("bare aiokafka chain", wanted, elapsed, children.usage())
    finally:
        children.stop()


async def count_records(reader: LogReader, wanted: int) -> float:
    seen = 0
    async with asyncio.timeout(DEADLINE_S):
        while seen < wanted:
            seen += len(await reader.poll(0.2))
    return time.monotonic()


def show(results: Collection[Result]) -> None:
    table = Table(title="single-turn episodes, instant model, this machine, one run")
    for column in ("", "episodes", "episodes/s", "CPU-ms/episode", "peak RSS MiB", "processes"):
        table.add_column(column, justify="left" if not column else "right")
    for result in results:
        table.add_row(
            result.name,
            str(result.episodes),
            f"{result.rate:.0f}",
            f"{result.cpu_ms:.2f}",
            f"{result.used.peak_rss_mib:.0f}",
            str(result.used.processes),
        )
    ours, bare = results
    table.add_section()
    table.add_row(
        "rollstream : bare", "", f"{ours.rate / bare.rate:.2f}", f"{ours.cpu_ms / bare.cpu_ms:.1f}",
        f"{ours.used.peak_rss_mib / bare.used.peak_rss_mib:.2f}", "",
    )  # fmt: skip
    console = Console(width=max(100, Console().width))
    console.print(table)
    for result in results:
        parts = (f"{name} {seconds * 1000 / result.episodes:.2f}" for name, seconds in result.used.cpu_by_name.items())
        held = (f"{name} {mib:.0f}" for name, mib in result.used.rss_by_name.items())
        console.print(f"{result.name}, CPU-ms/episode: {', '.join(parts)}", highlight=False)
        console.print(f"{result.name}, MiB at the peak: {', '.join(held)}", highlight=False)


async def measure(groups: int, attempts: int, together: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        broker = EmbeddedBroker(Path(folder))
        bootstrap = (await asyncio.to_thread(broker.start)).bootstrap
        try:
            ours = await measure_rollstream(bootstrap, Path(folder), groups, attempts, together)
            bare = await measure_bare(bootstrap, Path(folder), groups, attempts)
        finally:
            await asyncio.to_thread(broker.stop)
    show([ours, bare])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=750)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--together", action="store_true", help="all workers in one process instead of one each")
    options = parser.parse_args()
    asyncio.run(measure(options.groups, options.attempts, options.together))


if __name__ == "__main__":
    main()
