"""One run as the log has it: its groups, the newest session of each attempt, every terminal record, and what is under way.

Built from headers, so that even records with garbage in them are counted. An attempt is under way as long as a record that
carries it has not been done by the worker that reads it; what was done is asked *before* the log is read, so an attempt is
never taken for lost because its next record came in between.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from rollstream.audit import Audit, Terminal, audit
from rollstream.environments.intake import GroupIds, Unreadable, read_task
from rollstream.eventlog.backlog import Owner
from rollstream.eventlog.groups import Done, open_groups, worker_for
from rollstream.eventlog.pools import Pools
from rollstream.eventlog.reading import Record, open_reader
from rollstream.runs import Runs, UnknownRun, read_runs
from rollstream.settings import DEFAULT_POOL, Settings
from schemas.counting import that_count
from schemas.envelope import SessionIds, session_ids_from, utc_of
from schemas.identities import rollout_id, session_id
from schemas.task import Redrive, TaskSubmitted
from schemas.values import GroupRef
from topics.catalogue import BY_NAME, EPISODES_COMPLETED, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, SESSIONS_READY, TASKS_IN

TOPICS = (TASKS_IN, SESSIONS_READY, EPISODES_COMPLETED, ROLLOUTS_RETRIES, ROLLOUTS_SCORED)

Identify = Callable[[Record], GroupIds | None]
Session = tuple[int, int]
"""Round and try."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group of the run, and where its task stands."""

    id: str
    size: int
    environment: str
    position: tuple[int, int] | None
    """Partition and offset on `tasks.in`; None for a group that only its sessions tell of."""


class Ledger:
    """What is known of one run. Pure: records are taken in any order."""

    def __init__(
        self,
        run: str,
        done: Done,
        identify: Identify = lambda record: None,
        owner: Owner = lambda record: DEFAULT_POOL,
    ) -> None:
        self.run = run
        self.groups: dict[str, Group] = {}
        self.terminals: list[Terminal] = []
        self.opened: dict[str, Session] = {}
        """Rollout -> newest session on `sessions.ready`."""
        self.episodes: set[str] = set()
        """Sessions with an episode."""
        self.regrades: dict[str, int] = {}
        """Session -> highest revision that its episode was to be verified in once more."""
        self._planned: dict[str, Session] = {}
        self._under_way: set[str] = set()
        self._done = done
        self._identify = identify
        self._owner = owner

    def take(self, record: Record) -> None:
        """Take in one record of `TOPICS`; those of other runs are ignored."""
        headers = record.header_map()
        if record.topic == TASKS_IN.name:
            self._take_task(record, headers)
        elif headers.get("run_id") == self.run and (ids := session_ids_from(headers)) is not None:
            if record.topic == ROLLOUTS_SCORED.name:
                self.terminals.append(_terminal(record, headers, ids))
            else:
                self._take_session(record, headers, ids)

    def _take_task(self, record: Record, headers: Mapping[str, str]) -> None:
        if headers.get("run_id", self.run) != self.run:
            return
        size = headers.get("group_size", "")
        if "run_id" in headers and "group_id" in headers and size.isdigit() and int(size):
            group = headers["group_id"]
            self._add_group(Group(group, int(size), headers.get("environment", "unknown"), (record.partition, record.offset)))
        else:
            found = self._identify(record)
            if found is None or found.run != self.run:
                return
            group = found.group
            self._add_group(Group(group, found.size, found.environment, (record.partition, record.offset)))
        if not self._is_done(record, headers):
            self._under_way.add(group)
        self._plan(group, headers)

    def _plan(self, group: str, headers: Mapping[str, str]) -> None:
        """A task that was published again says which attempts are to have a session in which round."""
        with suppress(ValueError):
            if (again := Redrive.of(headers)) is not None and group in self.groups:
                for index in again.indices:
                    _raise_to(self._planned, rollout_id(group, index), (again.round, 0))

    def _take_session(self, record: Record, headers: Mapping[str, str], ids: SessionIds) -> None:
        self._add_group(Group(ids.group.id, ids.group.size, ids.environment, None))
        if record.topic == ROLLOUTS_RETRIES.name:
            numbers = [headers.get(name, "") for name in ("next_round", "next_try")]
            if all(number.isdigit() for number in numbers):
                _raise_to(self._planned, ids.rollout, (int(numbers[0]), int(numbers[1])))
            if (revision := headers.get("revision", "0")).isdecimal() and int(revision):
                self.regrades[ids.session] = max(self.regrades.get(ids.session, 0), int(revision))
        elif record.topic == SESSIONS_READY.name:
            _raise_to(self.opened, ids.rollout, (ids.round, ids.try_))
        else:
            self.episodes.add(ids.session)
        if not self._is_done(record, headers):
            self._under_way.add(ids.rollout)

    def _add_group(self, group: Group) -> None:
        if not _is_uuid(group.id):
            return
        known = self.groups.get(group.id)
        if known is None or (known.position is None and group.position is not None):
            self.groups[group.id] = group

    def _is_done(self, record: Record, headers: Mapping[str, str]) -> bool:
        """Whether the worker that handles the record was done with it, in the pool that it belongs to."""
        topic = BY_NAME[record.topic]
        worker = worker_for(topic, headers)
        assert worker is not None, "only topics that workers consume are asked about"
        return self._done.has(worker, topic, record.partition, record.offset, self._owner(record))

    # What follows from it.

    @property
    def is_empty(self) -> bool:
        return not self.groups and not self.terminals

    def audit(self, expected_groups: int | None = None) -> Audit:
        return audit({group.id: group.size for group in self.groups.values()}, self.terminals, expected_groups)

    def counting(self) -> dict[str, Terminal]:
        """Rollout -> its terminal record that counts."""
        return that_count(self.terminals)

    def attempts(self) -> Iterator[SessionIds]:
        """Every attempt, with the ids of its newest session, opened or planned; the first one where there is none."""
        for group in self.groups.values():
            for index in range(group.size):
                yield self._newest(group, index)

    def unfinished(self) -> Iterator[SessionIds]:
        """Attempts whose newest round has no terminal record, with the session that it would be of."""
        counting = self.counting()
        for ids in self.attempts():
            record = counting.get(ids.rollout)
            if record is None or record.round < ids.round:
                yield ids

    def is_under_way(self, ids: SessionIds) -> bool:
        """Whether a worker still has a record of this attempt before it."""
        return ids.rollout in self._under_way or ids.group.id in self._under_way

    @property
    def under_way(self) -> int:
        """How many groups and attempts have records that no worker is done with."""
        return len(self._under_way)

    def _newest(self, group: Group, index: int) -> SessionIds:
        rollout = rollout_id(group.id, index)
        round_, try_ = max(self.opened.get(rollout, (0, 0)), self._planned.get(rollout, (0, 0)))
        return SessionIds(
            run=self.run,
            group=GroupRef(id=group.id, size=group.size, index=index),
            task=None,
            rollout=rollout,
            session=session_id(rollout, round_, try_),
            round=round_,
            try_=try_,
            environment=group.environment,
        )


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _raise_to(sessions: dict[str, Session], rollout: str, session: Session) -> None:
    sessions[rollout] = max(sessions.get(rollout, session), session)


def _terminal(record: Record, headers: Mapping[str, str], ids: SessionIds) -> Terminal:
    revision = headers.get("revision", "0")
    return Terminal(
        rollout_id=ids.rollout,
        group=ids.group.id,
        event_id=headers.get("ce_id", ids.session),
        session=ids.session,
        round=ids.round,
        try_=ids.try_,
        revision=int(revision) if revision.isdigit() else 0,
        status=headers.get("status", "unknown"),
        partition=record.partition,
        offset=record.offset,
    )


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run's ledger, and where its part of the log begins."""

    ledger: Ledger
    runs: Runs
    since: datetime | None
    """None when nobody announced the run: then it may begin anywhere."""

    @property
    def expected_groups(self) -> int | None:
        known = self.runs.known.get(self.ledger.run)
        return None if known is None else known.manifest.groups

    def audit(self) -> Audit:
        return self.ledger.audit(self.expected_groups)


async def read_run(bootstrap: str, settings: Settings, run: str) -> RunLog:
    """Read everything that the log has of a run.

    Raises:
        UnknownRun: nothing in the log belongs to such a run.
        BrokerUnavailable: nobody answers.
    """
    async with open_groups(bootstrap, settings) as groups:
        done = await groups.done()
    runs = await read_runs(bootstrap, settings.kafka)
    known = runs.known.get(run)
    since = None if known is None else known.read_from
    ledger = Ledger(run, done, identifying(settings), owning(settings))
    async with open_reader(bootstrap, settings.kafka, TOPICS) as reader:
        if since is not None:
            await reader.seek_to_time(since)
        async for batch in reader.to_end():
            for record in batch:
                ledger.take(record)
    if ledger.is_empty and known is None:
        raise UnknownRun(run, runs)
    return RunLog(ledger, runs, since)


def identifying(settings: Settings) -> Identify:
    """Whose attempts a task record without our headers is, as env_worker would say with the same settings."""

    def identify(record: Record) -> GroupIds | None:
        task = _read_task(record, settings)
        if isinstance(task, Unreadable):
            return task.group
        return GroupIds(task.run, task.group, task.attempts, task.environment, task.task)

    return identify


def owning(settings: Settings) -> Owner:
    """Which pool a record belongs to, as the workers would say with the same settings."""
    pools = Pools.of(settings)

    def owner(record: Record) -> str:
        headers = record.header_map()
        told = pools.told_by(BY_NAME[record.topic], headers)
        if told is not None:
            return told
        task = _read_task(record, settings)
        return pools.of_task(headers, None if isinstance(task, Unreadable) else task)

    return owner if pools.declared else lambda record: DEFAULT_POOL


def _read_task(record: Record, settings: Settings) -> TaskSubmitted | Unreadable:
    try:
        return read_task(
            record.value,
            record.header_map(),
            settings.defaults,
            settings.limits.for_episode(),
            utc_of(record.timestamp_ms),
        )
    except Unreadable as error:
        return error
