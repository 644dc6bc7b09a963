"""Failure x attempt -> wait so long and try again, or give up. Pure: no clock, no I/O.

The delay grows exponentially and is spread by a jitter that depends on the rollout alone, so that planning the same failure
twice (a record redelivered after a crash) gives the same answer.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.failure import ErrorInfo


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often and how patiently one kind of failure is tried again.

    Attributes:
        attempts: how often the stage may run in all; 1 means never again.
        first_s: delay after the first failure.
        factor: growth of the delay from one failure to the next.
        most_s: longest delay.
    """

    attempts: int
    first_s: float = 1.0
    factor: float = 3.0
    most_s: float = 300.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`by_kind` is looked up first, then `by_stage`, then `default`."""

    default: Backoff
    by_stage: Mapping[str, Backoff] = field(default_factory=dict)
    by_kind: Mapping[str, Backoff] = field(default_factory=dict)

    def backoff(self, error: ErrorInfo) -> Backoff:
        return self.by_kind.get(error.kind) or self.by_stage.get(error.stage) or self.default


def plan(policy: RetryPolicy, error: ErrorInfo, failures: int, rollout: str) -> float | None:
    """How long to wait before the next try, in seconds; None to give up.

    Args:
        failures: how often this stage of this rollout has failed, this time included; from 1.
    """
    backoff = policy.backoff(error)
    if not error.retryable or failures >= backoff.attempts:
        return None
    try:
        delay_s = backoff.first_s * backoff.factor ** (failures - 1)
    except OverflowError:
        delay_s = backoff.most_s
    return min(delay_s, backoff.most_s) * _jitter(rollout, failures)


def _jitter(rollout: str, failures: int) -> float:
    """Between 0.5 and 1.5, evenly spread over rollouts."""
    digest = hashlib.blake2b(f"{rollout}/{failures}".encode(), digest_size=4).digest()
    return 0.5 + int.from_bytes(digest, "big") / 2**32
