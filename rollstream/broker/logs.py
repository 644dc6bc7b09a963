"""Reading a log file that another process writes and, now and then, replaces by an empty one."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TYPICAL_LINE_BYTES = 1_000
"""Of the end of the file that is read per line asked for; with longer lines, fewer are shown."""


def tail(path: Path, count: int) -> list[str]:
    """The last `count` lines, or fewer; none if the file does not exist."""
    try:
        with path.open("rb") as file:
            _seek_to_last_lines(file, count)
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def follow(path: Path, count: int, *, poll_s: float = 0.2) -> Iterator[str]:
    """The last `count` lines, then every new one for ever, across rotation and from before the file exists."""
    file: BinaryIO | None = None
    unfinished = b""
    if path.is_file():
        file = path.open("rb")
        _seek_to_last_lines(file, count)
    try:
        while True:
            chunk = file.read() if file else b""
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if chunk:
                continue
            # Only now, so that what was written last to a file that has been rotated away is not lost.
            if path.is_file() and (file is None or path.stat().st_ino != os.fstat(file.fileno()).st_ino):
                if file:
                    file.close()
                file = path.open("rb")
            else:
                time.sleep(poll_s)
    finally:
        if file:
            file.close()


def _seek_to_last_lines(file: BinaryIO, count: int) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TYPICAL_LINE_BYTES * count))
    lines = file.read().splitlines(keepends=True)
    shown = lines[-count:] if count > 0 else []
    file.seek(size - sum(len(line) for line in shown))
