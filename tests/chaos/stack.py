"""A whole installation of processes on a broker that may be killed: how chaos tests set it up, feed it and wait for its end."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from aiokafka.errors import KafkaError

from rollstream.broker import EmbeddedBroker
from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.provisioning import ensure
from rollstream.eventlog.reading import open_reader
from rollstream.settings import KafkaSettings, Settings
from schemas import identities
from schemas.task import TaskSubmitted, first_sessions
from schemas.values import Composition, TaskRef
from tests.chaos.fleet import Diary, Fleet, start_model
from tests.chaos.ledger import Commits, look_at_commits
from topics.catalogue import EPISODES_COMPLETED, ROLLOUTS_SCORED, SESSIONS_READY, TASKS_IN

RUN = "chaos"
SESSION_TIMEOUT_S = 6.0


@dataclass
class Installation:
    """One installation with its own topics and data directory, and the processes that serve it."""

    settings: Settings
    broker: EmbeddedBroker
    workers: Fleet
    helpers: Fleet
    journal: Path
    diary: Diary = field(default_factory=Diary)

    @property
    def bootstrap(self) -> str:
        assert self.settings.bootstrap_servers is not None
        return self.settings.bootstrap_servers


@asynccontextmanager
async def installed(
    broker: EmbeddedBroker,
    root: Path,
    *,
    lanes: int,
    max_latency_s: float,
    flaky: float,
    commit_interval_s: float = 0.1,
    tool_steps: int = 0,
) -> AsyncIterator[Installation]:
    """Topics and a model server; workers are the test's own to start."""
    running = broker.status()
    assert running is not None, "the broker does not run"
    kafka = KafkaSettings(
        topic_prefix=f"c{uuid4().hex[:8]}.",
        partitions=6,
        commit_interval_s=commit_interval_s,
        session_timeout_s=SESSION_TIMEOUT_S,
    )
    settings = Settings(data_dir=root / "data", bootstrap_servers=running.bootstrap, kafka=kafka)
    admin = await connect_admin(running.bootstrap)
    await ensure(admin, kafka)
    await admin.close()
    diary = Diary()
    helpers = Fleet(os.environ, root / "logs", diary)
    journal = root / "model-calls.txt"
    base_url = await start_model(helpers, "model-1", journal, max_latency_s=max_latency_s, flaky=flaky, tool_steps=tool_steps)
    environment = {
        **os.environ,
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        "KAFKA_BOOTSTRAP_SERVERS": running.bootstrap,
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": kafka.topic_prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(kafka.partitions),
        "ROLLSTREAM_KAFKA__SESSION_TIMEOUT_S": str(kafka.session_timeout_s),
        "ROLLSTREAM_KAFKA__COMMIT_INTERVAL_S": str(kafka.commit_interval_s),
        "ROLLSTREAM_LIMITS__MAX_CONCURRENT_EPISODES": str(lanes),
        "ROLLSTREAM_MODELS__DEFAULT__BASE_URL": base_url,
        "ROLLSTREAM_MODELS__DEFAULT__MAX_RETRIES": "0",
        "ROLLSTREAM_RETRIES__FIRST_DELAY_S": "0.2",
        "ROLLSTREAM_VERIFIER__GRADER_PROCESSES": "1",
    }
    workers = Fleet(environment, root / "logs", diary)
    try:
        yield Installation(settings, broker, workers, helpers, journal, diary)
    finally:
        await workers.stop(gracefully=False)
        await helpers.stop(gracefully=False)


def tasks(count: int) -> list[TaskSubmitted]:
    """Tasks of one attempt each, with prompts that name them."""
    return [
        TaskSubmitted.create(
            run=RUN,
            environment="multiple_choice",
            task=TaskRef(id=f"e{number}", dataset=RUN, index=number),
            row={
                "question": f"Episode e{number}: which of these is the second?",
                "options": [{"A": "one"}, {"B": "two"}, {"C": "three"}],
                "expected_answer": "B",
            },
            composition=Composition(harness="chat", models={"policy": "default"}),
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Raw:
    """A record that is written as it stands."""

    topic: str
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


def raw_task(task: TaskSubmitted) -> Raw:
    """A task as its event says, with one header more, by which the ledger knows its prompt."""
    headers = (*task.headers(), ("episode", task.task.id.encode()))
    return Raw(TASKS_IN.name, task.key(), task.to_json(), headers)


def poison(count: int, rng: random.Random) -> list[Raw]:
    """Records that nobody can read, of attempts that their headers name: on `tasks.in` and on two topics keyed by session."""
    found = []
    for number in range(count):
        topic = (TASKS_IN, SESSIONS_READY, TASKS_IN, EPISODES_COMPLETED)[number % 4]
        group = identities.group_id(RUN, "multiple_choice", "poison", str(number), 0)
        value = rng.choice([b"\xff\xfe\x00", b"{", b"[]", b'{"kind": "SessionReady"}', b"\x00" * 40])
        (ids,) = first_sessions(RUN, group, 1, "multiple_choice", None)
        names: dict[str, object] = {"run_id": RUN, "group_id": group, "group_size": 1, "environment": "multiple_choice"}
        key = group
        if topic is not TASKS_IN:
            names |= {"rollout_id": ids.rollout, "session_id": ids.session, "round": 0, "try": 0, "group_index": 0}
            key = ids.session
        headers = tuple((name, str(told).encode()) for name, told in names.items())
        found.append(Raw(topic.name, key.encode(), value, headers))
    return found


async def publish(settings: Settings, records: Sequence[Raw], per_second: float, at_once: int = 0) -> None:
    """Write records at a pace, the first `at_once` of them immediately, through any outage of the broker."""
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        for number, record in enumerate(records):
            while True:
                try:
                    await producer.publish_raw(record.topic, record.key, record.value, record.headers)
                    break
                except KafkaError:
                    await asyncio.sleep(0.5)
            if number >= at_once:
                await asyncio.sleep(1 / per_second)


async def all_ended(settings: Settings, attempts: int, deadline_s: float) -> int:
    """Wait until so many attempts have a terminal record, through any outage; returns how many have at the deadline."""
    seen: set[str] = set()
    positions: dict[int, int] = {}
    assert settings.bootstrap_servers is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while len(seen) < attempts:
                with contextlib.suppress(KafkaError, BrokerUnavailable, OSError):
                    async with open_reader(settings.bootstrap_servers, settings.kafka, [ROLLOUTS_SCORED]) as reader:
                        reader.seek(ROLLOUTS_SCORED, positions)
                        while len(seen) < attempts:
                            for record in await reader.poll():
                                positions[record.partition] = record.offset + 1
                                seen.add(record.header_map()["rollout_id"])
                await asyncio.sleep(0.1)
    return len(seen)


async def settled(settings: Settings, commits: Commits, deadline_s: float = 20.0) -> None:
    """Wait until the groups have committed everything; the last look says what is missing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            await look_at_commits(settings, commits)
            while sum(commits.unfinished.values()):
                await asyncio.sleep(0.5)
                await look_at_commits(settings, commits)
