"""Which worker processes to run, when they are ready, and when one that died is started again. No I/O."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream.errors import UsageError
from rollstream.settings import DEFAULT_POOL

WORKERS = ("env_worker", "agent_worker", "verifier_worker", "store_worker")
SINGLE = frozenset({"store_worker"})
"""Workers of which one at most may run: the store has one writer."""


FAILED_STARTS_ALLOWED = 5
SETTLED_S = 10.0
"""A process that died younger than this, died at its start, ready or not."""
MAX_DELAY_S = 15.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to keep alive, and the workers in it."""

    name: str
    workers: tuple[str, ...]


def pool_suffix(pool: str) -> str:
    """What the files of a pool have in their names, so that several can share a data directory."""
    return "" if pool == DEFAULT_POOL else f".{pool}"


def workers_of(pool: str, named: Sequence[str] = ()) -> tuple[str, ...]:
    """The workers that were named, or else all that a pool can have.

    Raises:
        UsageError: one of those that were named belongs to no pool but the default one.
    """
    if pool == DEFAULT_POOL:
        return tuple(dict.fromkeys(named or WORKERS))
    for name in SINGLE.intersection(named):
        raise UsageError(f"{name} reads what all pools write: start it without --pool, found it for pool {pool}")
    return tuple(dict.fromkeys(named or [name for name in WORKERS if name not in SINGLE]))


def plan(
    workers: Sequence[str],
    *,
    processes: bool = False,
    replicas: Mapping[str, int] | None = None,
    pool: str = DEFAULT_POOL,
) -> list[ProcessSpec]:
    """Which processes to run: one for everything, or one for each worker and replica.

    Args:
        replicas: worker -> number of processes; naming any implies a process for each worker.
        pool: which one they serve.

    Raises:
        UsageError: a worker is unknown, not among `workers`, cannot have that many replicas, or belongs to no such pool.
    """
    wanted = list(workers_of(pool, workers))
    counts = dict(replicas or {})
    suffix = pool_suffix(pool)
    for name in [*wanted, *counts]:
        if name not in WORKERS:
            raise UsageError(f"no worker is named {name!r}; known: {', '.join(WORKERS)}")
    for name, count in counts.items():
        if name not in wanted:
            raise UsageError(f"replicas of {name} were asked for, but it is not among the workers {', '.join(wanted)}")
        if count < 1:
            raise UsageError(f"replicas of {name}: expected 1 or more, found {count}")
        if name in SINGLE and count > 1:
            raise UsageError(f"{name} runs once only, because the store has one writer; found {count} replicas")
    if not processes and not counts:
        return [ProcessSpec(("workers" if len(wanted) > 1 else wanted[0]) + suffix, tuple(wanted))]
    return [
        ProcessSpec(f"{name}{suffix}" if number == 1 else f"{name}{suffix}-{number}", (name,))
        for name in wanted
        for number in range(1, counts.get(name, 1) + 1)
    ]


@dataclass(slots=True)
class Restarts:
    """When a process that keeps dying is started again, if at all. Pure."""

    failed_starts: int = 0
    """In a row."""

    def after_death(self, *, was_ready: bool, lived_s: float) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        if was_ready and lived_s >= SETTLED_S:
            self.failed_starts = 0
            return 0.0
        self.failed_starts += 1
        if self.failed_starts >= FAILED_STARTS_ALLOWED:
            return None
        return float(min(MAX_DELAY_S, 0.5 * 2 ** (self.failed_starts - 1)))


def ready_worker(line: bytes) -> str | None:
    """The worker that a log line says is ready, or None for any other line."""
    if not line.startswith(b"{") or b'"ready"' not in line:
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    worker = entry.get("worker") if entry.get("event") == "ready" else None
    return worker if isinstance(worker, str) else None
