"""How a worker process tells how it is, and how it is asked: over a socket of its own, answered by its event loop.

An answer is the proof that the loop turns; a file or a line in a log could be old. Whoever asks needs the data directory's path
and the same user, and nothing of Kafka.
"""

import asyncio
import hashlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""A loop that does not answer in this time is blocked."""
OVERDUE_S = 30.0
"""Commits and rebalances take less than a second; what takes longer is stuck, or the broker is away."""


@dataclass(frozen=True, slots=True)
class LaneHealth:
    """One subscription of a worker.

    Attributes:
        in_flight: records being handled.
        span: most offsets of one partition from its mark to the next record.
        mark_age_s: longest time for which the mark of a partition has stood still before work that runs; during a long
            episode it does, so lag alone says little.
        commit_age_s: longest time for which something finished has not been committed.
        out_for_s: how long it has been out of its group, 0 for a member.
    """

    group: str
    partitions: int
    in_flight: int
    span: int
    mark_age_s: float
    commit_age_s: float
    out_for_s: float


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """One worker of a process; `failure` says what it broke of, if it did."""

    worker: str
    failure: str | None = None
    lanes: tuple[LaneHealth, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """What a process answered, or why it did not."""

    pid: int
    workers: tuple[WorkerHealth, ...] = ()
    silence: str | None = None

    @property
    def dead(self) -> list[str]:
        """What only a new process can mend, one sentence each."""
        found = [f"process {self.pid} {self.silence}"] if self.silence else []
        return found + [f"{one.worker} broke: {one.failure}" for one in self.workers if one.failure]

    @property
    def hindrances(self) -> list[str]:
        """Why work does not get done, one sentence each; some of it passes by itself when the broker is back."""
        found = self.dead
        for lane in (lane for worker in self.workers for lane in worker.lanes):
            if lane.out_for_s > OVERDUE_S:
                found.append(f"group {lane.group} has not let this process in for {lane.out_for_s:.0f} s")
            if lane.commit_age_s > OVERDUE_S:
                found.append(f"group {lane.group} has taken no commit for {lane.commit_age_s:.0f} s")
        return found


_ANSWER = TypeAdapter(ProcessHealth)


class HealthSocket:
    """Answers whoever connects with the health of this process. Where no socket can be, it only warns."""

    def __init__(self, data_dir: Path, workers: Callable[[], tuple[WorkerHealth, ...]]) -> None:
        self._path = _directory(data_dir) / f"{os.getpid()}.sock"
        self._workers = workers
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "HealthSocket":
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.parent.stat().st_uid != os.getuid():
                raise PermissionError(f"{self._path.parent} belongs to somebody else")
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._answer, self._path)
        except OSError as error:
            log.warning("nobody can ask how this process is: %s", error)
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(_ANSWER.dump_json(ProcessHealth(os.getpid(), self._workers())))
            await writer.drain()
        writer.close()


def ask_all(data_dir: Path) -> list[ProcessHealth]:
    """The health of every worker process of this user and data directory on this host."""
    asked = (_ask(path) for path in sorted(_directory(data_dir).glob("*.sock")))
    return [health for health in asked if health is not None]


def _ask(path: Path) -> ProcessHealth | None:
    """What the process behind a socket says; None if there is none any more."""
    pid = int(path.stem)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(ANSWER_S)
            client.connect(str(path))
            text = b"".join(iter(lambda: client.recv(65536), b""))
        return _ANSWER.validate_json(text)
    except TimeoutError:
        return ProcessHealth(pid, silence=f"has not answered for {ANSWER_S:g} s: its event loop is blocked, or it is stopped")
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # it was killed
        return None
    except (OSError, ValueError) as error:
        return ProcessHealth(pid, silence=f"does not answer: {error}")


def _directory(data_dir: Path) -> Path:
    """Short whatever the data directory is called: the path of a socket may not exceed a hundred characters."""
    name = hashlib.sha256(str(data_dir.expanduser().resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rollstream-{os.getuid()}" / name
