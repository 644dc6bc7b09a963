"""The store_worker killed at random moments while it projects a log: nothing lost, nothing doubled, every copy true."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.eventlog.producer import EventProducer
from rollstream.settings import Settings, StoreSettings
from rollstream.store.database import StoreFiles
from rollstream.store.reader import ask, open_snapshot
from rollstream.store.rebuild import rebuild
from rollstream.store.tables import TOPIC_OF
from rollstream.store.verification import verify
from schemas.envelope import Event
from tests.events import Attempt, run_published, task_submitted
from tests.flow.test_store_upkeep import answers

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
KILLS = 40
EVENTS = 50_000
START_DEADLINE_S = 180.0
LONGEST_LIFE_S = 0.8

# Event tables, repeated records, records of no known kind and records that are no event: together, every offset once.
ACCOUNTED = " UNION ALL ".join(
    [f"SELECT '{topic}' AS topic, kafka_partition, kafka_offset FROM {name}" for name, topic in TOPIC_OF.items()]
    + [
        f"SELECT topic, kafka_partition, kafka_offset FROM {name}"
        for name in ("duplicate_records", "unknown_events", "dead_rows")
    ]
)
UNACCOUNTED = f"""
SELECT topic, kafka_partition, next_offset, count(kafka_offset) AS rows, count(DISTINCT kafka_offset) AS offsets
FROM ({ACCOUNTED}) AS row FULL JOIN projector_offsets USING (topic, kafka_partition)
GROUP BY topic, kafka_partition, next_offset
HAVING rows IS DISTINCT FROM next_offset OR offsets IS DISTINCT FROM next_offset
"""
DOUBLED = " UNION ALL ".join(
    f"SELECT '{name}', count(*) - count(DISTINCT event_id) AS doubled FROM {name} HAVING doubled > 0" for name in TOPIC_OF
)


def batches(count: int, size: int) -> Iterator[list[Event]]:
    """`count` batches of about `size` events: whole attempts, a few long ones, and now and then one that came before."""
    number = 0
    for _ in range(count):
        batch: list[Event] = []
        while len(batch) < size:
            task = task_submitted(f"task-{number}", attempts=2)
            first, second = Attempt(task), Attempt(task, index=1, reward=0.0)
            batch += [task, *first.events(), *second.events()]
            if number % 50 == 0:
                batch += Attempt(task_submitted(f"task-{number // 2}", attempts=2)).events()
            if number % 100 == 0:
                batch += Attempt(task_submitted(f"long-{number}"), answer="long " * 20_000).events()
            number += 1
        yield batch


@contextmanager
def store_worker(settings: Settings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(settings.kafka.partitions),
        "ROLLSTREAM_STORE__PUBLISH_INTERVAL_S": "0.1",
        # Small transactions, so that many of them are cut off.
        "ROLLSTREAM_STORE__BATCH_MAX_RECORDS": "300",
    }
    with (
        log.open("ab") as output,
        subprocess.Popen(
            [sys.executable, "-m", "services", "store_worker"], env=environment, cwd=REPOSITORY, stderr=output, stdout=output
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def wait_until_ready(process: subprocess.Popen[bytes], log: Path, begin: int) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while b'"event": "ready"' not in log.read_bytes()[begin:]:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        select.select([], [], [], 0.02)


def wait_for_copy(process: subprocess.Popen[bytes], log: Path, data_dir: Path, *, beyond: int) -> None:
    """Wait for a published copy with more than so many records."""
    deadline = time.monotonic() + START_DEADLINE_S
    while check_copy(data_dir) <= beyond:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        select.select([], [], [], 0.05)


def check_copy(data_dir: Path) -> int:
    """The published copy, if there is one, opens and accounts for every offset that it says it has; returns their number."""
    if not StoreFiles(data_dir).published.exists():
        return 0
    with open_snapshot(data_dir) as connection:
        assert list(ask(connection, UNACCOUNTED).rows) == []
        assert list(ask(connection, DOUBLED).rows) == []
        ((told, info),) = ask(
            connection, "SELECT sum(next_offset), any_value(offsets) FROM projector_offsets, snapshot_info"
        ).rows
        assert int(str(told or 0)) == sum(json.loads(str(info)).values() if info else [])
        return int(str(told or 0))


class Reader(threading.Thread):
    """Somebody who asks the published copy all the time."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(daemon=True)
        self.answers = 0
        self.errors: list[BaseException] = []
        self._data_dir = data_dir
        self.stop = threading.Event()

    def run(self) -> None:
        before = 0
        while not self.stop.wait(0.05):
            if not StoreFiles(self._data_dir).published.exists():
                continue
            try:
                with open_snapshot(self._data_dir) as connection:
                    ((count, distinct),) = ask(connection, "SELECT count(*), count(DISTINCT rollout_id) FROM rollouts").rows
                assert before <= int(str(count)) == distinct
                before = int(str(count))
                self.answers += 1
            except BaseException as error:
                self.errors.append(error)


@contextmanager
def reading(data_dir: Path) -> Iterator[Reader]:
    reader = Reader(data_dir)
    reader.start()
    try:
        yield reader
    finally:
        reader.stop.set()
        reader.join()


async def test_killed_forty_times_the_store_has_every_record_once(settings: Settings, topics: None, tmp_path: Path) -> None:
    moments = random.Random(4)
    log = tmp_path / "worker.log"
    log.touch()
    published = 0
    copies: set[int] = set()
    with reading(settings.data_dir) as reader:
        async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
            await producer.publish([run_published(attempts=2)])
            published += 1
            for life, batch in enumerate(batches(KILLS, EVENTS // KILLS)):
                await producer.publish(batch)
                published += len(batch)
                begin = log.stat().st_size
                with store_worker(settings, log) as process:
                    wait_until_ready(process, log, begin)
                    if life % 3 == 0:
                        # Whatever else the machine does: some lives are long enough for a copy.
                        wait_for_copy(process, log, settings.data_dir, beyond=max(copies, default=0))
                    select.select([], [], [], moments.random() * LONGEST_LIFE_S)
                    assert process.poll() is None, log.read_text()[-3000:]
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                copies.add(check_copy(settings.data_dir))
        assert published >= EVENTS
        begin = log.stat().st_size
        with store_worker(settings, log) as process:
            wait_until_ready(process, log, begin)
            wait_for_copy(process, log, settings.data_dir, beyond=published - 1)
            process.terminate()
            assert process.wait(60) == 0
    assert reader.errors == []
    assert reader.answers > KILLS
    # The kills fell where it hurts: between copies, not only before the first batch.
    assert len(copies) > KILLS // 4
    assert settings.bootstrap_servers is not None
    with open_snapshot(settings.data_dir) as connection:
        found = await verify(settings.bootstrap_servers, settings.kafka, connection)
    assert (found.is_clean, found.records) == (True, published), found
    before = answers(settings.data_dir)
    assert await rebuild(settings.bootstrap_servers, settings.kafka, settings.data_dir, StoreSettings()) == published
    assert answers(settings.data_dir) == before
