"""Boxes that nobody holds any more: which ones (pure), and removing them (a thin driver).

A box is reaped if it belongs to this installation and this host, and its lease has run out or its session has another under a
higher fence. Whatever else is found is somebody's, and stays.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from rollstream.cancelling import shielded
from rollstream.errors import BoundaryFailure, UsageError
from rollstream.sandboxes.leases import EventSink
from rollstream.sandboxes.protocol import FoundSandbox, SandboxProvider, SandboxTag
from schemas.envelope import Event, now
from schemas.sandbox import ReleasedHow, SandboxHolder, SandboxLeased, SandboxReleased

log = logging.getLogger(__name__)

AT_ONCE = 16
BEFORE_CREATION = timedelta(minutes=5)
"""How much earlier than its creation a box's lease is looked for: the engine's clock and ours may differ."""

ReadLeases = Callable[[datetime], Awaitable[Iterable[Event]]]
"""Events of `sandboxes.leases` since a time."""


class LeaseBook:
    """What the log says of leases. Takes events in any order, and more than once."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._expires: dict[str, datetime] = {}
        self._holders: dict[str, tuple[datetime, SandboxHolder]] = {}
        self._fences: dict[tuple[str, str], int] = {}
        for event in events:
            if isinstance(event, SandboxLeased):
                self._expires[event.sandbox] = max(event.expires_at, self._expires.get(event.sandbox, event.expires_at))
                since, _ = self._holders.get(event.sandbox, (event.occurred_at, None))
                if event.occurred_at >= since:
                    self._holders[event.sandbox] = event.occurred_at, event.holder
                self.learn_fence(event.holder)

    def holder_of(self, box: FoundSandbox) -> SandboxHolder:
        """Who has it: what the box itself says is who started it."""
        return self._holders.get(box.id, (None, box.tag.holder))[1]

    def learn_fence(self, holder: SandboxHolder) -> None:
        if holder.session is not None and holder.consumer_group is not None and holder.fence is not None:
            key = holder.session, holder.consumer_group
            self._fences[key] = max(holder.fence, self._fences.get(key, holder.fence))

    def expires_at(self, box: FoundSandbox) -> datetime:
        """When its last lease runs out; what the box itself says is the first."""
        return max(box.tag.expires_at, self._expires.get(box.id, box.tag.expires_at))

    def fenced(self, holder: SandboxHolder) -> bool:
        """Whether its session has been taken over, by another worker of the same group."""
        if holder.session is None or holder.consumer_group is None or holder.fence is None:
            return False
        return self._fences.get((holder.session, holder.consumer_group), holder.fence) > holder.fence


@dataclass(frozen=True, slots=True)
class Surveyed:
    """One box that was found, and what is to become of it."""

    box: FoundSandbox
    holder: SandboxHolder
    expires_at: datetime
    own: bool
    """Of this installation and host."""
    reap: ReleasedHow | None
    """Why it is to be reaped; None leaves it."""


def survey(
    found: Iterable[FoundSandbox], book: LeaseBook, *, installation: str, host: str, at: datetime, force: bool = False
) -> list[Surveyed]:
    """Judge every box. `force` reaps all of one's own, held or not."""
    boxes = list(found)
    own = {box.id for box in boxes if is_own(box.tag, installation, host)}
    for box in boxes:
        if box.id in own:
            book.learn_fence(box.tag.holder)
    judged = []
    for box in boxes:
        expires_at = book.expires_at(box)
        reap: ReleasedHow | None = None
        if box.id in own:
            if book.fenced(book.holder_of(box)):
                reap = "fenced"
            elif expires_at <= at:
                reap = "expired"
            elif force:
                reap = "forced"
        judged.append(Surveyed(box, book.holder_of(box), expires_at, box.id in own, reap))
    return judged


def is_own(tag: SandboxTag, installation: str, host: str) -> bool:
    return tag.installation == installation and tag.host == host


@dataclass(frozen=True, slots=True)
class Reaper:
    """Removes what nobody holds, on one provider's host. Any worker of the installation may run one, several at once too."""

    provider: SandboxProvider
    read_leases: ReadLeases
    sink: EventSink
    installation: str
    by: str

    async def survey(self, *, force: bool = False) -> list[Surveyed]:
        """Every box on the host, judged. The log is read only if there is a box of our own, and only from its time on.

        Raises:
            SandboxUnavailable: the provider's engine does not answer.
            BrokerUnavailable: the log does not.
        """
        # From before the log is read: reading takes its time, and what is renewed meanwhile may not be seen.
        at = now()
        host = await self.provider.host()
        found = await self.provider.found()
        own = [box.created_at for box in found if is_own(box.tag, self.installation, host)]
        book = LeaseBook(await self.read_leases(min(own) - BEFORE_CREATION) if own else ())
        return survey(found, book, installation=self.installation, host=host, at=at, force=force)

    async def reap(self, *, force: bool = False) -> list[Surveyed]:
        """Remove what is to be reaped, and say so to the log.

        Returns:
            What was removed.

        Raises: as `survey`; a box that cannot be removed stays for the next time, and the first such failure is raised.
        """
        due = [judged for judged in await self.survey(force=force) if judged.reap is not None]
        await self._remove(due)
        return due

    async def fence_off(self, holder: SandboxHolder) -> list[str]:
        """Remove at once what lower fences of a session have left on this host, rather than when it is next looked for.

        Returns:
            The ids of the boxes that were removed.

        Raises:
            SandboxUnavailable: the provider's engine does not answer.
        """
        host = await self.provider.host()
        found = [box for box in await self.provider.found() if is_own(box.tag, self.installation, host)]
        # Of one that waited for a session the log alone says which it got.
        nobodys = [box.created_at for box in found if box.tag.holder.session is None]
        book = LeaseBook(await self.read_leases(min(nobodys) - BEFORE_CREATION) if nobodys else ())
        book.learn_fence(holder)
        due = [
            Surveyed(box, book.holder_of(box), book.expires_at(box), own=True, reap="fenced")
            for box in found
            if book.holder_of(box).session == holder.session and book.fenced(book.holder_of(box))
        ]
        await self._remove(due)
        return [judged.box.id for judged in due]

    async def _remove(self, due: Iterable[Surveyed]) -> None:
        """Remove boxes, and say which are gone, also when this worker is stopped meanwhile: nobody finds them any more.

        Raises:
            SandboxUnavailable: at least one cannot be removed; the others are.
        """
        room = asyncio.Semaphore(AT_ONCE)

        async def remove(judged: Surveyed) -> Surveyed:
            async with room:
                await self.provider.destroy(judged.box.id)
            return judged

        async def remove_all() -> None:
            results = await asyncio.gather(*map(remove, due), return_exceptions=True)
            await self.sink.publish([self._released(result) for result in results if isinstance(result, Surveyed)])
            for result in results:
                if isinstance(result, BaseException):
                    raise result

        await shielded(remove_all())

    def _released(self, judged: Surveyed) -> SandboxReleased:
        assert judged.reap is not None, "only what is reaped is released"
        holder = judged.holder
        return SandboxReleased.create(
            judged.box.id,
            how=judged.reap,
            by=self.by,
            run=holder.run,
            session=holder.session,
            caused_at=judged.box.created_at,
        )

    async def run(self, interval_s: float) -> None:
        """Reap now and then for ever. An engine or a log that is away is waited for."""
        while True:
            try:
                for judged in await self.reap():
                    log.info("reaped sandbox %s of session %s: %s", judged.box.id, judged.holder.session, judged.reap)
            except (BoundaryFailure, UsageError) as error:
                log.warning("cannot reap sandboxes, trying again in %g s: %s", interval_s, error)
            await asyncio.sleep(interval_s)
