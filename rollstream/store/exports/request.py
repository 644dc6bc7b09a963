"""What is to be exported: checked as a whole before anything is read."""

import math
import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from rollstream.errors import UsageError

Format = Literal["sft", "dpo", "grpo", "atif"]
FileFormat = Literal["parquet", "jsonl"]

_SPLIT_NAME = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Splits:
    """Named parts of a data set, and which task belongs to which.

    A task is placed by the hash of its id alone: it stands in the same part in every run, epoch, format and export.
    """

    shares: tuple[tuple[str, float], ...] = (("train", 1.0),)
    """They add up to 1."""
    seed: str = ""
    """Another seed is another way to divide."""

    @classmethod
    def parse(cls, text: str, seed: str = "") -> "Splits":
        """Splits of `train=0.9,test=0.1`.

        Raises:
            UsageError: not of that form, a name twice, or shares that do not add up to 1.
        """
        shares: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            share = _share(value)
            if not _SPLIT_NAME.fullmatch(name) or share is None or name in shares:
                raise UsageError(f"--split expects shares like train=0.9,test=0.1, found {part.strip()!r} in {text!r}")
            shares[name] = share
        if not math.isclose(total := math.fsum(shares.values()), 1.0, abs_tol=1e-9):
            raise UsageError(f"--split expects shares that add up to 1, found {total:g} in {text!r}")
        return cls(tuple(shares.items()), seed)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shares)

    def of(self, task: str) -> str:
        """The part that `task` belongs to."""
        place = int.from_bytes(sha256(f"{self.seed}\0{task}".encode()).digest()[:8]) / 2**64
        below = 0.0
        for name, share in self.shares:
            below += share
            if place < below:
                return name
        return self.shares[-1][0]


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What goes into an export, and in which form."""

    runs: tuple[str, ...]
    format: Format
    file_format: FileFormat = "parquet"
    where: str | None = None
    """A condition in SQL over the columns of the view `rollouts`."""
    min_reward: float | None = None
    margin: float = 0.0
    """DPO: the least difference of rewards of a pair; equal rewards never make one."""
    dedupe: bool = False
    splits: Splits = field(default_factory=Splits)

    def __post_init__(self) -> None:
        """Refuse what does not go together.

        Raises:
            UsageError: with the reason.
        """
        if self.format == "atif" and self.file_format == "parquet":
            raise UsageError("--format atif writes JSON documents, which have no columns: expected --jsonl, found --parquet")
        if self.format == "grpo" and (self.min_reward is not None or self.dedupe):
            option = "--min-reward" if self.min_reward is not None else "--dedupe"
            raise UsageError(f"--format grpo exports whole groups, whose baseline {option} would shift; leave it out")
        if self.format != "dpo" and self.margin:
            raise UsageError(f"--margin is between the two attempts of a pair: expected --format dpo, found {self.format}")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise UsageError(f"--margin expects a number from 0, found {self.margin:g}")
        if self.min_reward is not None and not math.isfinite(self.min_reward):
            raise UsageError(f"--min-reward expects a finite number, found {self.min_reward:g}")
