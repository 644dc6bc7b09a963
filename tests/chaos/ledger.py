"""What the log says about a run, after the fact: the audit, what ran again, how long nothing ended."""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from rich.console import Console
from rich.table import Table

from rollstream.audit import Audit, Terminal, audit
from rollstream.eventlog.commits import decode_done
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.groups import CONSUMPTIONS
from rollstream.eventlog.reading import Record, open_reader
from rollstream.settings import KafkaSettings, Settings
from schemas.events import decode
from schemas.verdict import VerdictReached
from tests.chaos import model
from topics.catalogue import (
    DEAD_LETTERS,
    EPISODES_COMPLETED,
    ROLLOUTS_RETRIES,
    ROLLOUTS_SCORED,
    SESSIONS_READY,
    TASKS_IN,
    VERDICTS,
    Topic,
)


class Stall(NamedTuple):
    """A time in which no attempt ended; seconds, the last two since the beginning."""

    seconds: float
    since: float
    until: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, between {self.since:.1f} and {self.until:.1f} s"


@dataclass
class Ledger:
    """Everything of one installation, read once."""

    records: dict[str, list[Record]]
    audit: Audit
    ended: dict[str, float]
    """Rollout -> time of its first terminal record."""

    @classmethod
    async def read(cls, settings: Settings) -> "Ledger":
        topics = (TASKS_IN, SESSIONS_READY, EPISODES_COMPLETED, ROLLOUTS_RETRIES, VERDICTS, ROLLOUTS_SCORED, DEAD_LETTERS)
        records = {topic.name: await read_all(settings, topic) for topic in topics}
        groups: dict[str, int] = {}
        # Whoever carries the ids of a group stands for it, be it a task or the wreck of a session.
        for record in records["tasks.in"] + records["sessions.ready"] + records["episodes.completed"]:
            headers = record.header_map()
            groups[headers["group_id"]] = int(headers["group_size"])
        terminals = [terminal_of(record) for record in records["rollouts.scored"]]
        ended: dict[str, float] = {}
        for record in records["rollouts.scored"]:
            rollout, at = record.header_map()["rollout_id"], record.timestamp_ms / 1000
            ended[rollout] = min(at, ended.get(rollout, at))
        return cls(records, audit(groups, terminals), ended)

    def agents_again(self, journal: Path) -> int:
        """Model calls that began after the episode they were for was in the log as completed."""
        episode_of = {_ids(record)[0]: record for record in self.records["tasks.in"]}
        completed: dict[str, float] = {}
        for record in self.records["episodes.completed"]:
            group, _ = _ids(record)
            at = record.timestamp_ms / 1000
            completed[group] = min(at, completed.get(group, at))
        asked = defaultdict(list)
        for at, episode in model.calls(journal):
            asked[episode].append(at)
        names = {group: _header(record, "episode") for group, record in episode_of.items()}
        return sum(sum(at > done for at in asked[names[group]]) for group, done in completed.items() if group in names)

    def verifications_again(self) -> int:
        """Verdicts whose verification began after the attempt had ended."""
        again = 0
        for record in self.records["verdicts"]:
            verdict = decode(record.value, VerdictReached)
            began = verdict.occurred_at.timestamp() - verdict.duration_s
            # Records have their time in milliseconds, rounded down.
            again += began > self.ended.get(verdict.rollout, float("inf")) + 0.001
        return again

    def repeated(self, topic: Topic) -> int:
        """Records of a topic beyond the first of the same event."""
        counts = Counter(_header(record, "ce_id") for record in self.records[topic.name])
        return sum(counts.values()) - len(counts)

    def longest_stall(self, began: float, broker_down: Sequence[tuple[float, float]], stragglers: int = 0) -> "Stall":
        """Longest time in which no attempt ended although there was work, without the time the broker was away.

        Args:
            stragglers: so many attempts, the last to end, do not count: where deaths go on for ever, each of a few may be hit
                by one after the other, while nobody else has any work.
        """
        moments = [began, *sorted(self.ended.values())[: len(self.ended) - stragglers]]
        stalls = (
            Stall(later - earlier - overlap(earlier, later, broker_down), earlier - began, later - began)
            for earlier, later in itertools.pairwise(moments)
        )
        return max(stalls, default=Stall(0.0, 0.0, 0.0))

    def curve(self, began: float, bucket_s: float = 3.0) -> list[float]:
        """Attempts that ended in a second, bucket by bucket."""
        moments = sorted(self.ended.values())
        buckets = int((moments[-1] - began) / bucket_s) + 1
        edges = [bisect.bisect_left(moments, began + index * bucket_s) for index in range(buckets + 1)]
        return [(after - before) / bucket_s for before, after in itertools.pairwise(edges)]


def terminal_of(record: Record) -> Terminal:
    headers = record.header_map()
    return Terminal(
        rollout_id=headers["rollout_id"],
        group=headers["group_id"],
        event_id=headers["ce_id"],
        session=headers["session_id"],
        round=int(headers["round"]),
        try_=int(headers["try"]),
        revision=int(headers["revision"]),
        status=headers["status"],
        partition=record.partition,
        offset=record.offset,
    )


def overlap(start: float, end: float, spans: Iterable[tuple[float, float]]) -> float:
    """How much of [start, end] lies in disjoint spans."""
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in spans)


def _header(record: Record, name: str) -> str:
    return record.header_map().get(name, "")


def _ids(record: Record) -> tuple[str, str]:
    headers = record.header_map()
    return headers["group_id"], headers.get("rollout_id", "")


async def read_all(settings: Settings, topic: Topic) -> list[Record]:
    assert settings.bootstrap_servers is not None
    async with open_reader(settings.bootstrap_servers, settings.kafka, [topic]) as reader:
        return [record async for batch in reader.to_end() for record in batch]


@dataclass
class Commits:
    """What the consumer groups have committed, looked at again and again."""

    longest_metadata: int = 0
    most_beyond: int = 0
    """Finished records beyond a mark that one commit told of."""
    looks: int = 0
    unfinished: dict[str, int] = field(default_factory=dict)
    """Group -> records that are not done, at the last look."""

    async def look(self, admin: AIOKafkaAdminClient, kafka: KafkaSettings, ends: dict[TopicPartition, int]) -> None:
        self.unfinished = {}
        for consumption in CONSUMPTIONS:
            group, topic = consumption.group(kafka), kafka.topic_prefix + consumption.topic.name
            mine = {tp: end for tp, end in ends.items() if tp.topic == topic}
            found = await admin.list_consumer_group_offsets(group, partitions=list(mine))
            left = 0
            for tp, end in mine.items():
                entry = found.get(tp)
                if entry is None or entry.offset < 0:
                    left += end
                    continue
                beyond = decode_done(entry.offset, entry.metadata)
                left += end - entry.offset - len(beyond)
                self.longest_metadata = max(self.longest_metadata, len(entry.metadata))
                self.most_beyond = max(self.most_beyond, len(beyond))
            self.unfinished[f"{group.removeprefix(kafka.topic_prefix)} on {consumption.topic.name}"] = left
        self.looks += 1


async def ends_of(settings: Settings) -> dict[TopicPartition, int]:
    """Where every partition that lanes consume ends."""
    assert settings.bootstrap_servers is not None
    topics = [settings.kafka.topic_prefix + consumption.topic.name for consumption in CONSUMPTIONS]
    consumer = AIOKafkaConsumer(bootstrap_servers=settings.bootstrap_servers, group_id=None)
    await consumer.start()
    try:
        partitions = [TopicPartition(name, number) for name in set(topics) for number in range(settings.kafka.partitions)]
        ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
        return ends
    finally:
        await consumer.stop()


async def look_at_commits(settings: Settings, commits: Commits) -> None:
    assert settings.bootstrap_servers is not None
    admin = await connect_admin(settings.bootstrap_servers)
    try:
        await commits.look(admin, settings.kafka, await ends_of(settings))
    finally:
        await admin.close()


def show(title: str, rows: dict[str, object]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    Console(width=100).print(table)
