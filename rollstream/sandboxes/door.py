"""The way into bubblewrap boxes: a process (`enter.py`) that forks a child for every command, which enters and becomes it.

Starting a Python for every command would cost 15 ms of the processor. The door lives as long as whoever holds its socket.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rollstream.sandboxes import enter
from rollstream.sandboxes.capture import Captures
from rollstream.sandboxes.hijack import PIECE
from rollstream.sandboxes.processes import NotStarted, read_until_ended, send
from rollstream.sandboxes.protocol import Stdin

FULL_S = 0.005
"""Until it is tried again to hand in a request where others wait."""


@dataclass(frozen=True, slots=True)
class Request:
    """One command in a box."""

    pid: int
    """Of the box's first process."""
    uid: int
    groups: Sequence[str]
    """Files in which a process writes itself to join the box's control groups."""
    cwd: str
    argv: Sequence[str]
    env: Mapping[str, str]

    def to_json(self) -> bytes:
        fields = {"pid": self.pid, "uid": self.uid, "groups": [*self.groups], "cwd": self.cwd}
        return json.dumps({**fields, "argv": [*self.argv], "env": dict(self.env)}).encode(errors="surrogatepass")


class Door:
    """Opened at first use; one for each provider."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._opening = asyncio.Lock()

    async def run(self, request: Request, captures: Captures, stdin: Stdin) -> int:
        """Run a command to its end; 128 + the signal that killed it. If cancelled, it goes on.

        Raises:
            NotStarted: no process can be made, or the command is too long.
        """
        raw = request.to_json()
        if len(raw) > enter.MOST_REQUEST:
            raise NotStarted(OSError(7, f"expected a command with its variables of at most {enter.MOST_REQUEST} bytes"))
        try:
            streams = await _Streams.open()
        except OSError as error:
            raise NotStarted(error) from error
        feeding: asyncio.Task[None] | None = None
        try:
            await self._hand_in(raw, streams)
            feeding = asyncio.create_task(send(streams.stdin, stdin))
            return await self._ended(streams, captures)
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            streams.close()

    async def _ended(self, streams: "_Streams", captures: Captures) -> int:
        """The exit code, once it is known and what the command wrote was read."""
        status = asyncio.create_task(streams.status.read())
        try:
            await read_until_ended(status, streams.stdout, streams.stderr, captures)
            told = await status
        finally:
            status.cancel()
        if not told:
            raise NotStarted(OSError("the process that enters the sandbox died"))
        return int(told)

    async def _hand_in(self, raw: bytes, streams: "_Streams") -> None:
        try:
            try:
                await self._send(raw, streams)
            except ConnectionError:
                # It died since it was last asked.
                await self.close()
                await self._send(raw, streams)
        except OSError as error:
            raise NotStarted(error) from error
        finally:
            streams.close_theirs()

    async def _send(self, raw: bytes, streams: "_Streams") -> None:
        way_in = await self._opened()
        while True:
            try:
                socket.send_fds(way_in, [raw], streams.theirs)
                return
            except BlockingIOError:
                await asyncio.sleep(FULL_S)

    async def _opened(self) -> socket.socket:
        async with self._opening:
            if self._socket is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    ours.setblocking(False)
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * enter.MOST_REQUEST)
                    try:
                        self._process = await asyncio.create_subprocess_exec(
                            *(sys.executable, "-I", "-S", enter.__file__),
                            stdin=theirs.fileno(),
                            stdout=asyncio.subprocess.DEVNULL,
                            stderr=asyncio.subprocess.DEVNULL,
                            env={},
                            start_new_session=True,
                        )
                    except BaseException:
                        ours.close()
                        raise
                self._socket = ours
            return self._socket

    async def close(self) -> None:
        """Let go of the process. Commands that run go on; the next one opens it again."""
        async with self._opening:
            process, self._process = self._process, None
            way_in, self._socket = self._socket, None
            if way_in is not None:
                way_in.close()
            if process is not None:
                # It ends when nobody can ask it any more.
                await process.wait()


class _Streams:
    """Four pipes: three of the command's, and one on which its end is told. Create it with `open`."""

    def __init__(self) -> None:
        self._pipes = [os.pipe() for _ in range(4)]
        self._open = {fd for pipe in self._pipes for fd in pipe}
        self._transports: list[asyncio.BaseTransport] = []
        self.theirs = [self._pipes[0][0], *(write for _, write in self._pipes[1:])]
        """The ends that the command has."""

    @classmethod
    async def open(cls) -> "_Streams":
        """
        Raises:
            OSError: this process has no room for more files.
        """
        streams = cls()
        try:
            streams.stdin = await streams._writer(streams._pipes[0][1])
            streams.stdout, streams.stderr, streams.status = [await streams._reader(read) for read, _ in streams._pipes[1:]]
        except BaseException:
            streams.close()
            raise
        return streams

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    status: asyncio.StreamReader

    async def _reader(self, fd: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=PIECE)
        file = os.fdopen(fd, "rb", buffering=0)
        self._open.remove(fd)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), file)
        self._transports.append(transport)
        return reader

    async def _writer(self, fd: int) -> asyncio.StreamWriter:
        file = os.fdopen(fd, "wb", buffering=0)
        self._open.remove(fd)
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, file)
        self._transports.append(transport)
        return asyncio.StreamWriter(transport, protocol, None, loop)

    def close_theirs(self) -> None:
        for fd in self._open & {*self.theirs}:
            self._open.remove(fd)
            os.close(fd)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        for fd in self._open:
            os.close(fd)
        self._open = set()
