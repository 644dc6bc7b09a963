"""Attempts driven once more because somebody asked for it: resumed, repaired, or replayed from a dead letter.

An attempt that has a session goes on from its ticket, as a retry. One that never got that far goes on from its task: the same
record is published again, with headers that say for which attempts and for which round, so finished ones are not run twice.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import LogReader, Record, open_reader
from rollstream.eventlog.retries import redrive
from rollstream.ledger import RunLog, Session
from rollstream.settings import Settings
from schemas.envelope import SessionIds, header_map, now
from schemas.events import UndecodableEvent, decode
from schemas.failure import ErrorInfo
from schemas.identities import session_id
from schemas.retry import RetryScheduled
from schemas.session import SessionReady
from schemas.task import Redrive
from topics.catalogue import SESSIONS_READY, TASKS_IN, Topic

BY = "rollstream-cli"


@dataclass(frozen=True, slots=True)
class Redriven:
    """What became of the attempts that were asked for."""

    from_sessions: int
    from_tasks: int
    without_trace: int
    """The log has neither a readable session nor a task of them."""

    @property
    def attempts(self) -> int:
        return self.from_sessions + self.from_tasks


class Redriving:
    """Drives attempts of one run again. One object a command: it keeps no connection."""

    def __init__(self, bootstrap: str, settings: Settings, log: RunLog, producer: EventProducer, cause: ErrorInfo) -> None:
        self._bootstrap = bootstrap
        self._settings = settings
        self._log = log
        self._producer = producer
        self._cause = cause

    async def drive(self, wanted: Mapping[str, tuple[SessionIds, Session]], advance: Callable[[int], None]) -> Redriven:
        """Open another session of each attempt.

        Args:
            wanted: rollout -> its ids, and the round and try to open.
            advance: is told how many more are on their way.
        """
        left = dict(wanted)
        from_sessions = await self._from_sessions(left, advance)
        from_tasks = await self._from_tasks(left, advance)
        return Redriven(from_sessions, from_tasks, len(wanted) - from_sessions - from_tasks)

    async def _from_sessions(self, left: dict[str, tuple[SessionIds, Session]], advance: Callable[[int], None]) -> int:
        """Publish a retry for every attempt whose newest session can be read, and take it out of `left`."""
        opened = self._log.ledger.opened
        newest = {session_id(rollout, *opened[rollout]): rollout for rollout in left if rollout in opened}
        count = 0
        async with self._reader(SESSIONS_READY) as reader:
            async for batch in reader.to_end():
                retries = [retry for record in batch if (retry := self._retry_of(record, newest, left)) is not None]
                await self._producer.publish(retries)
                advance(len(retries))
                count += len(retries)
        return count

    def _retry_of(
        self, record: Record, newest: dict[str, str], left: dict[str, tuple[SessionIds, Session]]
    ) -> RetryScheduled | None:
        rollout = newest.get(record.header_map().get("session_id", ""))
        if rollout is None or rollout not in left:
            return None
        try:
            session = decode(record.value, SessionReady)
        except UndecodableEvent:
            return None
        _, following = left.pop(rollout)
        return redrive(session, following, self._cause, at=now(), worker=BY)

    async def _from_tasks(self, left: Mapping[str, tuple[SessionIds, Session]], advance: Callable[[int], None]) -> int:
        """Publish the task records of all that is `left` again, for those attempts only."""
        wanted: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for ids, (round_, _) in left.values():
            position = self._log.ledger.groups[ids.group.id].position
            if position is not None:
                wanted[position][round_].add(ids.group.index)
        count = 0
        if not wanted:
            return count
        async with self._reader(TASKS_IN) as reader:
            async for batch in reader.to_end():
                for record in batch:
                    for round_, indices in wanted.pop((record.partition, record.offset), {}).items():
                        await self._publish_task(record, Redrive(round=round_, indices=frozenset(indices)))
                        advance(len(indices))
                        count += len(indices)
        return count

    async def _publish_task(self, record: Record, redrive: Redrive) -> None:
        ours = redrive.headers()
        # A task that names no run belongs to the day of its record, and this record is another one.
        if "run_id" not in header_map(record.headers):
            ours.append(("run_id", self._log.ledger.run.encode()))
        names = {name for name, _ in ours}
        kept = [(name, value) for name, value in record.headers if name not in names]
        await self._producer.publish_raw(record.topic, record.key, record.value, [*kept, *ours])

    @asynccontextmanager
    async def _reader(self, topic: Topic) -> AsyncIterator[LogReader]:
        async with open_reader(self._bootstrap, self._settings.kafka, [topic]) as reader:
            if self._log.since is not None:
                await reader.seek_to_time(self._log.since)
            yield reader
