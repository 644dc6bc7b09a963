"""Sessions whose environment holds something outside its world: opened once, closed whatever ended them.

Only such environments come here (`OpensResources`); for all others a receipt is everything, and no session is known.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollstream.environments.cleanup import CleanUpStack
from rollstream.environments.protocol import Blobs, HandsOver, OpenServices, OpensResources, ResumesResources, World
from rollstream.environments.receipts import Receipt
from rollstream.errors import EnvironmentFailure, NoRoom
from rollstream.eventlog.endings import Ending
from rollstream.eventlog.lanes import fence
from rollstream.eventlog.ownership import Assignment
from rollstream.sandboxes.held import SessionBoxes
from schemas.action import ActionRequested

log = logging.getLogger(__name__)

MAX_OVER = 20_000
"""Sessions that are remembered to be over: an action of theirs that comes again opens nothing."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Where an environment gets what it holds outside a world."""

    boxes: SessionBoxes | None = None
    blobs: Blobs | None = None


@dataclass(slots=True)
class OpenSession:
    """What is held for one session, and how far it has come."""

    run: str
    name: str
    partition: int
    environment: OpensResources
    stack: CleanUpStack
    acted_at: float
    outside: Outside
    fence: int = 0
    live: dict[str, Any] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever acts or closes."""
    world: World | None = None
    """As it is now; None until it is opened."""
    receipt: str | None = None
    """The latest one, sealed; None before the first action is done."""
    digest: str = ""
    answered: str | None = None
    """Id of the latest action."""
    stepping: bool = False
    """An action has begun to change what is outside: if it fails, the session is over."""
    over: str | None = None
    """Why it is to be closed, as soon as what happened is in the log."""
    gone: bool = False
    """It is not held any more."""

    def services(self) -> OpenServices:
        return OpenServices(self.name, self.fence, self.stack, self.live, self.outside.boxes, self.outside.blobs)

    @property
    def closed_by_verify(self) -> bool:
        """Whether what is outside is needed until there is a verdict."""
        return bool(getattr(self.environment, "verify_closes", False))

    def now(self, world: World, receipt: str, digest: str, action: str, *, done: bool) -> None:
        """An action is done."""
        self.world, self.receipt, self.digest, self.answered = world, receipt, digest, action
        self.stepping = False
        if done and not self.closed_by_verify:
            self.over = "its world has come to its end"


class OpenSessions:
    """The sessions that this worker holds.

    Args:
        most: sessions held at once.
        idle_s: after which a session that nobody acts on is closed.
        outside: of the session of an action.
    """

    def __init__(
        self,
        most: int,
        cleanup_timeout_s: float,
        idle_s: float,
        outside: Callable[[ActionRequested], Outside] = lambda request: Outside(),
    ) -> None:
        self._most = most
        self._cleanup_timeout_s = cleanup_timeout_s
        self._idle_s = idle_s
        self._outside = outside
        self.opened: Callable[[datetime], None] = lambda acted_at: None
        """Told when there is something to be closed one day, with the time of the action."""
        self._held: dict[str, OpenSession] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def acting(self, session: str) -> bool:
        """Whether an action of a session is under way."""
        held = self._held.get(session)
        return held is not None and held.lock.locked()

    # Acting.

    @asynccontextmanager
    async def turn(self, environment: OpensResources, request: ActionRequested, partition: int) -> AsyncIterator[OpenSession]:
        """The session of an action, while nobody else acts on it.

        Raises:
            NoRoom: as many are held as may be.
            EnvironmentFailure: the session is over.
        """
        while True:
            held = self._held.get(request.session) or self._new(environment, request, partition)
            async with held.lock:
                if held.gone:
                    continue
                held.fence = max(held.fence, fence.get())
                try:
                    yield held
                except Exception:
                    if held.stepping:
                        held.over = held.over or "an action of it failed"
                    raise
                finally:
                    held.acted_at = asyncio.get_running_loop().time()
                    if held.world is None and not held.stepping:
                        self._forget(held)
                return

    def _new(self, environment: OpensResources, request: ActionRequested, partition: int) -> OpenSession:
        name = getattr(environment, "name", "?")
        if request.session in self._over:
            message = f"session {request.session} of environment {name} is over, and what it held is closed"
            raise EnvironmentFailure(message, stage="agent", kind="session_over", retryable=True)
        if len(self._held) >= self._most:
            raise NoRoom(
                f"expected room for another session of environment {name}, found {len(self._held)} held open here; more of "
                "them take more env_workers, or a higher env.max_open_sessions"
            )
        now = asyncio.get_running_loop().time()
        stack, outside = self._stack(name, request.session), self._outside(request)
        held = OpenSession(request.run, request.session, partition, environment, stack, now, outside)
        self._held[held.name] = held
        self.opened(request.occurred_at)
        return held

    async def ready(self, held: OpenSession, request: ActionRequested, world: World, before: Receipt | None) -> World:
        """The world in which an action that was found in order is to be done.

        Args:
            world: by the action's receipt, or as the task seeds it.

        Raises:
            EnvironmentFailure: it is another worker's, or has gone on since.
        """
        environment = held.environment
        if held.world is not None and request.receipt != held.receipt:
            if before is None or before.digest != held.digest:
                raise EnvironmentFailure(
                    f"expected the latest receipt of session {held.name}, found an older one: what is outside a world cannot "
                    "be taken back",
                    stage="agent",
                    kind="stale_receipt",
                    retryable=True,
                )
            if isinstance(environment, HandsOver) and environment.holds(world, held.services()):
                return world
            # Another worker has done the same actions, and its answers came first: what was opened here is nobody's.
            await self._undo(held)
            held.world, held.stack, held.live = None, self._stack(getattr(environment, "name", "?"), held.name), {}
        if held.world is not None:
            return world
        if before is None:
            held.stepping = True
            return self._entered(held, await environment.open(world, held.services()))
        if not isinstance(environment, ResumesResources):
            raise EnvironmentFailure(
                f"session {held.name} was opened in another worker, or before this one restarted, and its environment cannot "
                "resume it",
                stage="agent",
                kind="world_elsewhere",
                retryable=True,
            )
        held.stepping = True
        return self._entered(held, await environment.resume(world, held.services()))

    def _stack(self, environment: str, session: str) -> CleanUpStack:
        return CleanUpStack(f"environment {environment}, session {session}", self._cleanup_timeout_s)

    @staticmethod
    def _entered(held: OpenSession, world: World) -> World:
        held.world = world

        async def close() -> None:
            await held.environment.close(held.world, held.services())

        held.stack.push(close)
        return world

    async def settle(self, session: str) -> None:
        """Close a session that its last action has ended, now that this is in the log."""
        held = self._held.get(session)
        if held is not None and held.over is not None:
            await self._closed(held, held.over)

    def failed(self, session: str) -> None:
        """What was answered to a session could not be written."""
        held = self._held.get(session)
        if held is not None:
            held.over = held.over or "the answer to an action could not be written"

    # Closing.

    def ended(self, session: str, how: Ending) -> None:
        """A session has come to its end elsewhere."""
        self._remember(session)
        held = self._held.get(session)
        if held is None or (held.closed_by_verify and how == "handed_in"):
            return
        if held.closed_by_verify and how == "verified":
            self._forget(held)
        else:
            self._in_background(self._close(held, f"it is {how}"))

    def cancelled(self, run: str) -> None:
        """A run is called off: so are its sessions."""
        for held in [held for held in self._held.values() if held.run == run]:
            self._in_background(self._close(held, "its run was cancelled"))

    def assigned(self, assignment: Assignment) -> None:
        """Let go of the sessions that another worker acts on now, or may have acted on."""
        for held in list(self._held.values()):
            if held.partition not in assignment.marks or held.partition in assignment.gained:
                self._in_background(self._leave(held))

    async def start(self) -> None:
        """Begin to close what nobody acts on any more."""
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._idle_s / 4))
            for held in list(self._held.values()):
                if not self.acting(held.name) and loop.time() - held.acted_at > self._idle_s:
                    self._in_background(self._close(held, f"nobody acted on it for {self._idle_s:g} s"))

    async def close(self) -> None:
        """Let go of everything: the worker stops."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(self._leave(held) for held in list(self._held.values())))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _leave(self, held: OpenSession) -> None:
        """Leave a session to another worker if it can go on there; close it if it cannot."""
        async with held.lock:
            if await self._left(held):
                self._forget(held)
                return
        await self._close(held, "its worker does not serve it any more", remember=False)

    @staticmethod
    async def _left(held: OpenSession) -> bool:
        """Whether another worker can go on with what is open."""
        # Without a receipt in the log, nobody could find again what was opened.
        if not isinstance(held.environment, ResumesResources) or held.receipt is None:
            return False
        if not isinstance(held.environment, HandsOver):
            return True
        try:
            return await held.environment.leave(held.world, held.services())
        except Exception:
            log.exception("session %s cannot be left to another worker", held.name)
            return False

    async def _closed(self, held: OpenSession, why: str) -> None:
        # Whoever waits may be cancelled; what is being closed goes on.
        await asyncio.shield(self._in_background(self._close(held, why)))

    async def _close(self, held: OpenSession, why: str, *, remember: bool = True) -> None:
        async with held.lock:
            if held.gone:
                return
            log.debug("closing session %s: %s", held.name, why)
            if remember:
                self._remember(held.name)
            try:
                await self._undo(held)
            finally:
                self._forget(held)

    @staticmethod
    async def _undo(held: OpenSession) -> None:
        for failure in await held.stack.run():
            # The outcome stands: what was scored is scored, and what failed has failed for its own reason.
            log.error("%s: %s", failure.stage, failure, exc_info=failure.__cause__)

    def _forget(self, held: OpenSession) -> None:
        held.gone = True
        if self._held.get(held.name) is held:
            del self._held[held.name]

    def _remember(self, session: str) -> None:
        self._over[session] = None
        while len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
