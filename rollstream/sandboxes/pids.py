"""Processes of boxes, as this machine's kernel knows them: by pid, and by what tells one process from the next of its pid."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

KILL_S = 5.0
PF_EXITING = 0x4


def kill_if_same(pid: int, start_ticks: int) -> None:
    """Kill the pid 1 of a box, unless its pid has become another process's; it has begun to end when this returns.

    Whoever waits for a command in the box then sees that the box has ended, and not just the command.
    """
    found = stat_of(pid)
    if found is None or found.start_ticks != start_ticks:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while (found := stat_of(pid)) is not None and not found.exiting and time.monotonic() < deadline:
        time.sleep(0.005)


def kill_beside(pid: int) -> None:
    """Kill, one by one, what is in the pid namespace of a box beside its pid 1."""
    try:
        namespace = os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != pid:
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "pid") == namespace:
                    os.kill(int(entry.name), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What the kernel says of a process."""

    exiting: bool
    """It has ended, or is about to: pid 1 of a box ends after all others, which it takes with it."""
    start_ticks: int
    """Since boot; with its pid, this tells one process from every other."""


def stat_of(pid: int) -> ProcessStat | None:
    """A process's state; None if there is none."""
    try:
        # Its name, in brackets, may hold anything.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessStat(words[0] in (b"Z", b"X") or bool(int(words[6]) & PF_EXITING), int(words[19]))
