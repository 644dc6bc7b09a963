"""Verifying what agents handed in once more, without the agents: a new revision of every verdict that another version gave.

Whether there is anything to do is read from the log alone, attempt by attempt, so asking twice does nothing twice and a
command that was interrupted is completed by asking again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rollstream.eventlog.producer import Publisher
from rollstream.eventlog.reading import Record, open_reader
from rollstream.eventlog.retries import regrade
from rollstream.ledger import Ledger, RunLog
from rollstream.settings import Settings
from schemas.counting import that_count
from schemas.envelope import now, session_ids_from
from schemas.episode import EpisodeCompleted
from schemas.events import UndecodableEvent, decode
from schemas.failure import ErrorInfo
from schemas.retry import RetryScheduled
from schemas.values import Reward, Value
from topics.catalogue import EPISODES_COMPLETED, ROLLOUTS_SCORED

BY = "rollstream-cli"
CAUSE = ErrorInfo(
    kind="regrade", stage="verification", message="`rollstream regrade` asked for another revision", retryable=True
)
ENVELOPE_BYTES = 64 * 1024
"""Room beside an episode in the record that repeats it."""


class _Versions(Value):
    environment: str | None = None


class _Scored(Value):
    """What a regrade needs of a RolloutScored; the rest of it can be large."""

    rollout: str
    session: str
    round: int = 0
    revision: int = 0
    environment: str
    status: str
    reward: Reward | None = None
    versions: _Versions = _Versions()


@dataclass(frozen=True, slots=True)
class Graded:
    """One terminal record: how an attempt was graded, and by what."""

    rollout_id: str
    session: str
    round: int
    revision: int
    environment: str
    version: str | None
    """Of the environment that gave the verdict; None where there is none, or the record does not tell."""
    status: str
    reward: float | None
    partition: int
    offset: int

    @classmethod
    def of(cls, record: Record, run: str) -> Self | None:
        """What a record of `rollouts.scored` tells; from its headers alone if its body is garbage."""
        headers = record.header_map()
        if headers.get("run_id") != run or (ids := session_ids_from(headers)) is None:
            return None
        revision = headers.get("revision", "0")
        try:
            scored = _Scored.model_validate_json(record.value or b"")
        except ValueError:
            scored = _Scored(
                rollout=ids.rollout,
                session=ids.session,
                round=ids.round,
                revision=int(revision) if revision.isdecimal() else 0,
                environment=ids.environment,
                status=headers.get("status", "unknown"),
            )
        return cls(
            scored.rollout,
            scored.session,
            scored.round,
            scored.revision,
            scored.environment,
            scored.versions.environment,
            scored.status,
            scored.reward,
            record.partition,
            record.offset,
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """One attempt that is to be verified once more."""

    before: Graded
    revision: int
    version: str
    """Of the environment that is to verify."""


@dataclass(slots=True)
class Regrade:
    """What regrading a run does to its attempts. Sessions and rollouts by id."""

    wanted: dict[str, Asked] = field(default_factory=dict)
    """Session -> what is to be asked of it."""
    under_way: dict[str, Asked] = field(default_factory=dict)
    """Session -> what was asked of it before, and has not happened yet."""
    current: int = 0
    """Attempts whose verdict that counts is of the version that is wanted already."""
    not_ended: int = 0
    cancelled: int = 0
    without_episode: int = 0
    """Attempts that failed before the agent had handed in."""


def plan_regrade(
    ledger: Ledger,
    graded: Iterable[Graded],
    episodes: Collection[str],
    versions: Mapping[str, str],
    *,
    only: Collection[str] | None = None,
    force: bool = False,
) -> Regrade:
    """Which attempts are to be verified once more. Pure.

    Args:
        graded: every terminal record of the run.
        episodes: sessions that have an episode in the log.
        versions: environment -> the version that is to verify; attempts of others are left out.
        only: rollouts to choose from; None means all.
        force: also those that this version has graded already.
    """
    counting = that_count(graded)
    plan = Regrade()
    for ids in ledger.attempts():
        version = versions.get(ids.environment)
        if version is None or (only is not None and ids.rollout not in only):
            continue
        record = counting.get(ids.rollout)
        if record is None or record.round < ids.round:
            plan.not_ended += 1
        elif record.status == "cancelled":
            plan.cancelled += 1
        elif record.session not in episodes:
            plan.without_episode += 1
        else:
            _decide(plan, record, ledger.regrades.get(record.session, 0), version, force, ledger.is_under_way(ids))
    return plan


def _decide(plan: Regrade, record: Graded, asked: int, version: str, force: bool, busy: bool) -> None:
    """One attempt with an episode and a record.

    Args:
        asked: the highest revision that was ever asked for; 0 when none was.
        busy: whether a worker still has a record of this attempt before it.
    """
    if asked > record.revision and busy:
        plan.under_way[record.session] = Asked(record, asked, version)
    elif record.version == version and not force:
        plan.current += 1
    else:
        # What was asked for and never happened (its run was cancelled meanwhile) is asked for again, as the same revision.
        plan.wanted[record.session] = Asked(record, max(record.revision + 1, asked), version)


class Regrading:
    """Reads what a regrade needs of one run, and asks for it. One object a command: it keeps no connection."""

    def __init__(self, bootstrap: str, settings: Settings, log: RunLog) -> None:
        self._bootstrap = bootstrap
        self._settings = settings
        self._log = log

    async def graded(self) -> list[Graded]:
        """Every terminal record of the run."""
        found: list[Graded] = []
        async with open_reader(self._bootstrap, self._settings.kafka, [ROLLOUTS_SCORED]) as reader:
            if self._log.since is not None:
                await reader.seek_to_time(self._log.since)
            async for batch in reader.to_end():
                found += [one for record in batch if (one := Graded.of(record, self._log.ledger.run)) is not None]
        return found

    async def ask(self, wanted: Mapping[str, Asked], publisher: Publisher, advance: Callable[[int], None]) -> set[str]:
        """Ask for each episode to be verified once more.

        Args:
            advance: is told how many more are on their way.

        Returns:
            Sessions that could not be asked for: their episode cannot be read, or is too long to be repeated in a record.
        """
        left = dict(wanted)
        unfit = set(wanted)
        async with open_reader(self._bootstrap, self._settings.kafka, [EPISODES_COMPLETED]) as reader:
            if self._log.since is not None:
                await reader.seek_to_time(self._log.since)
            async for batch in reader.to_end():
                events = [event for record in batch if (event := self._event(record, left)) is not None]
                await publisher.publish(events)
                advance(len(events))
                unfit -= {event.session for event in events}
        return unfit

    def _event(self, record: Record, left: dict[str, Asked]) -> RetryScheduled | None:
        """What asks for one episode. Of a session, the first by offset is the one that happened: it leaves `left`."""
        asked = left.pop(record.header_map().get("session_id", ""), None)
        if asked is None or len(record.value or b"") + ENVELOPE_BYTES > self._settings.kafka.max_record_bytes:
            return None
        try:
            episode = decode(record.value, EpisodeCompleted)
        except UndecodableEvent:
            return None
        return regrade(episode, asked.revision, asked.version, CAUSE, at=now(), worker=BY)
