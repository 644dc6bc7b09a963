"""One writer a store: the lock that says who it is.

The kernel releases the lock when its holder dies, so a stale file never locks anybody out.
"""

import fcntl
import os
from pathlib import Path

from rollstream.errors import UsageError


class WriterLock:
    """Held from `of` to `release`. The file names the holder's pid, for people."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def of(cls, data_dir: Path) -> "WriterLock":
        """Become the writer of the store in `data_dir`.

        Raises:
            UsageError: another process is.
        """
        path = _path(data_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _named(descriptor)
            os.close(descriptor)
            raise UsageError(
                f"the store in {path.parent} is being written by process {holder}; stop it, or use another data directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def writer_of(data_dir: Path) -> str | None:
    """The pid of the process that writes the store in `data_dir`, if one does."""
    try:
        descriptor = os.open(_path(data_dir), os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(descriptor)
    finally:
        os.close(descriptor)
    return None


def _path(data_dir: Path) -> Path:
    return data_dir / "store" / "writer.lock"


def _named(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
