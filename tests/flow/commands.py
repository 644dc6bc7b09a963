"""Commands as a user runs them, against the installation of a test, and what only an operator does to consumer groups."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from rollstream.eventlog.groups import group_name, open_groups
from rollstream.settings import Settings
from topics.catalogue import Topic


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


def environment_of(settings: Settings) -> dict[str, str]:
    """In which a process has the settings of the test."""
    return os.environ | {
        "COLUMNS": "200",
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        "KAFKA_BOOTSTRAP_SERVERS": str(settings.bootstrap_servers),
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(settings.kafka.partitions),
        "ROLLSTREAM_DEFAULTS__ENVIRONMENT": settings.defaults.environment or "math",
        "ROLLSTREAM_POOLS": json.dumps({name: claims.claims() for name, claims in settings.pools.items()}),
        "ROLLSTREAM_POOL": settings.pool,
    }


async def command(settings: Settings, *words: str, deadline_s: float = 120.0) -> Ran:
    """Run `rollstream` in a process of its own, with the settings of the test."""
    arguments = [sys.executable, "-m", "rollstream.cli", *words]
    process = await asyncio.create_subprocess_exec(
        *arguments, env=environment_of(settings), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(deadline_s):
        out, err = await process.communicate()
    return Ran(process.returncode or 0, out.decode(), err.decode())


async def commit(settings: Settings, worker: str, topic: Topic, *, at_end: bool = False, metadata: str = "") -> None:
    """Set the offsets of a worker that does not run, to the start of the topic or to its end."""
    group = settings.kafka.topic_prefix + group_name(worker, topic)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.bootstrap_servers, group_id=group, enable_auto_commit=False, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        name = settings.kafka.topic_prefix + topic.name
        partitions = [TopicPartition(name, number) for number in range(topic.partitions(settings.kafka.partitions))]
        consumer.assign(partitions)
        offsets = await (consumer.end_offsets(partitions) if at_end else consumer.beginning_offsets(partitions))
        await consumer.commit({tp: (offset, metadata) for tp, offset in offsets.items()})
    finally:
        await consumer.stop()


async def until_nothing_is_open(settings: Settings, deadline_s: float = 60.0) -> None:
    """Wait until every worker has done every record there is."""
    assert settings.bootstrap_servers is not None
    async with asyncio.timeout(deadline_s), open_groups(settings.bootstrap_servers, settings) as groups:
        while any(state.lag for state in await groups.describe()):
            await asyncio.sleep(0.2)
