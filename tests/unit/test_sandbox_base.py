"""How a command is cut short, whatever becomes of its box."""

import asyncio

import pytest

from rollstream.errors import SandboxUnavailable
from rollstream.sandboxes.base import BaseSandbox, Command
from rollstream.sandboxes.capture import Captures
from schemas.sandbox import SandboxSpec, User


class GoneBox(BaseSandbox):
    """A box whose command hangs, and that is gone when somebody wants to kill what runs in it."""

    def __init__(self) -> None:
        super().__init__("box", SandboxSpec(), "agent")
        self.began = asyncio.Event()

    async def start(self) -> None: ...

    async def run(self, command: Command, captures: Captures) -> int:
        self.began.set()
        await asyncio.Event().wait()
        raise AssertionError("it hangs")

    async def kill(self, user: User | None = None) -> None:
        raise self.unavailable("it is gone")

    async def close(self) -> None: ...

    async def oom_kills(self) -> int:
        return 0

    @property
    def users(self) -> frozenset[User]:
        return frozenset({"agent"})


async def test_who_is_cancelled_as_the_box_goes_is_cancelled_and_has_not_failed() -> None:
    box = GoneBox()
    running = asyncio.create_task(box.exec(["sleep", "1000"]))
    await box.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_command_out_of_time_in_a_box_that_is_gone_has_not_timed_out() -> None:
    with pytest.raises(SandboxUnavailable, match="it is gone"):
        await GoneBox().exec(["sleep", "1000"], timeout_s=0.01)
