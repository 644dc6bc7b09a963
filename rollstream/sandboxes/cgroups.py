"""Limits of a group of processes, as the kernel holds them: control groups, of version 1 or 2, for root.

Made under a directory of our own in each hierarchy, and removed when the last process has left.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.sandbox import SandboxSpec

ROOT = Path("/sys/fs/cgroup")
PARENT = "rollstream"
PERIOD_US = 100_000
CONTROLLERS = ("memory", "pids", "cpu")
REMOVAL_S = 5.0


class CgroupsUnusable(Exception):
    """This machine does not let us make control groups; the message says why."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where control groups can be made on this machine."""

    root: Path
    version: int

    @classmethod
    def of_machine(cls, root: Path = ROOT) -> "Cgroups":
        """What there is, made ready.

        Raises:
            CgroupsUnusable: no rights, or a controller is missing.
        """
        found = cls(root, 2 if (root / "cgroup.controllers").exists() else 1)
        try:
            found._prepare()
        except OSError as error:
            raise CgroupsUnusable(f"cannot make control groups under {root}: {error.strerror or error}") from error
        return found

    def _prepare(self) -> None:
        for folder in self._parents():
            if self.version == 1 and not folder.parent.is_dir():
                raise FileNotFoundError(2, f"no controller {folder.parent.name}")
            folder.mkdir(exist_ok=True)
        if self.version == 2:
            # Controllers reach a group only if all groups above it hand them on.
            enable = " ".join(f"+{name}" for name in CONTROLLERS)
            for folder in (self.root, *self._parents()):
                (folder / "cgroup.subtree_control").write_text(enable)

    def _parents(self) -> list[Path]:
        return [self.root / name / PARENT for name in CONTROLLERS] if self.version == 1 else [self.root / PARENT]

    def group(self, name: str) -> "Cgroup":
        return Cgroup(self.version, tuple(parent / name for parent in self._parents()))


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One group: a directory, or one for each controller."""

    version: int
    folders: tuple[Path, ...]

    def create(self, spec: SandboxSpec) -> None:
        for folder in self.folders:
            folder.mkdir()
        for name, value in limits(spec, self.version):
            # Swap is accounted for only where the kernel was told to.
            with contextlib.suppress(FileNotFoundError) if "sw" in name else contextlib.nullcontext():
                self._file(name).write_text(str(value))

    def _file(self, name: str) -> Path:
        controller = name.partition(".")[0]
        index = CONTROLLERS.index(controller) if self.version == 1 and controller in CONTROLLERS else 0
        return self.folders[index] / name

    def procs_files(self) -> list[Path]:
        """Where a process writes itself to join."""
        return [folder / "cgroup.procs" for folder in self.folders]

    def oom_kills(self) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        with contextlib.suppress(OSError):
            words = dict(line.split() for line in self._file(name).read_text().splitlines())
            return int(words.get("oom_kill", 0))
        return 0

    def pids(self) -> list[int]:
        found = set()
        for path in self.procs_files():
            with contextlib.suppress(OSError):
                found |= {int(line) for line in path.read_text().split()}
        return sorted(found)

    def remove(self) -> None:
        """Kill what is left in the group, and remove it. Nothing happens if it is gone."""
        deadline = time.monotonic() + REMOVAL_S
        while any(folder.exists() for folder in self.folders):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if time.monotonic() > deadline:
                raise OSError(f"control group {self.folders[0]} does not become empty")
            time.sleep(0.01)


def limits(spec: SandboxSpec, version: int) -> Iterator[tuple[str, int | str]]:
    """File names and what is written to them, in this order."""
    if spec.memory_mib is not None:
        memory = spec.memory_mib * 2**20
        if version == 1:
            yield "memory.limit_in_bytes", memory
            yield "memory.memsw.limit_in_bytes", memory
        else:
            yield "memory.max", memory
            yield "memory.swap.max", 0
    if spec.pids is not None:
        yield "pids.max", spec.pids
    if spec.cpus is not None:
        quota = max(1_000, round(spec.cpus * PERIOD_US))
        if version == 1:
            yield "cpu.cfs_period_us", PERIOD_US
            yield "cpu.cfs_quota_us", quota
        else:
            yield "cpu.max", f"{quota} {PERIOD_US}"
