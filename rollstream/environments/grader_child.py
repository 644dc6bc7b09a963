"""The process in which grading functions run: one request after another, until its parent is gone.

Run by path, never imported by the application; it imports nothing but the standard library and the modules of the functions
it is asked to call. The deadline is a kernel timer whose default action ends the process: it fires while C code holds the
interpreter, it counts nothing but execution, and it needs no parent, so a runaway grader outlives nobody for long.

    request   4 bytes length, then pickle of (function, args)
    reply     4 bytes length, then JSON {"value": …} or {"error": …}
"""

import json
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import IO, Any

LENGTH = struct.Struct(">I")


def main(timeout_s: float, memory_mib: int) -> None:
    requests, replies = _take_over_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(memory_mib)
    prepared: set[str] = set()
    while header := requests.read(LENGTH.size):
        body = requests.read(LENGTH.unpack(header)[0])
        reply = _answer(body, timeout_s, prepared)
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()


def _answer(request: bytes, timeout_s: float, prepared: set[str]) -> bytes:
    try:
        function: Callable[..., Any]
        function, args = pickle.loads(request)
        if function.__module__ not in prepared:
            getattr(sys.modules[function.__module__], "prepare_grading", lambda: None)()
            prepared.add(function.__module__)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            value = function(*args)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return json.dumps({"value": value}).encode()
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {str(error)[:500]}"}).encode()


def _take_over_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Keep the two pipes for ourselves: a grader that prints or reads must not disturb the conversation."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _limit_memory(memory_mib: int) -> None:
    """An answer that asks for more memory gets a MemoryError instead of taking the machine down."""
    limit = memory_mib * 1024 * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux" and (hard == resource.RLIM_INFINITY or hard > limit):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
