"""SFT: one row an attempt that is worth imitating."""

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from rollstream.store.exports.messages import filled, keys_of, messages_type
from rollstream.store.exports.rows import IDS, Duplicates, Row, conversation, ids
from rollstream.store.exports.selection import Group


class SftRows:
    """`messages`, `tools`, and where they come from."""

    def __init__(self, *, dedupe: bool) -> None:
        self.left_out: Counter[str] = Counter()
        self._duplicates = Duplicates(dedupe)
        self._keys: set[str] = set()

    def observe(self, group: Group) -> None:
        for attempt in group.attempts:
            if said := conversation(attempt):
                self._keys |= keys_of(said.messages)

    def rows(self, group: Group) -> Iterator[Row]:
        self.left_out["unreadable"] += group.unreadable
        for attempt in group.attempts:
            said = conversation(attempt)
            if said is None:
                self.left_out["not text"] += 1
            elif not said.answered:
                self.left_out["without an answer"] += 1
            elif self._duplicates.repeats((said.messages, said.tools)):
                self.left_out["duplicate"] += 1
            else:
                record = attempt.record
                yield {
                    "messages": filled(said.messages, self._keys),
                    "tools": said.tools,
                    "reward": record.reward,
                    **ids(attempt),
                    "rollout_id": record.rollout,
                }

    def schema(self) -> pa.Schema:
        return pa.schema(
            [
                ("messages", messages_type(self._keys)),
                ("tools", pa.string()),
                ("reward", pa.float64()),
                *IDS,
                ("rollout_id", pa.string()),
            ]
        )
