"""Boxes that are started before anybody asks for one: leased under no session, handed to one, and never used by two.

Only what is decided when a box starts must fit: variables and files are added as it is handed over. A box with a gateway or
mounts is never warm, because what it is given of this machine is decided then.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollstream.cancelling import shielded
from rollstream.errors import Refused, SandboxUnavailable
from rollstream.sandboxes.leases import LeasedSandbox, Leases
from rollstream.sandboxes.protocol import Mount, Sandbox
from schemas.sandbox import SandboxHolder, SandboxSpec

log = logging.getLogger(__name__)

LOOK_S = 15.0
"""Between two looks at whether the boxes that wait are still there."""


def as_started(spec: SandboxSpec) -> SandboxSpec:
    """The part of a specification that is decided when a box starts."""
    return spec.model_copy(update={"env": {}, "files": {}})


def fits(warm: SandboxSpec, asked: SandboxSpec) -> bool:
    """Whether a box that was started to one specification is what another asks for, but for variables and files."""
    return asked.ttl_s <= warm.ttl_s and as_started(asked).model_copy(update={"ttl_s": warm.ttl_s}) == as_started(warm)


@dataclass(frozen=True, slots=True)
class Supply:
    """So many boxes of one kind.

    Attributes:
        idle_s: a box that nobody takes for so long is replaced, so that one that is handed over has its `ttl_s` before it.
    """

    spec: SandboxSpec
    count: int
    idle_s: float


class WarmBoxes:
    """The boxes of one supply. They are started one after the other in the background."""

    def __init__(self, leases: Leases, supply: Supply, holder: SandboxHolder) -> None:
        self._leases = leases
        self._supply = supply
        self._holder = holder
        self._ready: deque[tuple[float, LeasedSandbox]] = deque()
        self._taken = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._filling = asyncio.create_task(self._keep_filled())

    def take(self, spec: SandboxSpec) -> LeasedSandbox | None:
        """A box that waits, if one fits; it is the caller's from now on."""
        if not self._ready or not fits(self._supply.spec, spec):
            return None
        _, box = self._ready.popleft()
        self._taken.set()
        return box

    @property
    def waiting(self) -> list[str]:
        """The boxes that anybody may have, started."""
        return [box.id for _, box in self._ready]

    async def close(self) -> None:
        """Destroy what waits."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        while self._ready:
            await self._leases.release(self._ready.popleft()[1])

    async def _keep_filled(self) -> None:
        while True:
            self._taken.clear()
            try:
                await self._drop_what_is_over()
                while len(self._ready) < self._supply.count:
                    self._ready.append((time.monotonic(), await self._start()))
            except Refused as error:
                # Whoever asks for such a box hears the same, and no other is to be had.
                log.error("no warm sandboxes: %s", error)
                return
            except SandboxUnavailable as error:
                log.warning("no warm sandbox, trying again in %g s: %s", LOOK_S, error)
            except Exception as error:
                # The log's trouble, whatever it is: sessions start their boxes themselves meanwhile.
                log.warning("no warm sandbox, trying again in %g s: %r", LOOK_S, error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._taken.wait()

    async def _start(self) -> LeasedSandbox:
        # As much longer as it may wait before anybody has it.
        spec = as_started(self._supply.spec).model_copy(update={"ttl_s": self._supply.spec.ttl_s + self._supply.idle_s})
        return await self._leases.start(spec, self._holder)

    async def _drop_what_is_over(self) -> None:
        """Drop what has waited too long or is gone, and renew the leases of the rest, by using them."""
        for since, box in list(self._ready):
            if time.monotonic() - since < self._supply.idle_s and await _is_there(box):
                continue
            if (since, box) in self._ready:
                self._ready.remove((since, box))
                await shielded(self._leases.release(box))


async def _is_there(box: LeasedSandbox) -> bool:
    try:
        return (await box.exec(["true"])).ok
    except SandboxUnavailable:
        return False


class WarmPool:
    """Boxes of one provider: warm ones where they fit, and others started when they are asked for."""

    def __init__(self, leases: Leases, supplies: Sequence[Supply], holder: SandboxHolder) -> None:
        self._leases = leases
        self._boxes = [WarmBoxes(leases, supply, holder) for supply in supplies]
        for boxes in self._boxes:
            boxes.start()

    @asynccontextmanager
    async def lease(
        self, spec: SandboxSpec, holder: SandboxHolder, *, gateway: Path | None = None, mounts: Sequence[Mount] = ()
    ) -> AsyncIterator[Sandbox]:
        """As `Leases.lease`."""
        box = None if gateway is not None or mounts else await self._handed_over(spec, holder)
        if box is None:
            async with self._leases.lease(spec, holder, gateway=gateway, mounts=mounts) as cold:
                yield cold
            return
        try:
            await _add_files(box, spec.files)
            yield box
        finally:
            await shielded(self._leases.release(box))

    async def _handed_over(self, spec: SandboxSpec, holder: SandboxHolder) -> LeasedSandbox | None:
        for boxes in self._boxes:
            if (box := boxes.take(spec)) is not None:
                try:
                    await box.hand_over(holder, spec.env)
                except BaseException:
                    await shielded(self._leases.release(box))
                    raise
                return box
        return None

    @property
    def waiting(self) -> list[str]:
        """The boxes that sessions may have, started."""
        return [box for boxes in self._boxes for box in boxes.waiting]

    async def close(self) -> None:
        await asyncio.gather(*(boxes.close() for boxes in self._boxes))


async def _add_files(box: LeasedSandbox, files: Mapping[str, str]) -> None:
    """Write a specification's files into a box that runs.

    Raises:
        Refused: they cannot be written, as when a box starts.
    """
    for path, text in files.items():
        try:
            await box.write(path, text.encode())
        except OSError as error:
            raise Refused(str(error), stage="agent", kind="sandbox_files") from error
