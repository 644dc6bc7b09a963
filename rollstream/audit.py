"""The terminal guarantee as code: each attempt published has exactly one terminal record that counts, or it is named here.

Pure. What it is given comes from the log alone: which groups were published, and every terminal record of the run.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.counting import precedence, that_count
from schemas.identities import rollout_id, session_id


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that was published."""

    group: str
    index: int

    @property
    def rollout_id(self) -> str:
        return rollout_id(self.group, self.index)


@dataclass(frozen=True, slots=True)
class Terminal:
    """One terminal record, by its headers and its place in the log."""

    rollout_id: str
    group: str
    event_id: str
    session: str
    round: int
    try_: int
    revision: int
    status: str
    partition: int
    offset: int

    @property
    def is_of_its_session(self) -> bool:
        """Whether the session is the one that the attempt's round and try lead to."""
        return self.session == session_id(self.rollout_id, self.round, self.try_)


@dataclass(frozen=True, slots=True)
class Audit:
    """What the log proves about a run.

    Attributes:
        groups: groups found on `tasks.in`; `expected_groups` is what the run's manifest promises, if it has one.
        counting: attempts with a record that counts, by status.
        repeated: terminal records beyond the first of the same event: harmless, at-least-once delivery.
        missing: attempts without a terminal record.
        overtaken: attempts of which several tries ended in the round that counts. A crash between a retry and the commit of
            what failed lets both tries go on; all records of a group share a partition, so everybody takes the first.
        double: attempts with two records that no rule tells apart: of one session, or of one that their ids do not lead to.
        strays: terminal records of attempts that nobody published.
    """

    groups: int
    expected_groups: int | None
    attempts: int
    counting: Mapping[str, int]
    repeated: int
    missing: list[Attempt]
    overtaken: dict[str, list[Terminal]]
    double: dict[str, list[Terminal]]
    strays: list[Terminal]

    @property
    def missing_groups(self) -> int:
        return max(0, (self.expected_groups or 0) - self.groups)

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.double or self.strays or self.missing_groups)


def audit(groups: Mapping[str, int], terminals: Iterable[Terminal], expected_groups: int | None = None) -> Audit:
    """Hold what was published against what ended.

    Args:
        groups: group id -> number of attempts.
        terminals: every terminal record of the run, in any order.
    """
    attempts = {attempt.rollout_id: attempt for group, size in groups.items() for attempt in _attempts(group, size)}
    of_rollout: dict[str, list[Terminal]] = defaultdict(list)
    for record in terminals:
        of_rollout[record.rollout_id].append(record)
    known = {rollout: records for rollout, records in of_rollout.items() if rollout in attempts}
    counting = that_count(record for records in known.values() for record in records)
    distinct = {rollout: _distinct(records) for rollout, records in known.items()}
    rivals = {rollout: found for rollout, records in distinct.items() if len(found := _rivals(records)) > 1}
    return Audit(
        groups=len(groups),
        expected_groups=expected_groups,
        attempts=len(attempts),
        counting=Counter(record.status for record in counting.values()),
        repeated=sum(len(records) - len(distinct[rollout]) for rollout, records in known.items()),
        missing=[attempt for rollout, attempt in attempts.items() if rollout not in known],
        overtaken={rollout: records for rollout, records in rivals.items() if _are_tries(records)},
        double={rollout: records for rollout, records in rivals.items() if not _are_tries(records)},
        strays=[record for rollout, records in of_rollout.items() if rollout not in attempts for record in records],
    )


def _attempts(group: str, size: int) -> list[Attempt]:
    return [Attempt(group, index) for index in range(size)]


def _distinct(records: Iterable[Terminal]) -> list[Terminal]:
    """The first record of each event, by offset."""
    first: dict[str, Terminal] = {}
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        first.setdefault(record.event_id, record)
    return list(first.values())


def _rivals(records: list[Terminal]) -> list[Terminal]:
    """Different records that share the highest (round, revision)."""
    highest = max(precedence(record)[:2] for record in records)
    return [record for record in records if (record.round, record.revision) == highest]


def _are_tries(records: list[Terminal]) -> bool:
    """Whether each record is of a try of its own."""
    return all(record.is_of_its_session for record in records) and len({record.session for record in records}) == len(records)
