"""One object from a process to another one of the same machine, without copying what is large in it twice.

Pickle sets the buffers of Arrow tables apart: they are written into memory that has no name, and the other process maps it.
Only for a process and the one that it has started: pickle runs what it is given.
"""

import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

_MESSAGE = struct.Struct("=QQ")
"""How many buffers there are, and how long the rest is."""
_ALIGNED = 64


class Memory:
    """Room for one object, that can be used again: then the one that it had must not be in use any more, wherever it is."""

    def __init__(self) -> None:
        self._descriptor = _unnamed_file()
        self._message = b""

    def put(self, what: object) -> None:
        """Write an object down; it can be dropped then."""
        buffers: list[pickle.PickleBuffer] = []
        rest = pickle.dumps(what, protocol=5, buffer_callback=buffers.append)
        pieces = [buffer.raw() for buffer in buffers]
        places = _places([len(piece) for piece in pieces])
        with open(self._descriptor, "wb", closefd=False) as file:
            for piece, start in zip(pieces, places, strict=False):
                file.seek(start)
                file.write(piece)
            file.seek(places[-1])
            file.write(rest)
            file.write(struct.pack(f"={len(pieces)}Q", *map(len, pieces)))
            file.truncate()
        self._message = _MESSAGE.pack(len(pieces), len(rest))

    def send(self, connection: socket.socket) -> None:
        """Hand over what was put.

        Raises:
            OSError: nobody is there any more.
        """
        socket.send_fds(connection, [self._message], [self._descriptor])

    def close(self) -> None:
        """Let go of it. Whoever has received what it holds keeps that."""
        os.close(self._descriptor)


def send(connection: socket.socket, what: object) -> None:
    """Hand over an object, once.

    Raises:
        OSError: nobody is there any more.
    """
    memory = Memory()
    try:
        memory.put(what)
        memory.send(connection)
    finally:
        memory.close()


def receive(connection: socket.socket) -> Any:
    """The next object; waits for it. What is large in it stays where it was put.

    Raises:
        EOFError: the other process has ended, or closed its side.
    """
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE.size, 1)
    except ConnectionError:
        message = b""
    if not message:
        raise EOFError
    (descriptor,) = descriptors
    try:
        mapped = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)
    count, rest = _MESSAGE.unpack(message)
    lengths = struct.unpack(f"={count}Q", mapped[len(mapped) - 8 * count :])
    places = _places(lengths)
    buffers = [mapped[start : start + length] for start, length in zip(places, lengths, strict=False)]
    return pickle.loads(mapped[places[-1] : places[-1] + rest], buffers=buffers)


def _places(lengths: Sequence[int]) -> list[int]:
    """Where buffers of these lengths start, and after them the rest."""
    places = [0]
    for length in lengths:
        places.append(places[-1] + -(-length // _ALIGNED) * _ALIGNED)
    return places


def _unnamed_file() -> int:
    """In memory, where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rollstream-handover")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
