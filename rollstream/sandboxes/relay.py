"""The one way out of a box without a network: TCP on the box's own loopback, to the socket that stands in it.

    python3 -I -S -c SOURCE PORT SOCKET     # returns once it listens, and goes on in the background

This file is a program that runs *in* boxes, with whatever Python their image has, and is told to it as text: it keeps to the
standard library and to Python 3.6, and imports nothing of ours. Killing everything of the user's ends it; it can be started
again at any time, and leaves one that runs already alone.
"""

import contextlib
import errno
import os
import socket
import sys
import threading

CHUNK = 65536
BACKLOG = 128


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass everything on, and then the end of it. Each direction has a thread: one that does not read delays nobody else."""
    try:
        while True:
            piece = source.recv(CHUNK)
            if not piece:
                break
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def carry(inner: socket.socket, target: str) -> None:
    outer = socket.socket(socket.AF_UNIX)
    with inner, outer:
        try:
            outer.connect(target)
        except OSError:
            return
        back = threading.Thread(target=pump, args=(outer, inner), daemon=True)
        back.start()
        pump(inner, outer)
        back.join()


def main() -> None:
    port, target = int(sys.argv[1]), sys.argv[2]
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return
        raise
    listener.listen(BACKLOG)
    if os.fork():
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    while True:
        inner = listener.accept()[0]
        threading.Thread(target=carry, args=(inner, target), daemon=True).start()


if __name__ == "__main__":
    main()
