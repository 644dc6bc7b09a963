"""What people do to runs while they go on: cancel, resume, repair. The decisions here are pure; the commands do the I/O."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollstream.ledger import Ledger, Session
from schemas.envelope import SessionIds

Wanted = dict[str, tuple[SessionIds, Session]]
"""Rollout -> its ids, and the round and try of the session to open."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What resuming a run does to its attempts."""

    wanted: Wanted
    under_way: int
    """Attempts that were driven again already, and have not ended since."""


def resumption(ledger: Ledger, statuses: Collection[str], only: Collection[str] | None = None) -> Resumption:
    """Attempts whose record that counts has one of `statuses`, each in a new round; those that were scored stay as they are.

    Args:
        only: rollouts to choose from; None means all.
    """
    counting = ledger.counting()
    wanted: Wanted = {}
    under_way = 0
    for ids in ledger.attempts():
        record = counting.get(ids.rollout)
        if record is None or record.status not in statuses or (only is not None and ids.rollout not in only):
            continue
        if ids.round > record.round:
            under_way += 1
        else:
            wanted[ids.rollout] = ids, (record.round + 1, 0)
    return Resumption(wanted, under_way)


@dataclass(frozen=True, slots=True)
class Repair:
    """What repairing a run does to the attempts that have not ended."""

    wanted: Wanted
    under_way: int
    """Attempts that a worker still has before it: they are late, not lost."""


def repair(ledger: Ledger) -> Repair:
    """Attempts that have not ended and that no worker has before it, each in another try; without a session, in its first."""
    ended = ledger.counting()
    missing = [ids for ids in ledger.attempts() if ids.rollout not in ended]
    lost = [ids for ids in missing if not ledger.is_under_way(ids)]
    wanted = {ids.rollout: (ids, (ids.round, ids.try_ + 1 if ids.rollout in ledger.opened else 0)) for ids in lost}
    return Repair(wanted, len(missing) - len(lost))


def batches(attempts: Iterator[SessionIds], size: int) -> Iterator[list[SessionIds]]:
    batch: list[SessionIds] = []
    for ids in attempts:
        batch.append(ids)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
