"""What was done in a box, by action id: a redelivered action is not done again, and gets its first result.

A file beside the box, on its host, written before an action begins and after it has ended. It outlives the process, which is
all that it is for: a machine that goes down takes its boxes with it, so nothing is forced to the disk.

Several processes may write: the one with the highest fence has the box, and the others are refused.
"""

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeVar

from rollstream.errors import EnvironmentFailure
from schemas.envelope import now
from schemas.values import JsonObject

R = TypeVar("R")

SUFFIX = ".journal"
FENCED = "fenced"
"""Kind of the failure of whoever was overtaken."""


@dataclass(frozen=True, slots=True)
class Opened:
    """How a box was opened, as its journal begins."""

    handle: str
    """What it takes to find the box again, as JSON."""
    world: str
    """Of the session then, as JSON."""


class Journal:
    """The journal of a session's box, in one process.

    Args:
        sandbox: the box's id; a journal of the session's that is another box's is not this one.
    """

    def __init__(self, folder: Path, session: str, sandbox: str) -> None:
        self._path = _path(folder, session)
        self._sandbox = sandbox
        self._fence = 0
        """The highest that is known of."""
        self._begun: set[str] = set()
        self._done: dict[str, tuple[int, int]] = {}
        """Action -> where its outcome stands, and how long it is."""
        self._read_to = 0

    async def open(self, opened: Opened, fence: int, ends_at: datetime) -> None:
        """Begin the journal of a box that is ready for the first action; another one of the session is replaced.

        Args:
            ends_at: when the box ends by itself, and with it the use of its journal.
        """
        await asyncio.to_thread(self._open, opened, fence, ends_at)

    def _open(self, opened: Opened, fence: int, ends_at: datetime) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        prune(self._path.parent, now())
        first = {"kind": "box", "sandbox": self._sandbox, "fence": fence, "ends_at": ends_at.isoformat()}
        second = {"kind": "opened", "fence": fence, **asdict(opened)}
        fresh = self._path.with_name(f"{self._path.name}.{self._sandbox}")
        fresh.write_bytes(_line(first) + _line(second))
        fresh.replace(self._path)

    @property
    def exists(self) -> bool:
        """Whether there is a journal of this very box."""
        found = _first(self._path)
        return found is not None and found["sandbox"] == self._sandbox

    async def take_over(self, fence: int) -> None:
        """Have the box from now on.

        Raises:
            EnvironmentFailure: somebody with a higher fence has it.
        """
        await asyncio.to_thread(self._in_lock, lambda file: self._taken(file, fence))

    def _taken(self, file: IO[bytes], fence: int) -> None:
        self._require(fence)
        self._write(file, {"kind": "attached", "fence": fence})

    async def begin(self, action: str, fence: int) -> JsonObject | None:
        """Say that an action begins.

        Returns:
            The outcome of an action that was done before, which is not to be done again; None for one that is new.

        Raises:
            EnvironmentFailure: it had begun before and nobody knows what it did, or somebody with a higher fence has the box.
        """
        return await asyncio.to_thread(self._in_lock, lambda file: self._begin(file, action, fence))

    def _begin(self, file: IO[bytes], action: str, fence: int) -> JsonObject | None:
        self._require(fence)
        if action in self._done:
            start, length = self._done[action]
            file.seek(start)
            outcome: JsonObject = json.loads(file.read(length))["outcome"]
            return outcome
        if action in self._begun:
            raise EnvironmentFailure(
                f"expected to know how action {action} ended, found only that it had begun: its worker ended before it",
                stage="agent",
                kind="action_unknown",
                retryable=True,
            )
        self._write(file, {"kind": "begun", "action": action, "fence": fence})
        return None

    async def done(self, action: str, outcome: JsonObject, fence: int) -> None:
        """Say what an action has brought about.

        Raises:
            EnvironmentFailure: somebody with a higher fence has had the box since; the outcome is nobody's.
        """
        record = {"kind": "done", "action": action, "outcome": outcome, "fence": fence}
        await asyncio.to_thread(self._in_lock, lambda file: self._finish(file, record, fence))

    def _finish(self, file: IO[bytes], record: JsonObject, fence: int) -> None:
        self._require(fence)
        self._write(file, record)

    async def is_held_under(self, fence: int) -> bool:
        """Whether nobody has taken the box over from the holder of a fence."""
        return await asyncio.to_thread(self._in_lock, lambda file: self._fence <= fence)

    async def remove(self) -> None:
        """Forget everything: the box is gone."""
        if self.exists:
            await asyncio.to_thread(self._path.unlink, missing_ok=True)

    def _require(self, fence: int) -> None:
        if fence < self._fence:
            raise EnvironmentFailure(
                f"expected nobody after fence {fence} to have sandbox {self._sandbox}, found fence {self._fence}: "
                "another worker has taken the session over",
                stage="agent",
                kind=FENCED,
                retryable=True,
            )

    def _in_lock(self, work: Callable[[IO[bytes]], R]) -> R:
        with self._locked() as file:
            return work(file)

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file, while no other process writes, with everything in it known."""
        try:
            file = self._path.open("r+b")
        except FileNotFoundError:
            raise _gone(f"expected the journal of sandbox {self._sandbox}, found none: the box was closed") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = json.loads(file.readline())["sandbox"]
            if found != self._sandbox:
                raise _gone(f"expected sandbox {self._sandbox} to be its session's box, found {found} opened after it")
            self._catch_up(file)
            yield file

    def _catch_up(self, file: IO[bytes]) -> None:
        file.seek(self._read_to)
        for line in file:
            if not line.endswith(b"\n"):
                # Whoever wrote it died over it.
                break
            self._learn(json.loads(line), len(line))
        file.seek(self._read_to)
        file.truncate()

    def _write(self, file: IO[bytes], record: JsonObject) -> None:
        line = _line(record)
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        self._learn(record, len(line))

    def _learn(self, record: dict[str, Any], length: int) -> None:
        if record["kind"] == "begun":
            self._begun.add(record["action"])
        elif record["kind"] == "done":
            self._done.setdefault(record["action"], (self._read_to, length))
        self._fence = max(self._fence, record["fence"])
        self._read_to += length


def find(folder: Path, session: str) -> Opened | None:
    """How a session's box on this host was opened; None if there is none, or none that got so far."""
    try:
        with _path(folder, session).open("rb") as file:
            file.readline()
            record = json.loads(file.readline())
        return Opened(record["handle"], record["world"])
    except (OSError, ValueError, KeyError):
        return None


def prune(folder: Path, at: datetime) -> None:
    """Remove journals of boxes whose time is over: those of holders that were killed."""
    for path in folder.glob(f"*{SUFFIX}*"):
        found = _first(path)
        if found is not None and datetime.fromisoformat(found["ends_at"]) < at:
            path.unlink(missing_ok=True)


def _path(folder: Path, session: str) -> Path:
    # A session may have any name.
    return folder / f"{sha256(session.encode()).hexdigest()[:32]}{SUFFIX}"


def _first(path: Path) -> dict[str, Any] | None:
    """What the first line of a journal says; None if it is not there or is none."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.readline())
        return found if {"sandbox", "ends_at"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _line(record: JsonObject) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _gone(message: str) -> EnvironmentFailure:
    return EnvironmentFailure(message, stage="agent", kind="world_gone", retryable=True)
