"""What every format has in common: rows made of one group at a time, and a count of what was left out.

A format is asked twice, because the type of a column depends on all rows: once to look (`observe`), once for the rows.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import orjson
import pyarrow as pa

from rollstream.store.exports.messages import Conversation, NotText
from rollstream.store.exports.selection import Attempt, Group

Row = dict[str, object]


class RowFormat(Protocol):
    """One format: what it makes of a group."""

    def observe(self, group: Group) -> None:
        """See a group before any row is made. Groups come in the same order both times."""

    def rows(self, group: Group) -> Iterator[Row]:
        """The group's rows."""

    def schema(self) -> pa.Schema | None:
        """Of the rows, once everything was observed; null where they are documents without columns."""

    @property
    def left_out(self) -> Counter[str]:
        """Reason -> how many attempts (or pairs) gave no row."""


@dataclass(slots=True)
class Duplicates:
    """Tells contents that were here before. Takes about a hundred bytes for each that was not."""

    wanted: bool
    _seen: set[bytes] = field(default_factory=set)

    def repeats(self, content: object) -> bool:
        """Whether `content` was here before; never when nobody asked to leave duplicates out."""
        if not self.wanted:
            return False
        digest = blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
        if digest in self._seen:
            return True
        self._seen.add(digest)
        return False


def conversation(attempt: Attempt) -> Conversation | None:
    """What was said, or None if it is not all text."""
    try:
        return Conversation.of(attempt.record.messages, attempt.record.tools)
    except NotText:
        return None


IDS: tuple[tuple[str, pa.DataType], ...] = (
    ("run_id", pa.string()),
    ("environment", pa.string()),
    ("task_id", pa.string()),
    ("group_id", pa.string()),
)
"""Columns that lead from a row back to the store."""


def ids(attempt: Attempt) -> Row:
    record = attempt.record
    return {"run_id": record.run, "environment": record.environment, "task_id": attempt.task, "group_id": record.group.id}
