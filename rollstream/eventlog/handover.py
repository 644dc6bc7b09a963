"""Where a new pool begins: exactly where the default pool ceased to do its work.

Until somebody first runs with a pool declared, the default pool did all of its work, so the pool must not do it again; from
then on the default pool passes over it, so the pool must not miss any. Hence whoever comes first, of either pool, writes down
what the default pool had done by then as what the new pool has done.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from rollstream.cancelling import ended
from rollstream.errors import BrokerUnavailable
from rollstream.eventlog.commits import Commit
from rollstream.eventlog.offsets import NO_MEMBER, Membership

log = logging.getLogger(__name__)

READ_S = 15.0
KEEP_S = 6 * 3600.0
"""A broker forgets what a group without members has committed, by default after seven days."""


class Offsets(Protocol):
    """What is needed of `GroupOffsets`."""

    async def read(self, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Commit]: ...

    async def commit(self, group: str, membership: Membership, commits: Mapping[TopicPartition, Commit]) -> None: ...


@dataclass(frozen=True, slots=True)
class Handover:
    """One topic that one worker role reads, and the consumer groups of the pools between which its records are shared out.

    Attributes:
        default: the default pool's group.
        pools: the groups of the declared ones.
    """

    default: str
    pools: Sequence[str]
    partitions: Sequence[TopicPartition]

    async def mark(self, offsets: Offsets) -> None:
        """Make sure that every pool has a beginning. Call it before this process consumes.

        Raises:
            BrokerUnavailable: the groups cannot be read, so it cannot be known where to begin.
        """
        # The default pool first: whoever passes over a pool's work has marked its beginning before. So as long as there is
        # none, what is read here was done and not passed over.
        done = await _read(offsets, self.default, self.partitions)
        for pool in self.pools:
            found = await _read(offsets, pool, self.partitions)
            if missing := {tp: beginning(done[tp]) for tp, commit in found.items() if commit.offset < 0}:
                await self._begin(offsets, pool, missing)

    async def _begin(self, offsets: Offsets, pool: str, missing: Mapping[TopicPartition, Commit]) -> None:
        try:
            await offsets.commit(pool, NO_MEMBER, missing)
            log.info("group %s begins where %s stands", pool, self.default)
        except KafkaError as error:
            # A group with members takes no commit of a stranger's: they have marked its beginning themselves.
            if any(commit.offset < 0 for commit in (await _read(offsets, pool, self.partitions)).values()):
                raise BrokerUnavailable(f"cannot say where group {pool} begins: {error!r}") from None

    async def keep(self, offsets: Offsets) -> None:
        """Let the broker not forget where pools stand that nobody serves: commit once more what they have committed.

        Of a pool that begins to be served meanwhile, the broker refuses it, or it costs some work that is done twice.
        """
        for pool in self.pools:
            with suppress(KafkaError, OSError, BrokerUnavailable):
                found = await _read(offsets, pool, self.partitions)
                if begun := {tp: commit for tp, commit in found.items() if commit.offset >= 0}:
                    await offsets.commit(pool, NO_MEMBER, begun)


def beginning(default: Commit) -> Commit:
    """What a pool has done when it begins, given what the default pool has committed by then."""
    return default if default.offset >= 0 else Commit(0, "")


class Places:
    """Where the pools stand on all that one worker reads: marked before it consumes, and kept while the default pool runs.

    Args:
        keeping: whether this worker is the default pool's, which repeats the places of pools that nobody serves.
        broke: told of a failure that nothing here can handle.
    """

    def __init__(self, handovers: Sequence[Handover], *, keeping: bool, broke: Callable[[BaseException], None]) -> None:
        self._handovers = handovers
        self._keeping = keeping
        self._broke = broke
        self._task: asyncio.Task[None] | None = None

    async def start(self, offsets: Offsets) -> None:
        """Mark where pools begin that never ran.

        Raises:
            BrokerUnavailable: the groups cannot be read.
        """
        for handover in self._handovers:
            await handover.mark(offsets)
        if self._handovers and self._keeping:
            self._task = asyncio.create_task(self._keep(offsets))
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        await ended(self._task)

    async def _keep(self, offsets: Offsets) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            for handover in self._handovers:
                await handover.keep(offsets)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._broke(error)


async def _read(offsets: Offsets, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Commit]:
    """The commits of all partitions; a coordinator that is still loading says less, and is asked again."""
    found: dict[TopicPartition, Commit] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_S):
            while True:
                with suppress(KafkaError, OSError):
                    found = await offsets.read(group, partitions)
                if found.keys() >= set(partitions):
                    return found
                await asyncio.sleep(0.1)
    raise BrokerUnavailable(f"the broker does not say what group {group} has committed")
