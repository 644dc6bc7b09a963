"""GRPO: one row a sequence of an attempt, whole groups only.

Attempts that failed or were cancelled are rows too, with `reward` null and `mask_loss` true: a trainer that gets a group gets
all of it. An attempt whose tokens were not captured has one row without token columns.
"""

import base64
import binascii
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import pyarrow as pa
import zstandard

from rollstream.store.exports.messages import Conversation, filled, keys_of, messages_type
from rollstream.store.exports.rows import IDS, Row, conversation, ids
from rollstream.store.exports.selection import Attempt, Group
from schemas.episode import Sequence

MAX_SEQUENCE_BYTES = 256 * 1024 * 1024
"""Of one unpacked array; a longer one is not unpacked."""


class UnreadableTokens(ValueError):
    """A captured sequence that contradicts itself."""


class GrpoRows:
    """Token columns, reward and mask; `messages` and `tools` stand in an attempt's first row."""

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self._keys: set[str] = set()

    def observe(self, group: Group) -> None:
        for attempt in group.attempts:
            if said := conversation(attempt):
                self._keys |= keys_of(said.messages)

    def rows(self, group: Group) -> Iterator[Row]:
        try:
            tokens = [[_columns(attempt, sequence) for sequence in attempt.record.sequences] for attempt in group.attempts]
        except UnreadableTokens:
            self.left_out["group with unreadable tokens"] += 1
            return
        if group.unreadable:
            self.left_out["group with an unreadable attempt"] += 1
            return
        for attempt, sequences in zip(group.attempts, tokens, strict=True):
            for number, columns in enumerate(sequences or [_NO_TOKENS]):
                yield self._row(attempt, number, columns)

    def _row(self, attempt: Attempt, number: int, columns: Row) -> Row:
        record = attempt.record
        # Beside tokens, a transcript that is not all text is no loss.
        said: Conversation | None = conversation(attempt) if number == 0 else None
        return {
            **ids(attempt),
            "index": record.group.index,
            "group_size": record.group.size,
            "rollout_id": record.rollout,
            "sequence": number,
            **columns,
            "reward": record.reward,
            "success": record.success,
            "mask_loss": record.mask.loss,
            "mask_baseline": record.mask.baseline,
            "status": record.status,
            "messages": filled(said.messages, self._keys) if said else None,
            "tools": said.tools if said else None,
        }

    def schema(self) -> pa.Schema:
        return pa.schema(
            [
                *IDS,
                ("index", pa.int32()),
                ("group_size", pa.int32()),
                ("rollout_id", pa.string()),
                ("sequence", pa.int32()),
                ("input_ids", pa.list_(pa.int32())),
                ("loss_mask", pa.list_(pa.int8())),
                ("logprobs", pa.list_(pa.float32())),
                ("versions", pa.list_(pa.string())),
                ("reward", pa.float64()),
                ("success", pa.bool_()),
                ("mask_loss", pa.bool_()),
                ("mask_baseline", pa.bool_()),
                ("status", pa.string()),
                ("messages", messages_type(self._keys)),
                ("tools", pa.string()),
            ]
        )


_NO_TOKENS: Row = {"input_ids": None, "loss_mask": None, "logprobs": None, "versions": None}


def _columns(attempt: Attempt, sequence: Sequence) -> Row:
    """The token columns of one sequence: what was sampled has loss_mask 1, and the policy version that sampled it."""
    tokens = unpack(sequence.token_ids, "i")
    logprobs = unpack(sequence.logprobs, "f") if sequence.logprobs is not None else None
    if logprobs is not None and len(logprobs) != len(tokens):
        raise UnreadableTokens
    mask = [0] * len(tokens)
    versions: list[str | None] = [None] * len(tokens)
    calls = attempt.record.calls
    for start, end, call in sequence.spans:
        if not (0 <= start <= end <= len(tokens) and 0 <= call < len(calls)):
            raise UnreadableTokens
        mask[start:end] = [1] * (end - start)
        versions[start:end] = [calls[call].policy_version] * (end - start)
    return {"input_ids": tokens, "loss_mask": mask, "logprobs": logprobs, "versions": versions}


def unpack(packed: str, type_code: Literal["i", "f"]) -> list[int] | list[float]:
    """A packed array (see `schemas.episode.Sequence`) of 32-bit integers or floats.

    Raises:
        UnreadableTokens: it is no such array.
    """
    values: array[int] | array[float] = array(type_code)
    try:
        raw = base64.b64decode(packed, validate=True)
        if zstandard.frame_content_size(raw) > MAX_SEQUENCE_BYTES:
            raise UnreadableTokens
        values.frombytes(zstandard.ZstdDecompressor().decompress(raw, max_output_size=MAX_SEQUENCE_BYTES))
    except (binascii.Error, zstandard.ZstdError, ValueError) as error:
        raise UnreadableTokens from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
