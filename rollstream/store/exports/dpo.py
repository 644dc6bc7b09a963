"""DPO: one row a group, its best attempt against its worst."""

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from rollstream.store.exports.messages import Conversation, filled, keys_of, messages_type, split_pair
from rollstream.store.exports.rows import IDS, Duplicates, Row, conversation, ids
from rollstream.store.exports.selection import Attempt, Group


class DpoRows:
    """`prompt`, `chosen`, `rejected`. Only a difference of answers makes a pair, not the luck of a grader or a world."""

    def __init__(self, *, dedupe: bool) -> None:
        self.left_out: Counter[str] = Counter()
        self._duplicates = Duplicates(dedupe)
        self._keys: set[str] = set()

    def observe(self, group: Group) -> None:
        for attempt in group.attempts:
            if said := conversation(attempt):
                self._keys |= keys_of(said.messages)

    def rows(self, group: Group) -> Iterator[Row]:
        if group.unreadable or len(group.attempts) != 2:
            self.left_out["unreadable"] += 1
            return
        rejected, chosen = sorted(group.attempts, key=lambda attempt: attempt.record.reward or 0.0)
        better, worse = conversation(chosen), conversation(rejected)
        if better is None or worse is None:
            self.left_out["not text"] += 1
            return
        reason = _unfit(better, worse)
        if reason:
            self.left_out[reason] += 1
        elif self._duplicates.repeats((better.messages, worse.messages, better.tools)):
            self.left_out["duplicate"] += 1
        else:
            yield self._row(chosen, rejected, better, worse)

    def _row(self, chosen: Attempt, rejected: Attempt, better: Conversation, worse: Conversation) -> Row:
        shared = split_pair(better.messages, worse.messages)
        return {
            "prompt": filled(better.messages[:shared], self._keys),
            "chosen": filled(better.messages[shared:], self._keys),
            "rejected": filled(worse.messages[shared:], self._keys),
            "tools": better.tools,
            "chosen_reward": chosen.record.reward,
            "rejected_reward": rejected.record.reward,
            **ids(chosen),
            "chosen_rollout_id": chosen.record.rollout,
            "rejected_rollout_id": rejected.record.rollout,
        }

    def schema(self) -> pa.Schema:
        messages = messages_type(self._keys)
        return pa.schema(
            [
                *((name, messages) for name in ("prompt", "chosen", "rejected")),
                ("tools", pa.string()),
                ("chosen_reward", pa.float64()),
                ("rejected_reward", pa.float64()),
                *IDS,
                ("chosen_rollout_id", pa.string()),
                ("rejected_rollout_id", pa.string()),
            ]
        )


def _unfit(better: Conversation, worse: Conversation) -> str:
    """Why two transcripts make no pair, or nothing."""
    if better.messages == worse.messages:
        return "same answer"
    if better.tools != worse.tools:
        return "other tools"
    return "" if split_pair(better.messages, worse.messages) else "no shared prompt"
