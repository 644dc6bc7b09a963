"""Grading functions in processes that can be killed.

Written by hand because the library for it, pebble, leaves a runaway child behind when its parent is killed, stays broken
after an idle child dies, and imports the parent's main module into every child (docs/decisions/0004-grading-math.md).

Nothing queues inside the pool: callers wait for a free child, so the callers' own bound is the queue's.
"""

import asyncio
import json
import os
import pickle
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rollstream.environments.protocol import GraderCrashed, GraderRaised, GraderTimeout

R = TypeVar("R")

CHILD = Path(__file__).with_name("grader_child.py")
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
"""Of our environment: graders read what agents wrote, so they get no keys."""
PREPARATION_S = 120.0
"""Longest start and import of a child, on a machine under load; beyond the deadline, which is the child's own."""
MAX_REPLY_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class GraderPool:
    """Runs grading functions, at most `processes` at once, each in a child of its own.

    Children start at their first request and stay. One that passes its deadline, crashes, or whose caller is cancelled is
    killed and replaced at the next request.
    """

    def __init__(self, processes: int, timeout_s: float, *, memory_mib: int = 1024) -> None:
        self._timeout_s = timeout_s
        self._children = [_Child(timeout_s, memory_mib) for _ in range(processes)]
        self._idle: asyncio.LifoQueue[_Child] | None = None

    async def start(self) -> None:
        """Accept requests. Last used is first chosen, so that a quiet pool warms one child and not all."""
        self._idle = asyncio.LifoQueue()
        for child in self._children:
            self._idle.put_nowait(child)

    async def close(self) -> None:
        """Kill every child, whatever it is doing; a call under way ends with `GraderCrashed`."""
        self._idle = None
        for child in self._children:
            await child.kill()

    async def __aenter__(self) -> "GraderPool":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """See `Graders.run`."""
        idle = self._idle
        if idle is None:
            raise GraderCrashed("the pool of graders is closed")
        request = pickle.dumps((function, args))
        child = await idle.get()
        try:
            if self._idle is not idle:
                raise GraderCrashed("the pool of graders was closed")
            reply = await child.ask(request, self._timeout_s + PREPARATION_S)
        finally:
            idle.put_nowait(child)
        if "error" in reply:
            raise GraderRaised(f"grader {function.__module__}.{function.__qualname__} raised {reply['error']}")
        value: R = reply["value"]
        return value

    def pids(self) -> list[int]:
        """Of the children that are alive."""
        return [pid for child in self._children if (pid := child.pid) is not None]


class _Child:
    """One process, started when it is needed."""

    def __init__(self, timeout_s: float, memory_mib: int) -> None:
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def ask(self, request: bytes, patience_s: float) -> dict[str, Any]:
        process = await self._running()
        answered = False
        try:
            async with asyncio.timeout(patience_s):
                try:
                    reply = await _exchange(process, request)
                except (asyncio.IncompleteReadError, ConnectionError):
                    raise self._died(await process.wait()) from None
            answered = True
            return reply
        except TimeoutError:
            raise GraderCrashed(f"a grader neither answered nor ended within {patience_s:g} s; it was killed") from None
        finally:
            if not answered:
                await self.kill()

    def _died(self, code: int) -> GraderTimeout | GraderCrashed:
        if code == -signal.SIGALRM:
            return GraderTimeout(f"a grader did not answer within {self._timeout_s:g} s; it was killed")
        return GraderCrashed(f"a grader's process ended with exit code {code} before it answered")

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(CHILD), str(self._timeout_s), str(self._memory_mib)),
                stdin=PIPE,
                stdout=PIPE,
                env=_child_environment(),
                start_new_session=True,
            )
        return self._process


async def _exchange(process: Process, request: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(request)) + request)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    if length > MAX_REPLY_BYTES:
        raise GraderCrashed(f"expected a reply of at most {MAX_REPLY_BYTES} bytes from a grader, found {length}")
    reply: dict[str, Any] = json.loads(await process.stdout.readexactly(length))
    return reply


def _child_environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
