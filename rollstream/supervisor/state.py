"""Who supervises the workers of a data directory: a lock that says whether, a file that says who. A pair for each pool.

The lock alone decides, because the kernel releases it with its holder; the file outlives a crash and names what may be left.
"""

import os
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import BinaryIO

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from rollstream.errors import UsageError
from rollstream.settings import DEFAULT_POOL
from rollstream.supervisor.plan import WORKERS, pool_suffix


class AlreadyRunning(UsageError):
    """The data directory has a supervisor; two would run twice the workers."""


class ProcessRecord(BaseModel):
    """One process in the state file. A pid alone is given out again; with its start time it names one process."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    pid: int
    started_at: float
    """Unix time, as the kernel tells it."""
    workers: tuple[str, ...] = ()

    @classmethod
    def of(cls, pid: int, name: str, workers: tuple[str, ...] = ()) -> "ProcessRecord":
        return cls(name=name, pid=pid, started_at=psutil.Process(pid).create_time(), workers=workers)

    def process(self) -> psutil.Process | None:
        """The live process, or None."""
        try:
            found = psutil.Process(self.pid)
            # The kernel counts from boot; converted to Unix time, it moves with corrections of the clock.
            same = abs(found.create_time() - self.started_at) < 2.0
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class SupervisorState(BaseModel):
    """Content of `<data_dir>/workers.json`, or `workers.<pool>.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    supervisor: ProcessRecord
    bootstrap: str
    ready: bool = False
    """Whether every worker was ready once."""
    processes: tuple[ProcessRecord, ...] = ()

    def workers(self) -> list[str]:
        return sorted({worker for process in self.processes for worker in process.workers}, key=WORKERS.index)


def state_path(data_dir: Path, pool: str = DEFAULT_POOL) -> Path:
    return data_dir / f"workers{pool_suffix(pool)}.json"


def supervised_pools(data_dir: Path) -> list[str]:
    """Every pool that has a state file here, the default one first: whoever serves it may be gone."""
    names = [path.name.removeprefix("workers").removesuffix(".json") for path in data_dir.glob("workers*.json")]
    return sorted((name.removeprefix(".") or DEFAULT_POOL for name in names), key=lambda pool: (pool != DEFAULT_POOL, pool))


def logs_dir(data_dir: Path) -> Path:
    return data_dir / "logs"


def read_state(data_dir: Path, pool: str = DEFAULT_POOL) -> SupervisorState | None:
    """What the state file says, whether or not it is still true; None if there is none that we understand."""
    try:
        return SupervisorState.model_validate_json(state_path(data_dir, pool).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def write_state(data_dir: Path, state: SupervisorState, pool: str = DEFAULT_POOL) -> None:
    """Publish `state` so that a reader sees all of it or nothing."""
    path = state_path(data_dir, pool)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def clear_state(data_dir: Path, pool: str = DEFAULT_POOL) -> None:
    state_path(data_dir, pool).unlink(missing_ok=True)


def running(data_dir: Path, pool: str = DEFAULT_POOL) -> SupervisorState | None:
    """The state of the live supervisor of a pool in a data directory, or None."""
    state = read_state(data_dir, pool)
    return state if state is not None and state.supervisor.process() is not None else None


class SupervisorLock:
    """Held by the one supervisor of a pool in a data directory; the kernel releases it when that dies, however it dies."""

    def __init__(self, data_dir: Path, pool: str = DEFAULT_POOL) -> None:
        self._data_dir = data_dir
        self._pool = pool
        self._file: BinaryIO | None = None

    def __enter__(self) -> "SupervisorLock":
        """Take the lock.

        Raises:
            AlreadyRunning: another supervisor holds it.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True)
        file = (self._data_dir / f"workers{pool_suffix(self._pool)}.lock").open("ab")
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            file.close()
            state = running(self._data_dir, self._pool)
            of_pool = "" if self._pool == DEFAULT_POOL else f" for pool {self._pool}"
            who = "are being started" if state is None else f"run already (pid {state.supervisor.pid})"
            raise AlreadyRunning(
                f"the workers of {self._data_dir}{of_pool} {who}: publish to them, or stop them with `rollstream down`"
            ) from None
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def stop_running(data_dir: Path, grace_s: float, pool: str = DEFAULT_POOL) -> list[str]:
    """End the supervisor of a pool in a data directory and whatever workers it left behind.

    Returns:
        The workers that were stopped.
    """
    state = read_state(data_dir, pool)
    if state is None:
        return []
    found = False
    # The supervisor first: it stops its workers itself, and would start them again if they went before it.
    for record in (state.supervisor, *state.processes):
        if (process := record.process()) is not None:
            found = True
            _end(process, grace_s)
    clear_state(data_dir, pool)
    return state.workers() if found else []


def _end(process: psutil.Process, grace_s: float) -> None:
    try:
        process.terminate()
        try:
            process.wait(grace_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(grace_s)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        raise UsageError(f"process {process.pid} belongs to another user and was not stopped") from None
