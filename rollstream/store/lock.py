"""One writer a store: the lock that says who it is.

The kernel releases the lock when its holder dies, so a stale file never locks anybody out.
"""

import fcntl
import os
from pathlib import Path

from rollstream.errors import UsageError


class WriterLock:
    """Held from `acquire` to `release`. The file names the holder's pid, for people."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def acquire(self) -> None:
        """Become the writer.

        Raises:
            UsageError: another process is.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise UsageError(
                f"the store in {self._path.parent} is being written by process {holder}; stop it, or use another data directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._file = descriptor

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
