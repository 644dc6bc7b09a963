"""Child processes under measurement: what CPU they used, how much memory they held at most."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SAMPLE_S = 0.2


@dataclass(slots=True)
class Usage:
    """What a set of processes used, children included."""

    cpu_s: float
    peak_rss_mib: float
    processes: int
    cpu_by_name: dict[str, float]
    """Seconds of each child, its own children included."""
    rss_by_name: dict[str, float]
    """MiB of each child at the moment when all together held most."""


@dataclass(slots=True)
class Measured:
    """A set of named child processes, sampled until `stop`."""

    log_dir: Path
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _cpu: dict[int, float] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _baseline: dict[int, float] = field(default_factory=dict)
    _peak_rss: float = 0.0
    _peak_count: int = 0
    _rss_by_name: dict[str, float] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)
    _sampler: threading.Thread | None = None

    def start(self, name: str, *module: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start `python -m module …` with its output in `log_dir/name.log`."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with (self.log_dir / f"{name}.log").open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", *module],
                env=dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[name] = child
        return child

    def wait_for_line(self, name: str, text: str, deadline_s: float = 60.0) -> str:
        """The first line of a child's log that contains `text`."""
        ends = time.monotonic() + deadline_s
        while time.monotonic() < ends:
            for line in (self.log_dir / f"{name}.log").read_text(errors="replace").splitlines():
                if text in line:
                    return line
            if self._children[name].poll() is not None:
                break
            time.sleep(0.05)
        tail = (self.log_dir / f"{name}.log").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{name} did not say {text!r}:\n{tail}")

    def begin(self) -> None:
        """Count from now."""
        self._baseline = {process.pid: _cpu_s(process) for process in self._alive()}
        self._peak_rss, self._peak_count = 0.0, 0
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def usage(self) -> Usage:
        """What was used since `begin`."""
        self._take()
        by_name: dict[str, float] = {}
        for pid, seconds in self._cpu.items():
            name = self._names.get(pid, "?")
            by_name[name] = by_name.get(name, 0.0) + seconds - self._baseline.get(pid, 0.0)
        return Usage(sum(by_name.values()), self._peak_rss, self._peak_count, by_name, self._rss_by_name)

    def cpu_s(self, name: str) -> float:
        """Of a child and its own children until now, the ended ones included."""
        found = 0.0
        for process in family(self._children[name].pid):
            times = process.cpu_times()
            found += float(times.user + times.system + times.children_user + times.children_system)
        return found

    def stop(self) -> None:
        self._done.set()
        for child in self._children.values():
            if child.poll() is None:
                child.terminate()
        for child in self._children.values():
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _alive(self) -> list[psutil.Process]:
        found = []
        for name, child in self._children.items():
            try:
                process = psutil.Process(child.pid)
                family = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            self._names.update((member.pid, name) for member in family)
            found += family
        return found

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self._take()

    def _take(self) -> None:
        held: dict[str, float] = {}
        count = 0
        for process in self._alive():
            try:
                self._cpu[process.pid] = _cpu_s(process)
                name = self._names[process.pid]
                held[name] = held.get(name, 0.0) + process.memory_info().rss / 2**20
                count += 1
            except psutil.NoSuchProcess:
                continue
        if sum(held.values()) > self._peak_rss:
            self._peak_rss, self._rss_by_name = sum(held.values()), held
        self._peak_count = max(self._peak_count, count)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def held_mb(pid: int) -> float:
    """What a process and those that it has started hold, in millions of bytes: what several of them share is counted once."""
    found = 0.0
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_full_info().pss / 1e6
    return found


def peak_rss_mb(pid: int) -> float:
    """The most memory that a process ever held, in millions of bytes. `ru_maxrss` would have what its parent held, too."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
