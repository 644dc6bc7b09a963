"""Which actions were done in which session, as far as this worker knows: a session has one past, and one future.

A receipt says which actions it stands for, and any worker can go on from it; so an agent's side that kept an older one could
try an action, look at what came of it, and try another. Whoever did the first one refuses the other. Memory alone, and bounded:
a worker that is new to a session knows nothing of what was tried before.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from rollstream.errors import EnvironmentFailure

MAX_SESSIONS = 20_000
MAX_BYTES = 4 * 2**20
PREFIX = 8
"""Bytes kept of each digest: enough to tell two actions of one session apart."""


@dataclass(slots=True)
class _Trail:
    """Digests of consecutive actions, the first of index `start`."""

    start: int
    digests: bytearray = field(default_factory=bytearray)

    def at(self, index: int) -> bytes | None:
        place = (index - self.start) * PREFIX
        return bytes(self.digests[place : place + PREFIX]) or None if place >= 0 else None


class Trails:
    """What was begun in the sessions that this worker has acted in lately."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._trails: OrderedDict[str, _Trail] = OrderedDict()
        self.size_bytes = 0

    def take(self, session: str, index: int, before: str, digest: str) -> None:
        """Begin an action, unless another one was begun in its place. The same one may come again.

        Args:
            before: digest of all actions before this one; empty for the first.
            digest: with this one.

        Raises:
            EnvironmentFailure: it would make a second future of one past.
        """
        trail = self._trails.pop(session, None)
        try:
            if trail is not None and (
                _differs(trail.at(index), digest) or (index > 0 and _differs(trail.at(index - 1), before))
            ):
                raise EnvironmentFailure(
                    f"expected the latest receipt of session {session}, found one from before action {index} was done with "
                    "another content: what was seen cannot be unseen",
                    stage="agent",
                    kind="stale_receipt",
                    retryable=True,
                )
            trail = self._lengthened(trail, index, _prefix(digest))
        finally:
            if trail is not None:
                self._trails[session] = trail
        while len(self._trails) > self._max_sessions or self.size_bytes > self._max_bytes:
            _, forgotten = self._trails.popitem(last=False)
            self.size_bytes -= len(forgotten.digests)

    def _lengthened(self, trail: _Trail | None, index: int, prefix: bytes) -> _Trail:
        if trail is not None and trail.at(index) is not None:
            return trail
        if trail is None or index != trail.start + len(trail.digests) // PREFIX:
            # Others have done what lies between.
            self.size_bytes -= 0 if trail is None else len(trail.digests)
            trail = _Trail(index)
        trail.digests += prefix
        self.size_bytes += PREFIX
        return trail


def _prefix(digest: str) -> bytes:
    return bytes.fromhex(digest)[:PREFIX]


def _differs(known: bytes | None, digest: str) -> bool:
    return known is not None and known != _prefix(digest)
