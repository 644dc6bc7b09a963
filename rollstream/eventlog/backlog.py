"""How much waits for pools that nobody serves. For commands that look.

The lag of a group counts what it would merely skip, so this looks at the records: at their headers, and at no more of them
than a person waits for.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rollstream.eventlog.groups import CONSUMPTIONS, Done, worker_for
from rollstream.eventlog.reading import Record, open_reader
from rollstream.settings import KafkaSettings
from topics.catalogue import BY_NAME, Topic

MOST_RECORDS = 50_000
MOST_S = 5.0

Owner = Callable[[Record], str]
"""The pool that a record belongs to."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits for the pools that were asked about."""

    counts: Mapping[str, int]
    is_all: bool = True
    """False when there was more to look at than was looked at."""

    def of(self, pool: str) -> str:
        """`12`, or `at least 12`."""
        return f"{'' if self.is_all else 'at least '}{self.counts.get(pool, 0)}"


class Tally:
    """Counts records that wait, by pool. Pure."""

    def __init__(self, pools: Collection[str], done: Done, owner: Owner) -> None:
        self._pools = pools
        self._done = done
        self._owner = owner
        self.counts: Counter[str] = Counter()

    def take(self, record: Record) -> None:
        pool = self._owner(record)
        topic = BY_NAME[record.topic]
        worker = worker_for(topic, record.header_map())
        if pool in self._pools and worker is not None:
            self.counts[pool] += not self._done.has(worker, topic, record.partition, record.offset, pool)

    def first(self, topic: Topic) -> dict[int, int]:
        """Partition -> the first offset that may wait for one of the pools; a partition that is not there, from its start."""
        found: dict[int, list[int]] = {}
        of_topic = [
            committed for one, committed in self._done.committed.items() if one.topic is topic and one.pool in self._pools
        ]
        for committed in of_topic:
            for partition, (below, _) in committed.items():
                found.setdefault(partition, []).append(below)
        return {partition: min(marks) for partition, marks in found.items() if len(marks) == len(of_topic)}


async def read_backlog(bootstrap: str, kafka: KafkaSettings, pools: Collection[str], done: Done, owner: Owner) -> Backlog:
    """Count what waits for `pools`, as far as the bounds of this module reach.

    Args:
        done: as it was before; what gets done meanwhile is counted still.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    tally = Tally(pools, done, owner)
    give_up, looked_at = time.monotonic() + MOST_S, 0
    topics = list(dict.fromkeys(one.topic for one in CONSUMPTIONS))
    async with open_reader(bootstrap, kafka, topics) as reader:
        for topic in topics:
            reader.seek(topic, tally.first(topic))
        async for batch in reader.to_end():
            for record in batch:
                tally.take(record)
            looked_at += len(batch)
            if looked_at > MOST_RECORDS or time.monotonic() > give_up:
                return Backlog(tally.counts, is_all=False)
    return Backlog(tally.counts)
