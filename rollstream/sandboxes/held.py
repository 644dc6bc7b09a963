"""Boxes that are held from one action of a session to the next, and found again by another process of the same host.

A box is a session's own as long as its journal says so: whoever comes with a higher fence takes it over, and whoever held it
before neither acts in it nor closes it any more.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

from pydantic import AwareDatetime

from rollstream.cancelling import ended, shielded
from rollstream.errors import EnvironmentFailure, SandboxUnavailable
from rollstream.sandboxes.journal import FENCED, Journal, Opened, find
from rollstream.sandboxes.leases import LeasedSandbox, Leases
from rollstream.sandboxes.protocol import Sandbox
from schemas.envelope import now
from schemas.sandbox import SandboxHolder, SandboxSpec
from schemas.values import JsonObject, Name, Value

log = logging.getLogger(__name__)


class BoxHandle(Value):
    """What it takes to find a box again."""

    sandbox: Name
    provider: Name
    host: Name
    """The machine that it is on, as its provider knows it."""
    spec: SandboxSpec
    ends_at: AwareDatetime
    """When it ends by itself."""


class HeldBox:
    """A started box in the hands of this process. Its lease is renewed, used or not, until it is let go or its time is over."""

    def __init__(self, handle: BoxHandle, sandbox: LeasedSandbox, journal: Journal, leases: Leases, fence: int) -> None:
        self.handle = handle
        self.sandbox = sandbox
        self._journal = journal
        self._leases = leases
        self._fence = fence
        self._left = False
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        left_s = (self.handle.ends_at - now()).total_seconds()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                while True:
                    try:
                        await self.sandbox.keep()
                    except Exception as error:
                        # Whatever the log's trouble is: the lease has time left, and without another try the box has none.
                        log.warning("the lease of sandbox %s is not renewed: %r", self.handle.sandbox, error)

    async def opened(self, world: str) -> None:
        """Say that the box is ready for the first action.

        Args:
            world: of the session, as JSON.
        """
        how = Opened(self.handle.model_dump_json(), world)
        await self._journal.open(how, self._fence, self.handle.ends_at)

    async def begin(self, action: str, fence: int) -> JsonObject | None:
        """Say that an action begins; as `Journal.begin`."""
        self._fence = max(self._fence, fence)
        return await self._journal.begin(action, fence)

    async def done(self, action: str, outcome: JsonObject) -> None:
        """Say what an action has brought about; as `Journal.done`."""
        await self._journal.done(action, outcome, self._fence)

    async def close(self) -> None:
        """Destroy the box and its journal, unless somebody with a higher fence has taken them over. Can be repeated."""
        await self._let_go()
        if self._left or await self._is_anothers():
            return
        self._left = True
        await shielded(self._leases.release(self.sandbox))
        await self._journal.remove()

    async def leave(self) -> bool:
        """Let go of the box as it is: it stays until its lease is over, for whoever takes it over by then.

        Returns:
            False if nobody could, because boxes of its provider end with this process: it is to be closed.
        """
        if not self._leases.can_attach:
            return False
        await self._let_go()
        self._left = True
        return True

    async def _is_anothers(self) -> bool:
        try:
            return not await self._journal.is_held_under(self._fence)
        except EnvironmentFailure:
            # It has no journal, or none any more, so nobody can have taken it over.
            return False

    async def _let_go(self) -> None:
        await ended(self._keeping)


class SessionBoxes:
    """The boxes of one session.

    Args:
        leases: of a provider.
        provider: that the run names.
        holder: the session, in this process.
        journals: directory of this host's journals.
    """

    def __init__(
        self, leases: Callable[[str], Awaitable[Leases]], provider: str, holder: SandboxHolder, journals: Path
    ) -> None:
        self._leases = leases
        self._provider = provider
        self._holder = holder
        self._journals = journals

    async def start(self, spec: SandboxSpec, fence: int) -> HeldBox:
        """A started box that nobody has used. It has no journal until it is said to be `opened`.

        Raises:
            SandboxUnavailable: the provider failed; a retry can help.
            Refused: it cannot hold the box to its specification.
        """
        leases = await self._leases(self._provider)
        host = await leases.host()
        ends_at = now() + timedelta(seconds=spec.ttl_s)
        sandbox = await leases.start(spec, self._holder.model_copy(update={"fence": fence}))
        handle = BoxHandle(sandbox=sandbox.id, provider=self._provider, host=host, spec=spec, ends_at=ends_at)
        return HeldBox(handle, sandbox, self._journal(handle), leases, fence)

    @asynccontextmanager
    async def fresh(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Another started box that nobody has used, for the time of the `with`. Raises as `start`."""
        leases = await self._leases(self._provider)
        async with leases.lease(spec, self._holder) as box:
            yield box

    async def found(self, fence: int) -> tuple[HeldBox, str] | None:
        """The box that another process of this host has opened for this session, taken over from it, and the world then.

        Returns:
            None if there is none, or none any more.

        Raises:
            EnvironmentFailure: somebody with a higher fence has it.
        """
        opened = await asyncio.to_thread(find, self._journals, self._holder.session or "")
        if opened is None:
            return None
        try:
            return await self.attach(BoxHandle.model_validate_json(opened.handle), fence), opened.world
        except SandboxUnavailable:
            return None
        except EnvironmentFailure as error:
            if error.kind == FENCED:
                raise
            return None

    async def attach(self, handle: BoxHandle, fence: int) -> HeldBox:
        """A box that was opened in another process, taken over from it.

        Raises:
            EnvironmentFailure: it is on another host, or ended with its process, or somebody with a higher fence has it. All
                of it can be helped by a new session.
            SandboxUnavailable: it is not there any more.
        """
        session = self._holder.session
        leases = await self._leases(handle.provider)
        host = await leases.host()
        if not leases.can_attach:
            raise _elsewhere(f"the box of session {session} was another process's, and {handle.provider} boxes end with theirs")
        if host != handle.host:
            raise _elsewhere(f"expected the box of session {session} on this host ({host}), found it on {handle.host}")
        journal = self._journal(handle)
        if not journal.exists:
            raise _elsewhere(
                f"expected the journal of the box of session {session} in {self._journals}, found none: workers that are to "
                "serve the same boxes share a data directory"
            )
        await journal.take_over(fence)
        sandbox = await leases.attach(handle.sandbox, handle.spec, self._holder.worker)
        return HeldBox(handle, sandbox, journal, leases, fence)

    def _journal(self, handle: BoxHandle) -> Journal:
        return Journal(self._journals, self._holder.session or "", handle.sandbox)


def _elsewhere(message: str) -> EnvironmentFailure:
    return EnvironmentFailure(message, stage="agent", kind="world_elsewhere", retryable=True)
