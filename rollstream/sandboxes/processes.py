"""A command as a process of this machine, its streams read as they come: what the providers without an engine share."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.sandboxes.capture import Captures
from rollstream.sandboxes.hijack import PIECE, pieces
from rollstream.sandboxes.protocol import Stdin, Stream

LOOK_S = 0.25
"""How often it is looked whether a command has ended whose streams are still open."""
DRAIN_S = 0.3
"""How long output is waited for after a command's end: what it left in the background may hold its streams for ever."""


class NotStarted(Exception):
    """A process could not be made; `error` is the system's word."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


async def run_process(
    argv: Sequence[str],
    captures: Captures,
    *,
    stdin: Stdin,
    env: Mapping[str, str],
    cwd: str | None = None,
) -> int:
    """Run to the end; 128 + the signal that killed it. If cancelled, the process itself is killed, not what it started.

    Raises:
        NotStarted: there is no such program or directory, or the machine has no room for a process.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            limit=PIECE,
        )
    except OSError as error:
        raise NotStarted(error) from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    feeding = asyncio.create_task(send(process.stdin, stdin))
    ended = asyncio.create_task(_until_known(process))
    try:
        await read_until_ended(ended, process.stdout, process.stderr, captures)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for pending in (feeding, ended):
            pending.cancel()
        await asyncio.gather(feeding, ended, return_exceptions=True)
        # Whoever else holds the pipes keeps nobody waiting.
        process._transport.close()  # type: ignore[attr-defined]
        await process.wait()
    code = process.returncode
    assert code is not None
    return 128 - code if code < 0 else code


async def _until_known(process: asyncio.subprocess.Process) -> None:
    """Return when a process has ended, although something that it left behind may hold its streams."""
    waiting = asyncio.create_task(process.wait())
    try:
        # `process.wait()` waits for the streams as well.
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=LOOK_S)
    finally:
        waiting.cancel()


async def read_until_ended(
    ended: "asyncio.Task[Any]", stdout: asyncio.StreamReader, stderr: asyncio.StreamReader, captures: Captures
) -> None:
    """Return when a command has ended and its output was read; what holds its streams beyond its end is not waited for.

    Raises: what a listener of `captures` does.
    """
    reading = [asyncio.create_task(_read(stdout, "stdout", captures)), asyncio.create_task(_read(stderr, "stderr", captures))]
    left: set[asyncio.Task[Any]] = {*reading}
    try:
        while left and not ended.done():
            done, _ = await asyncio.wait({*left, ended}, return_when=asyncio.FIRST_COMPLETED)
            left -= done
            for task in done - {ended}:
                task.result()
        if left:
            done, _ = await asyncio.wait(left, timeout=DRAIN_S)
            for task in done:
                task.result()
        else:
            await asyncio.wait([ended])
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def send(writer: asyncio.StreamWriter, stdin: Stdin) -> None:
    """Send all of a command's input; one that does not read it is no error."""
    with contextlib.suppress(ConnectionError):
        async for piece in pieces(stdin):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def _read(reader: asyncio.StreamReader, stream: Stream, captures: Captures) -> None:
    while chunk := await reader.read(PIECE):
        await captures.add(stream, chunk)
