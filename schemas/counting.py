"""Which terminal record of an attempt counts, for store, audit and trainers alike.

A late verdict of an older round never beats a newer round, and of two records for one session the first by offset is the one
that happened. The view `rollouts` of the store states the same rule in SQL; a test holds the two together.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar


class TerminalRecord(Protocol):
    """What the rule looks at."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def revision(self) -> int: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...


R = TypeVar("R", bound=TerminalRecord)


def precedence(record: TerminalRecord) -> tuple[int, int, int, int]:
    """The greater counts: highest (round, revision), then first by offset."""
    return record.round, record.revision, -record.offset, -record.partition


def that_count(records: Iterable[R]) -> dict[str, R]:
    """Rollout id -> the record that counts, of all terminal records read so far, in any order."""
    found: dict[str, R] = {}
    for record in records:
        held = found.get(record.rollout_id)
        if held is None or precedence(record) > precedence(held):
            found[record.rollout_id] = record
    return found
