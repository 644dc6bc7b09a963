"""The worker processes themselves: started, watched, restarted, stopped.

A worker that dies is started again, because nothing is lost with it: the log hands its work to its successor. Only one that
keeps dying at its start ends the whole, since that never mends itself. Workers get a session of their own, so that a Ctrl-C
reaches the supervisor alone and they are asked to stop once, in order.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.errors import RollstreamError
from rollstream.settings import DEFAULT_POOL
from rollstream.supervisor.plan import FAILED_STARTS_ALLOWED, ProcessSpec, Restarts, ready_worker
from rollstream.supervisor.state import ProcessRecord, SupervisorState, clear_state, logs_dir, write_state

MAX_LOG_BYTES = 32 * 1024 * 1024
"""A log over this is set aside once at the next start of its process."""

# Runs in the child in the worker's place until it is tied to us: the kernel then sends SIGTERM (15) when we die, however
# we die. A hook between fork and exec would do the same, but may deadlock when this process has threads.
_TIE = """
import os, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


class WorkersFailed(RollstreamError):
    """A worker cannot be kept alive, or was not ready in time. The message ends with its last log lines."""


@dataclass(slots=True)
class _Child:
    """One process slot: what runs in it now, and when it runs again."""

    spec: ProcessSpec
    restarts: Restarts = field(default_factory=Restarts)
    process: "subprocess.Popen[bytes] | None" = None
    record: ProcessRecord | None = None
    launched_at: float = 0.0
    due_at: float = 0.0
    log_position: int = 0
    unfinished: bytes = b""
    ready: set[str] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return self.process is not None and self.ready.issuperset(self.spec.workers)


class Supervisor:
    """Keeps the processes of a plan alive. Call `start`, then `poll` several times a second, then `stop`.

    Args:
        command: the command line of one process.
        environment: added to this process's own, for all of them.
        say: is told in one line whenever something happened to a process.
        pool: which one the workers serve; each has a supervisor of its own.
    """

    def __init__(
        self,
        data_dir: Path,
        specs: Sequence[ProcessSpec],
        command: Callable[[ProcessSpec], Sequence[str]],
        *,
        bootstrap: str,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        pool: str = DEFAULT_POOL,
    ) -> None:
        self._data_dir = data_dir
        self._pool = pool
        self._command = command
        self._bootstrap = bootstrap
        self._environment = dict(environment)
        self._say = say
        self._children = [_Child(spec) for spec in specs]
        self._was_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether every worker of every process has said that it is ready."""
        return all(child.is_ready for child in self._children)

    def start(self) -> None:
        """Start all processes; they are not ready yet."""
        logs_dir(self._data_dir).mkdir(parents=True, exist_ok=True)
        for child in self._children:
            self._launch(child)
        self._write_state()

    def poll(self) -> None:
        """Look at every process once, and start again what has died.

        Raises:
            WorkersFailed: one died too often at its start.
        """
        for child in self._children:
            if child.process is None:
                if time.monotonic() >= child.due_at:
                    self._launch(child)
                    self._write_state()
            elif child.process.poll() is not None:
                self._bury(child)
            elif not child.is_ready:
                self._read_log(child)
                if child.is_ready and self._was_ready:
                    self._say(f"{child.spec.name} ready again")
        if self.is_ready and not self._was_ready:
            self._was_ready = True
            self._write_state()

    def await_ready(self, timeout_s: float) -> None:
        """Poll until all are ready.

        Raises:
            WorkersFailed: one died too often, or was not ready in time.
        """
        give_up = time.monotonic() + timeout_s
        while not self.is_ready:
            self.poll()
            if time.monotonic() > give_up:
                late = next(child for child in self._children if not child.is_ready)
                missing = ", ".join(worker for worker in late.spec.workers if worker not in late.ready)
                raise WorkersFailed(f"{missing} not ready after {timeout_s:g} s; {self._last_lines(late.spec)}")
            time.sleep(0.02)

    def stop(self, grace_s: float) -> None:
        """Ask all to stop, and end those that have not after `grace_s`. An interrupt meanwhile ends them at once."""
        alive = [child.process for child in self._children if child.process is not None and child.process.poll() is None]
        try:
            for process in alive:
                process.terminate()
            give_up = time.monotonic() + grace_s
            while any(process.poll() is None for process in alive) and time.monotonic() < give_up:
                time.sleep(0.05)
        finally:
            for child in self._children:
                if child.process is not None and child.process.poll() is None:
                    self._say(f"{child.spec.name} did not stop and is killed")
                    _kill_group(child.process)
                    child.process.wait()
                child.process = None
            clear_state(self._data_dir, self._pool)

    def _launch(self, child: _Child) -> None:
        log = self._log_path(child.spec)
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        command = [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *self._command(child.spec)]
        with log.open("ab") as output:
            child.log_position = output.seek(0, os.SEEK_END)
            child.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        child.record = ProcessRecord.of(child.process.pid, child.spec.name, child.spec.workers)
        child.launched_at = time.monotonic()
        child.unfinished = b""
        child.ready = set()

    def _bury(self, child: _Child) -> None:
        assert child.process is not None
        self._read_log(child)
        code, was_ready = child.process.returncode, child.is_ready
        _kill_group(child.process)
        child.process = child.record = None
        delay = child.restarts.after_death(was_ready=was_ready, lived_s=time.monotonic() - child.launched_at)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        if delay is None:
            raise WorkersFailed(
                f"{child.spec.name} ended {how}, {FAILED_STARTS_ALLOWED} times in a row at its start; "
                f"{self._last_lines(child.spec)}"
            )
        child.due_at = time.monotonic() + delay
        self._say(f"{child.spec.name} ended {how}; starting it again{f' in {delay:g} s' if delay else ''}")
        self._write_state()

    def _read_log(self, child: _Child) -> None:
        """Take in what the process logged since the last look: the lines that say a worker is ready."""
        with self._log_path(child.spec).open("rb") as log:
            log.seek(child.log_position)
            *lines, child.unfinished = (child.unfinished + log.read()).split(b"\n")
            child.log_position = log.tell()
        child.ready.update(worker for line in lines if (worker := ready_worker(line)) is not None)

    def _write_state(self) -> None:
        state = SupervisorState(
            supervisor=ProcessRecord.of(os.getpid(), "supervisor"),
            bootstrap=self._bootstrap,
            ready=self._was_ready,
            processes=tuple(child.record for child in self._children if child.record is not None),
        )
        write_state(self._data_dir, state, self._pool)

    def _log_path(self, spec: ProcessSpec) -> Path:
        return logs_dir(self._data_dir) / f"{spec.name}.log"

    def _last_lines(self, spec: ProcessSpec) -> str:
        lines = last_lines(self._log_path(spec))
        return f"the last lines of {self._log_path(spec)}:\n" + "\n".join(lines) if lines else "its log is empty"


def last_lines(path: Path, count: int = 12) -> list[str]:
    """The last lines of a log; none if it does not exist."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 1000 * count))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End the process and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
