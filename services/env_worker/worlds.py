"""Worlds that were open a moment ago, so that the next action need not unseal them. Bounded by the size of what they hold."""

from collections import OrderedDict
from dataclasses import dataclass

from rollstream.environments.protocol import World
from rollstream.environments.receipts import Receipt


@dataclass(frozen=True, slots=True)
class OpenWorld:
    """A world with the receipt it came from."""

    world: World
    receipt: Receipt


class WorldCache:
    """Session and index -> world. Forgetting is always sound: the receipt has everything."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[tuple[str, int], tuple[str, OpenWorld, int]] = OrderedDict()
        self.size_bytes = 0

    def take(self, session: str, index: int, sealed: str) -> OpenWorld | None:
        """The world after action `index`, if this very receipt is known here: another one may be another past, or forged."""
        found = self._held.get((session, index))
        if found is None or found[0] != sealed:
            return None
        self._forget(session, index)
        return found[1]

    def keep(self, sealed: str, opened: OpenWorld) -> None:
        """Remember a world until its next action, or until there is no room."""
        session, index = opened.receipt.session, opened.receipt.index
        # A parsed world takes some times the room of its JSON.
        size = 4 * len(opened.receipt.world) + len(sealed) + 1024
        self._forget(session, index)
        if opened.receipt.done or size > self._max_bytes:
            return
        self._held[session, index] = (sealed, opened, size)
        self.size_bytes += size
        while self.size_bytes > self._max_bytes:
            self._forget(*next(iter(self._held)))

    def _forget(self, session: str, index: int) -> None:
        found = self._held.pop((session, index), None)
        if found is not None:
            self.size_bytes -= found[2]
