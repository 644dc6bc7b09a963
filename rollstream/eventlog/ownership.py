"""Which partitions are this worker's, as which member of the group, and what of them is finished and committed.

Rebalances are eager: everything is revoked, then the new set is assigned, and what was kept goes on as if nothing had happened.
A member that stood still, or that the group threw out, takes no record before it has joined anew.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalGenerationError, KafkaError, UnknownMemberIdError

from rollstream.errors import RollstreamError
from rollstream.eventlog.commits import SOFT_LIMIT, Commit, Progress, decode_done
from rollstream.eventlog.offsets import GroupOffsets, Membership
from rollstream.health import LaneHealth

log = logging.getLogger(__name__)

STUCK_S = 300.0
"""A rebalance that has not ended by then never will: better a new process."""
COMMIT_S = 5.0
"""How long one commit may take before it is given up, to be made again. Under any session timeout, see `was_frozen`."""
READ_SAVED_S = 5.0
"""How long to try to read what is finished. No heartbeat is sent meanwhile, so it must stay under any session timeout."""
FIND_LOG_S = 2.0
"""How long intake may be held up to ask where a log begins and ends, or to wait for an assignment; then it is tried again."""


class WorkerStuck(RollstreamError):
    """The consumer group does not let this worker go on."""


class LogLost(RollstreamError):
    """A log ends before what was read of it: what comes would be taken for what is done."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Partitions that a subscriber owns from now on, by number.

    Attributes:
        marks: partition -> offset of its oldest unfinished record; None where nothing was ever committed.
        gained: those that others may have worked on since this subscriber last did, if it ever did.
    """

    marks: Mapping[int, int | None]
    gained: frozenset[int]


class Ownership:
    """The partitions of one subscriber.

    Attributes:
        parts: what is known of each partition that is owned.
        membership: as what they are held; None while the group has thrown this worker out.
        opened: set while records may be taken.
        rebalances: how many have begun; whoever awaits something looks whether it has changed.
        crowded: partitions whose finished set is about to outgrow the metadata: nothing more is fetched of them.
    """

    def __init__(
        self,
        group: str,
        consumer: Callable[[], "AIOKafkaConsumer[Any, Any]"],
        offsets: Callable[[], GroupOffsets],
        *,
        session_timeout_s: float,
        uncrowded: Callable[[], None],
        assigned: Callable[[Assignment], None] | None = None,
    ) -> None:
        self.parts: dict[TopicPartition, Progress] = {}
        self.membership: Membership | None = None
        self.opened = asyncio.Event()
        self.rebalances = 0
        self.crowded: set[TopicPartition] = set()
        self._group = group
        self._consumer = consumer
        self._offsets = offsets
        self._session_timeout_s = session_timeout_s
        self._uncrowded = uncrowded
        self._assigned = assigned
        self._early: dict[TopicPartition, int] = {}
        self._closed_at = time.monotonic()
        self._alive_at = time.monotonic()
        self._commit_lock = asyncio.Lock()
        self._commits_fail = False

    @property
    def generation(self) -> int:
        """Of the group, under which the partitions are held; 0 before the first assignment."""
        return self.membership.generation if self.membership is not None else 0

    def health(self, in_flight: int) -> LaneHealth:
        """What is held at the moment, and since when; `in_flight` records of it are being handled."""
        parts = self.parts.values()
        return LaneHealth(
            group=self._group,
            partitions=len(parts),
            in_flight=in_flight,
            span=max((progress.span for progress in parts), default=0),
            mark_age_s=max((progress.mark_age_s for progress in parts), default=0.0),
            commit_age_s=max((progress.commit_age_s for progress in parts), default=0.0),
            out_for_s=0.0 if self.opened.is_set() else time.monotonic() - self._closed_at,
        )

    # Membership.

    def started(self) -> None:
        """The consumer has been started; until now no time has passed for it."""
        self._alive_at = time.monotonic()

    def may_take(self, partition: TopicPartition, offset: int) -> bool:
        """Whether a record that was fetched may be taken. If not, it is fetched again after the next assignment."""
        if not self.was_frozen() and self.opened.is_set() and self._is_member():
            return True
        # aiokafka delivers before on_partitions_assigned has returned, and what it had fetched before the worker was thrown
        # out of the group: drop, and seek back when it returns.
        self._early[partition] = min(self._early.get(partition, offset), offset)
        return False

    def was_frozen(self) -> bool:
        """Whether this process stood still for so long that others have its partitions by now; then it asks to join anew."""
        stood_still_s = time.monotonic() - self._alive_at
        self._alive_at += stood_still_s
        if stood_still_s < self._session_timeout_s:
            return False
        log.warning("stood still for %.1f s, joining group %s anew", stood_still_s, self._group)
        self._join_anew()
        return True

    async def known(self) -> None:
        """Return once it is known which partitions are this worker's: at once, unless a rebalance is under way."""
        self.was_frozen()
        await self.opened.wait()

    def watch(self) -> None:
        """A member whose coordination ended, or that is stuck between two generations, looks alive and does nothing.

        Raises:
            WorkerStuck: it is one.
        """
        coordination = self._consumer()._coordinator._coordination_task
        if coordination.done():
            cause = None if coordination.cancelled() else coordination.exception()
            raise WorkerStuck(f"the membership in group {self._group} has ended: {cause!r}")
        if self.opened.is_set():
            self._closed_at = time.monotonic()
        elif time.monotonic() - self._closed_at > STUCK_S:
            raise WorkerStuck(f"no rebalance of group {self._group} has ended for {STUCK_S:g} s")

    def _is_member(self) -> bool:
        return self.membership is not None and self.membership.generation == self._consumer()._coordinator.generation

    def _join_anew(self) -> None:
        self.opened.clear()
        self._consumer()._coordinator.request_rejoin()

    # Commits.

    async def commit_or_warn(self) -> None:
        """Commit what has changed; a failure is told once, because the next commit says it all again."""
        try:
            await self.commit()
        except (KafkaError, TimeoutError, OSError) as error:
            if not self._commits_fail:
                log.warning("commits of group %s fail, and are repeated: %r", self._group, error)
            self._commits_fail = True

    async def commit(self) -> None:
        """Commit what has changed, during a rebalance too: see `offsets`.

        Raises:
            KafkaError, TimeoutError, OSError: the broker failed.
        """
        async with asyncio.timeout(COMMIT_S), self._commit_lock:
            commits, membership = self._changed(), self.membership
            if not commits or membership is None:
                return
            try:
                await self._offsets().commit(self._group, membership, commits)
            except (IllegalGenerationError, UnknownMemberIdError):
                self._thrown_out(membership)
                return
            self._commits_fail = False
            for partition, commit in commits.items():
                if partition in self.parts and membership == self.membership:
                    self.parts[partition].committed = commit

    def _thrown_out(self, membership: Membership) -> None:
        """The group has gone on without this member: nothing can be committed before it has joined anew."""
        if membership != self.membership:
            return
        self.membership = None
        if self.opened.is_set():
            self._join_anew()

    def _changed(self) -> dict[TopicPartition, Commit]:
        """Offset and metadata of each partition, computed in one step without awaiting."""
        commits = {}
        for partition, progress in self.parts.items():
            commit = progress.next_commit()
            if commit is None:
                continue
            self._pause_if_crowded(partition, commit)
            if commit != progress.committed:
                commits[partition] = commit
        return commits

    def _pause_if_crowded(self, partition: TopicPartition, commit: Commit) -> None:
        if not self.opened.is_set():
            return
        crowded = len(commit.metadata) > SOFT_LIMIT
        if crowded and partition not in self.crowded:
            self.crowded.add(partition)
            self._consumer().pause(partition)
        elif not crowded and partition in self.crowded:
            self.crowded.discard(partition)
            self._uncrowded()

    # Logs that are cut.

    async def find(self, partition: TopicPartition, offset: int | None) -> None:
        """Go on at the start of a log that does not have the offset to be fetched, and say which records are gone.

        Those that run go on, and hold the mark as ever: a commit passes over nothing but what is done or gone.

        Args:
            offset: what was to be fetched; None where nothing was ever committed.

        Raises:
            LogLost: the log ends before it.
            KafkaError, TimeoutError: the broker does not say. Nothing has changed, and the next fetch asks again.
        """
        consumer = self._consumer()
        async with asyncio.timeout(FIND_LOG_S):
            if not self.opened.is_set():
                # What there is to fetch is known once the assignment has been taken over.
                await self.opened.wait()
                return
            rebalances = self.rebalances
            starts = await consumer.beginning_offsets([partition])
            ends = await consumer.end_offsets([partition])
        progress = self.parts.get(partition)
        if rebalances != self.rebalances or not self.opened.is_set() or progress is None:
            return
        start, end = starts[partition], ends[partition]
        if offset is None:
            consumer.seek(partition, start)
        elif offset > end:
            raise LogLost(
                f"topic {partition.topic}: partition {partition.partition} ends at {end}, before offset {offset} that is to be "
                "read: it was made anew or has lost its end; the worker ends, and one that starts begins with the log as it is"
            )
        elif offset < start:
            gone = progress.cut(offset, start)
            consumer.seek(partition, start)
            log.warning(
                "%s/%d: the log was cut and begins at %d now; never handled and gone: offsets %s",
                partition.topic,
                partition.partition,
                start,
                ", ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in gone) or "none",
            )

    # Rebalances.

    async def revoked(self) -> None:
        """Take nothing more, and commit once; whatever runs goes on, because most partitions come back."""
        self.rebalances += 1
        self._early = {}
        self.opened.clear()
        with contextlib.suppress(KafkaError, TimeoutError, OSError):
            async with asyncio.timeout(3):
                await self.commit()

    def let_go(self, assigned: set[TopicPartition]) -> set[TopicPartition]:
        """Forget, and return, the partitions that are not assigned any more."""
        lost = self.parts.keys() - assigned
        for partition in lost:
            del self.parts[partition]
        return lost

    async def take_over(self, assigned: set[TopicPartition]) -> dict[TopicPartition, set[int]]:
        """Learn what others have finished, and take records again.

        Returns:
            Offsets that run here and that others have finished.
        """
        held = set(self.parts)
        saved = await self._saved(assigned)
        finished = {partition: self._learn(partition, *saved.get(partition, (None, set()))) for partition in assigned}
        # No await from here on: intake must see either the old state or the new one.
        consumer = self._consumer()
        for partition, progress in self.parts.items():
            position = progress.position if progress.position is not None else self._early.get(partition)
            if position is not None:
                consumer.seek(partition, position)
        self._early = {}
        self.crowded = set()
        before, generation = self.membership, consumer._coordinator.generation
        self.membership = Membership(generation, consumer._coordinator.member_id)
        if self._assigned is not None:
            # Between two generations that follow one another nobody else can have owned what this member had.
            kept = held if before is not None and generation == before.generation + 1 else set()
            marks = {partition.partition: progress.mark for partition, progress in self.parts.items()}
            self._assigned(Assignment(marks, frozenset(tp.partition for tp in assigned - kept)))
        self.opened.set()
        return finished

    def _learn(self, partition: TopicPartition, base: int | None, done: set[int]) -> set[int]:
        progress = self.parts.get(partition)
        if progress is not None:
            return progress.merge(base, done)
        self.parts[partition] = Progress(base, done)
        return set()

    async def _saved(self, assigned: set[TopicPartition]) -> dict[TopicPartition, tuple[int, set[int]]]:
        """Committed offsets and finished sets. A failed read means records run again, never that they are skipped."""
        found: dict[TopicPartition, Commit] = {}
        try:
            async with asyncio.timeout(READ_SAVED_S):
                while missing := assigned - found.keys():
                    with contextlib.suppress(KafkaError, OSError):
                        found |= await self._offsets().read(self._group, missing)
                    # Nothing, or not all, is what a coordinator says that is still loading.
                    await asyncio.sleep(0.0 if found.keys() >= assigned else 0.1)
        except TimeoutError:
            log.error("cannot read what is finished, records of %s may run again", self._group)
        return {
            partition: (commit.offset, decode_done(commit.offset, commit.metadata))
            for partition, commit in found.items()
            if commit.offset >= 0
        }
