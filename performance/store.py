"""What the store costs: projection against the bulk insert limit, growth, memory, queries, and a rebuild.

    python -m performance.store [--attempts 62500]

A process writes one million steps of about 2 KB (62,500 attempts of 16 steps, four attempts a group) to an embedded broker.
Then the store_worker reads them, alone: its CPU time and memory are those of both its processes, what they share counted once.
Rates are by the clock, and need two idle cores; what costs CPU time is compared with something else in the same run. Prints
which targets are met.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import duckdb
import psutil
from rich.console import Console
from rich.table import Table

from performance.pipeline import provision
from performance.processes import Measured, family, held_mb, peak_rss_mb
from performance.store_log import EVENTS_PER_ATTEMPT, Log
from performance.store_planner import Made
from rollstream.broker import EmbeddedBroker
from rollstream.eventlog.reading import Record
from rollstream.settings import KafkaSettings, StoreSettings
from rollstream.store import trajectory
from rollstream.store.batch import Batch, arrow, plan
from rollstream.store.database import StoreFiles
from rollstream.store.planned import open_planned
from rollstream.store.projection import Store
from rollstream.store.reader import open_snapshot
from rollstream.store.rebuild import rebuild

BATCH = 5_000
ROUNDS = 5
ROUND_BATCHES = 10
WINDOW = 100_000
DEADLINE_S = 1_800.0
WORKER = "store_worker"


@dataclass(frozen=True, slots=True)
class Target:
    """One promise and what was found."""

    name: str
    found: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit


@dataclass(slots=True)
class Rate:
    """Events a second of the quickest round, because other work on the machine only ever slows one; and CPU time of all."""

    name: str
    best: float = 0.0
    cpu_s: float = 0.0
    events: int = 0

    def add(self, events: int, took_s: float, cpu_s: float) -> None:
        """Add a round."""
        self.best = max(self.best, events / took_s)
        self.cpu_s += cpu_s
        self.events += events

    def __str__(self) -> str:
        return f"{self.name}: {self.best:,.0f} events/s at best, {self.cpu_s / self.events * 1e6:.1f} CPU-us each"


def cpu_seconds() -> float:
    """CPU time of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def measure_projection(root: Path) -> list[Target]:
    """Projection against inserting ready Arrow tables with no look for duplicates, in turns, at the same batch size."""
    bulk, projection = Rate("bulk INSERT"), Rate("projection")
    limit, projected = Store.open(root / "bulk", StoreSettings()), Store.open(root / "projected", StoreSettings())
    attempts = ROUND_BATCHES * BATCH // EVENTS_PER_ATTEMPT + 1
    for number in range(ROUNDS):
        made = Made(number * attempts, {topic: end for (topic, _), end in limit.offsets().items()}, ROUND_BATCHES, BATCH)
        log = Log(attempts, made.first, dict(made.offsets)).records()
        planned = list(plans([list(islice(log, BATCH)) for _ in range(ROUND_BATCHES)], limit))
        limit._offsets = planned[-1].offsets
        began, spent = time.perf_counter(), cpu_seconds()
        insert_bulk(limit, planned)
        bulk.add(ROUND_BATCHES * BATCH, time.perf_counter() - began, cpu_seconds() - spent)
        del planned
        asyncio.run(project(projection, projected, made))
    for store in (limit, projected):
        store.close()
    print(bulk, projection, sep="\n", flush=True)
    return [Target("projection : bulk INSERT limit", projection.best / bulk.best, 0.6, at_least=True)]


def plans(batches: Sequence[Sequence[Record]], store: Store) -> Iterator[Batch]:
    offsets = store.offsets()
    for batch in batches:
        planned = plan(batch, offsets, {})
        offsets = planned.offsets
        yield planned


def insert_bulk(store: Store, batches: Sequence[Batch]) -> None:
    database = store._database
    for batch in batches:
        for file, found in ((database.private, batch.private), (database.public, batch.public)):
            with file.transaction():
                for name, rows in found.items():
                    file.insert(arrow(name, rows), f"INSERT INTO {name} FROM batch")
                if file is database.public:
                    for events in batch.events:
                        file.insert(events.rows, f"INSERT INTO {events.table.name} FROM batch")
        database.inserted(batch.nbytes())
        database.checkpoint_if_due()


async def project(rate: Rate, store: Store, made: Made) -> None:
    """As the store_worker does: one process plans a batch while another one writes the batch before it."""
    async with open_planned(made, "performance.store_planner") as log:
        # A batch of nothing: the records are made.
        await log.next()
        made_s = sum(psutil.Process(log.pid).cpu_times()[:2])
        began, spent = time.perf_counter(), cpu_seconds()
        async for planned in log.batches():
            store.commit(planned.batch)
        took_s = time.perf_counter() - began
    rate.add(made.batches * made.batch_records, took_s, cpu_seconds() - spent - made_s)


def follow_log(root: Path, bootstrap: str, total: int) -> list[Target]:
    """Let the store_worker read the whole log."""
    children = Measured(root / "logs")
    environment = {**os.environ, "ROLLSTREAM_DATA_DIR": str(root), "KAFKA_BOOTSTRAP_SERVERS": bootstrap}
    ends = time.monotonic() + DEADLINE_S
    try:
        worker = children.start(WORKER, "services", WORKER, environment=environment)
        while not StoreFiles(root).public.exists():
            time.sleep(0.05)
            if worker.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"the store_worker did not begin: see {root}/logs")
        began = time.monotonic()
        counted, cpu_s, held = 0, children.cpu_s(WORKER), 0.0
        while counted < total:
            time.sleep(0.2)
            held = max(held, held_mb(worker.pid))
            found, spent = stored(root), children.cpu_s(WORKER) - cpu_s
            if found >= min(counted + WINDOW, total):
                print(f"  {found:,} events: {spent / (found - counted) * 1e6:.1f} CPU-us each", flush=True)
                counted, cpu_s = found, cpu_s + spent
            elif worker.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"the store_worker stopped at {found} of {total} events")
        rate = counted / (time.monotonic() - began)
        each = ", ".join(f"{peak_rss_mb(process.pid):.0f}" for process in family(worker.pid))
        print(f"store_worker: {rate:,.0f} events/s of a full log, publications included; its processes held {each} MB at most")
    finally:
        children.stop()
    return [Target(f"most memory of the store_worker, {total:,} events", held, 450.0, at_least=False, unit="MB")]


def stored(root: Path) -> int:
    """How many events the published copy has."""
    if not StoreFiles(root).published.exists():
        return 0
    with open_snapshot(root) as connection:
        return int(connection.execute("SELECT coalesce(sum(next_offset), 0) FROM projector_offsets").fetchall()[0][0])


def measure_growth(root: Path, attempts: int, total: int) -> Target:
    """Projecting the next events into the store that has the whole log, and into an empty one, batch by batch in turns."""
    stores = Store.open(root / "store", StoreSettings()), Store.open(root / "empty", StoreSettings())
    log = Log(WINDOW // EVENTS_PER_ATTEMPT + 1, first=attempts).records()
    spent = [0.0, 0.0]
    for number in range(WINDOW // BATCH):
        records = list(islice(log, BATCH))
        began = time.process_time()
        batch = plan(records, {}, {})
        planned_s = time.process_time() - began
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.process_time()
            stores[which].commit(batch)
            spent[which] += planned_s + time.process_time() - began
    for store in stores:
        store.close()
    grown, empty = (seconds / WINDOW * 1e6 for seconds in spent)
    print(f"projecting {WINDOW:,} more events: {grown:.1f} CPU-us each, and {empty:.1f} from the start", flush=True)
    name = f"CPU time an event at {total:,} events : at none"
    return Target(name, grown / empty, 1.2, at_least=False)


def cheapest(connection: duckdb.DuckDBPyConnection, query: str, repeats: int = 7) -> float:
    """CPU seconds of a query, the least of some."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        connection.execute(query).fetchall()
        found.append(time.process_time() - began)
    return min(found)


def ask(root: Path) -> list[Target]:
    # One thread, because what two threads cost depends on what else the machine does.
    with duckdb.connect(str(StoreFiles(root).published), read_only=True, config={"threads": 1}) as connection:
        rollouts = connection.execute("SELECT count(*) FROM rollout_scored").fetchall()[0][0]
        plain = cheapest(
            connection, "SELECT group_id, count(*), count(reward), count(*) FILTER (success) FROM rollout_scored GROUP BY 1"
        )
        estimate = cheapest(connection, "FROM pass_at_k")
    with open_snapshot(root) as connection:
        steps = connection.execute("SELECT count(*) FROM agent_stepped").fetchall()[0][0]
        ids = [row[0] for row in connection.execute("SELECT rollout_id FROM rollout_scored USING SAMPLE 5").fetchall()]
        began = time.process_time()
        for rollout in ids:
            assert trajectory.find_rollout(connection, rollout).rollout == rollout
        one = (time.process_time() - began) / len(ids) * 1000
    return [
        Target(f"pass_at_k : plain GROUP BY, {rollouts:,} rollouts", estimate / plain, 5.0, at_least=False),
        Target(f"one trajectory by id, {steps:,} steps", one, 100.0, at_least=False, unit="CPU-ms"),
    ]


def measure_rebuild(root: Path, bootstrap: str) -> Target:
    """A rebuild of the whole log, from the connection to the new store in its place."""
    began = time.monotonic()
    count = asyncio.run(rebuild(bootstrap, KafkaSettings(), root, StoreSettings()))
    return Target("rebuild", count / (time.monotonic() - began), 20_000, at_least=True, unit="events/s")


def measure(attempts: int) -> list[Target]:
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as folder:
        root = Path(folder)
        targets = measure_projection(root)
        broker = EmbeddedBroker(root / "store")
        bootstrap = broker.start().bootstrap
        try:
            total = write_log(root, bootstrap, attempts)
            targets += follow_log(root / "store", bootstrap, total)
            targets += ask(root / "store")
            targets.append(measure_growth(root, attempts, total))
            targets.append(measure_rebuild(root / "store", bootstrap))
        finally:
            broker.stop()
    return targets


def write_log(root: Path, bootstrap: str, attempts: int) -> int:
    """Fill the broker; returns how many events it has then."""
    asyncio.run(provision(bootstrap, KafkaSettings()))
    children = Measured(root / "logs")
    try:
        children.start("log", "performance.store_log", bootstrap, str(attempts), environment=os.environ)
        written = json.loads(children.wait_for_line("log", '{"events"', DEADLINE_S))
    finally:
        children.stop()
    events, size = int(written["events"]), int(written["bytes"])
    print(f"a log of {events:,} events, {size / events:.0f} bytes each", flush=True)
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=62_500)
    options = parser.parse_args()
    targets = measure(options.attempts)
    table = Table("", "found", "target", "")
    for target in targets:
        sign = ">=" if target.at_least else "<="
        table.add_row(
            target.name, f"{target.found:,.2f} {target.unit}", f"{sign} {target.limit:,g}", "met" if target.met else "MISSED"
        )
    Console(width=120).print(table)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
