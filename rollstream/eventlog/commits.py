"""Finished offsets in, committable offsets out.

Handlers finish out of order, but Kafka only understands "everything below N is done". So the commit carries, in its
metadata, which offsets beyond N are done too, and whoever takes the partition over re-runs only the rest. Leaving a finished
offset out of the metadata is always sound (it runs again); putting an unfinished one in never is.

Kept free of I/O so that its tests are tables.
"""

import time
import zlib
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from uuid import UUID

METADATA_LIMIT = 4096
"""Kafka's default `offset.metadata.max.bytes`."""
SOFT_LIMIT = METADATA_LIMIT * 3 // 4
"""Encoded length at which intake of the partition should pause, so that completions under way still fit."""
_PREFIX = "rs1"
_TAG = "@"
TAG_LENGTH = 9
"""Of what names the log that a commit is of; the set has the rest of the metadata."""
MAX_SPAN = 1 << 24
"""Offsets beyond the mark that are ever encoded; bounds what foreign metadata can make us allocate."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What to commit for one partition: everything below `offset` is done, and what `metadata` tells."""

    offset: int
    metadata: str


def encode_done(base: int, done: Collection[int], limit: int = METADATA_LIMIT - TAG_LENGTH) -> str:
    """Offsets above `base` as text of at most `limit` characters; the highest are left out if they do not fit."""
    beyond = sorted(offset for offset in done if base < offset < base + MAX_SPAN)
    while beyond:
        text = _encode(base, beyond)
        if len(text) <= limit:
            return text
        beyond = beyond[: len(beyond) * limit // len(text)] if len(text) > limit * 2 else beyond[: len(beyond) * 9 // 10]
    return ""


def _encode(base: int, beyond: list[int]) -> str:
    bits = bytearray((beyond[-1] - base) // 8 + 1)
    for offset in beyond:
        bits[(offset - base) >> 3] |= 1 << ((offset - base) & 7)
    packed = zlib.compress(bytes(bits), 6)
    tag, body = ("z", packed) if len(packed) < len(bits) else ("r", bytes(bits))
    return f"{_PREFIX}{tag}{b64encode(body).decode()}"


def decode_done(base: int, metadata: str | None) -> set[int]:
    """The offsets that `encode_done` wrote. Metadata that somebody else wrote, or garbage, means none."""
    if not metadata or not metadata.startswith(_PREFIX):
        return set()
    text = metadata.partition(_TAG)[0]
    tag, body = text[len(_PREFIX) : len(_PREFIX) + 1], text[len(_PREFIX) + 1 :]
    try:
        raw = b64decode(body, validate=True)
        if tag == "z":
            unpacker = zlib.decompressobj()
            raw = unpacker.decompress(raw, MAX_SPAN // 8)
            if not unpacker.eof:
                return set()
        elif tag != "r":
            return set()
    except (ValueError, zlib.error):
        return set()
    return {base + byte * 8 + bit for byte, value in enumerate(raw) if value for bit in range(8) if value >> bit & 1}


def tagged(commit: Commit, topic_id: UUID) -> Commit:
    """The commit with the name of the log in it: offsets of a topic that was deleted mean nothing in one of the same name."""
    return Commit(commit.offset, f"{commit.metadata}{_TAG}{_tag(topic_id)}")


def as_of(commit: Commit, topic_id: UUID | None, end: int) -> Commit:
    """What a commit says about the log as it is now, which ends at `end`.

    One of another log says nothing: its successor is read from the start. One beyond the end can only speak of what there was:
    all that comes is new. One without a name, as an operator's tool writes it, is taken at its word.
    """
    metadata, _, tag = commit.metadata.partition(_TAG)
    is_named = (not metadata or metadata.startswith(_PREFIX)) and len(tag) == TAG_LENGTH - len(_TAG)
    if is_named and topic_id is not None and tag != _tag(topic_id):
        return Commit(0, "")
    if commit.offset > end:
        return Commit(end, "")
    return Commit(commit.offset, metadata) if is_named else commit


def _tag(topic_id: UUID) -> str:
    return urlsafe_b64encode(topic_id.bytes)[: TAG_LENGTH - len(_TAG)].decode()


class Progress:
    """What is known of one assigned partition. A new object for each time the partition is acquired.

    Offsets that are never delivered (transaction markers, aborted or compacted records) leave no hole: the mark is the
    lowest *running* offset, or the next expected one when nothing runs.
    """

    __slots__ = ("_base", "_clock", "_committed", "_done", "_due_since", "_moved_at", "_next", "_running")

    def __init__(self, base: int | None = None, done: Iterable[int] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._base = base
        self._next = base
        self._done = set(done)
        self._running: set[int] = set()
        self._committed: Commit | None = None
        self._clock = clock
        self._moved_at = clock()
        self._due_since: float | None = None

    @property
    def committed(self) -> Commit | None:
        """What the broker has acknowledged, as far as we know."""
        return self._committed

    @committed.setter
    def committed(self, commit: Commit | None) -> None:
        self._committed = commit
        self._due_since = None

    @property
    def position(self) -> int | None:
        """The next offset to fetch; None when nothing is known (then the group's own start position holds)."""
        return self._next

    @property
    def mark(self) -> int | None:
        """Everything below is done; None when nothing is known."""
        return self._base

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    @property
    def span(self) -> int:
        """Offsets between the mark and the next expected one."""
        return 0 if self._base is None or self._next is None else self._next - self._base

    @property
    def mark_age_s(self) -> float:
        """How long the mark has stood still before work that runs: about the age of the longest episode."""
        return self._clock() - self._moved_at if self._running else 0.0

    @property
    def commit_age_s(self) -> float:
        """How long something has been due that the broker has not acknowledged."""
        return 0.0 if self._due_since is None else self._clock() - self._due_since

    def offer(self, offset: int) -> bool:
        """A record was fetched: True if it is to be run, False if it is done or running already."""
        if self._base is None:
            self._base = offset
        self._next = max(self._next or 0, offset + 1)
        if offset < self._base or offset in self._done or offset in self._running:
            return False
        if not self._running:
            self._moved_at = self._clock()
        self._running.add(offset)
        return True

    def complete(self, offset: int) -> None:
        """A running record is done, outputs produced. Ignored for offsets that are not running (any more)."""
        if offset in self._running:
            self._running.remove(offset)
            self._done.add(offset)

    def cut(self, position: int, start: int) -> list[range]:
        """The log begins at `start` now, beyond the `position` that was to be fetched: what is before it is never delivered.

        Returns:
            Offsets that were to be run and cannot be.
        """
        first = position if self._next is None else self._next
        if start <= first:
            return []
        if self._base is None:
            self._base = first
        self._next = start
        gone = []
        for done in sorted(offset for offset in self._done if first <= offset < start):
            gone.append(range(first, done))
            first = done + 1
        gone.append(range(first, start))
        return [offsets for offsets in gone if offsets]

    def next_commit(self) -> Commit | None:
        """Advance the mark and say what to commit; None if nothing was ever fetched."""
        if self._base is None:
            return None
        mark = min(self._running) if self._running else max(self._next or 0, self._base)
        while mark in self._done and mark not in self._running:
            mark += 1
        if mark > self._base:
            self._base = mark
            self._done = {offset for offset in self._done if offset >= mark}
            self._moved_at = self._clock()
        commit = Commit(self._base, encode_done(self._base, self._done))
        if commit == self._committed:
            self._due_since = None
        elif self._due_since is None:
            self._due_since = self._clock()
        return commit

    def merge(self, base: int | None, done: Iterable[int]) -> set[int]:
        """Take in what the broker knows after a rebalance in which this partition was kept.

        Another member may have owned it in between. Facts merge soundly: done is done.

        Returns:
            Running offsets that another member has finished: their work here is to be dropped.
        """
        self._done |= {offset for offset in done if offset >= (self._base or 0)}
        if base is not None and base > (self._base or 0):
            self._base = base
            self._next = max(self._next or 0, base)
            self._done = {offset for offset in self._done if offset >= base}
        finished = {offset for offset in self._running if offset < (self._base or 0) or offset in self._done}
        self._running -= finished
        self.committed = None
        return finished
