"""A running command of a Docker engine, as a stream: the API's `exec/ID/start`, which takes the connection over.

The SDK's own socket needs a thread for as long as a command runs, and loses what arrives together with the headers.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from rollstream.sandboxes.protocol import Stdin, Stream

FRAME_HEADER = 8
STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
PIECE = 64 * 1024
CONNECT_TIMEOUT_S = 30.0


class EngineLost(Exception):
    """The connection to the engine failed, before or within the stream."""


class EngineRefused(Exception):
    """The engine answered with something other than the stream; the message is its own."""


async def connect(engine: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to an engine at `unix:///path` or `tcp://host:port`.

    Raises:
        OSError: nobody listens there.
    """
    address = urlsplit(engine)
    if address.scheme == "unix":
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.hostname, address.port or 2375)


@asynccontextmanager
async def started(engine: str, version: str, exec_id: str) -> AsyncIterator["ExecStream"]:
    """Start a command that was created, and hold its streams.

    Raises:
        EngineRefused: the engine will not run it.
        EngineLost: the connection failed.
    """
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await connect(engine)
    except OSError as error:
        raise EngineLost(str(error) or type(error).__name__) from error
    try:
        await _request(reader, writer, f"/v{version}/exec/{exec_id}/start")
        yield ExecStream(reader, writer)
    finally:
        writer.transport.abort()


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
    body = json.dumps({"Detach": False, "Tty": False}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer.split(b" ", 2)[1] not in (b"101", b"200"):
            raise EngineRefused(await _message(reader, answer))
    except (OSError, EOFError) as error:
        raise EngineLost(str(error) or type(error).__name__) from error


async def _message(reader: asyncio.StreamReader, head: bytes) -> str:
    """What the engine says in the body of an error."""
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    raw = await reader.readexactly(int(lengths[0])) if lengths else await reader.read(PIECE)
    try:
        return str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return raw.decode(errors="replace").strip() or head.decode(errors="replace").splitlines()[0]


class ExecStream:
    """Frames out, bytes in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def feed(self, stdin: Stdin) -> None:
        """Send all of a command's input, and say that it ends there. A command that does not read it is no error."""
        try:
            async for piece in pieces(stdin):
                self._writer.write(piece)
                await self._writer.drain()
            self._writer.write_eof()
        except (ConnectionError, RuntimeError):
            return

    async def frames(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Output as it comes, in pieces of bounded size, until the engine closes the stream.

        Raises:
            EngineLost: the stream ends where it cannot end.
        """
        while True:
            header = await self._read(FRAME_HEADER)
            if not header:
                return
            while len(header) < FRAME_HEADER:
                header += await self._rest(FRAME_HEADER - len(header))
            left = int.from_bytes(header[4:], "big")
            while left:
                chunk = await self._rest(min(left, PIECE))
                left -= len(chunk)
                yield STREAMS.get(header[0], "stdout"), chunk

    async def _read(self, size: int) -> bytes:
        try:
            return await self._reader.read(size)
        except OSError as error:
            raise EngineLost(str(error) or type(error).__name__) from error

    async def _rest(self, size: int) -> bytes:
        chunk = await self._read(size)
        if not chunk:
            raise EngineLost("the engine closed the connection within a frame")
        return chunk


async def pieces(stdin: Stdin) -> AsyncIterator[bytes]:
    """Input in pieces, whatever form it has."""
    if isinstance(stdin, bytes):
        for start in range(0, len(stdin), PIECE):
            yield stdin[start : start + PIECE]
    else:
        async for piece in stdin:
            yield piece
