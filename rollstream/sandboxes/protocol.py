"""What a sandbox is, whoever provides it.

A command that fails is a result. `SandboxUnavailable` means that the box or its engine failed, which says nothing about
the command and can be tried again; it is never how a command's own failure is told.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

from schemas.sandbox import SandboxHolder, SandboxSpec, User

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], Awaitable[None]]
Stdin = bytes | AsyncIterator[bytes]
Limit = Literal["cpus", "memory_mib", "pids", "disk_mib"]

MAX_OUTPUT_BYTES = 1024 * 1024
"""Kept of each stream of a command that does not say otherwise."""
GATEWAY_SOCKET = "/run/gateway.sock"
"""Where a box with the network `gateway` finds it."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command wrote to one stream: all of it, or its beginning and its end."""

    head: bytes = b""
    tail: bytes = b""
    """What came last, if something between the two was left out."""
    size: int = 0
    """Bytes in all."""

    @property
    def truncated(self) -> bool:
        return self.size > len(self.head) + len(self.tail)

    @property
    def data(self) -> bytes:
        """What was kept, with a marker that gives the original size where something was left out."""
        if not self.truncated:
            return self.head + self.tail
        kept = len(self.head) + len(self.tail)
        return self.head + f"\n[truncated by rollstream: {self.size} bytes in all, {kept} kept]\n".encode() + self.tail

    @property
    def text(self) -> str:
        r"""`data` as text; a byte that is not UTF-8 is spelled out as `\xNN`."""
        return self.data.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended.

    Attributes:
        exit_code: 128 + the signal that killed it; 126 or 127 if it could not be run; None if it was cut short.
        timed_out: it did not end in time, and everything that its user ran in the box was killed.
        oom_killed: the kernel killed something in the box for want of memory since a command last failed.
    """

    exit_code: int | None
    stdout: Output
    stderr: Output
    timed_out: bool = False
    oom_killed: bool = False
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What came out of a box.

    Attributes:
        files: how many regular files were written.
        size: of their contents, in bytes.
        left_out: links that lead out of the tree, devices, sockets, pipes: never written.
    """

    files: int
    size: int
    left_out: tuple[str, ...] = ()


class Sandbox(Protocol):
    """One box. Paths may be absolute or relative to `workdir`."""

    id: str
    workdir: str
    """Where it is in the box; not always what the specification asked for."""

    async def start(self) -> None:
        """Make the box; commands can run when this returns. What a failed start left behind is removed.

        Raises:
            SandboxUnavailable: the provider failed; a retry can help.
            Refused: it cannot be as specified (no such image, a limit that cannot be enforced).
        """
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: Stdin = b"",
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a command to its end. What it leaves running in the background stays.

        Several may run at once. If the call is cancelled, or `on_output` raises, everything of the user's is killed.

        Args:
            env: on top of the specification's.
            timeout_s: when it has passed, everything that the user runs in the box is killed, whatever it did to get away.
            max_output_bytes: kept of each stream; the rest is counted.
            on_output: gets every byte of both streams as it comes; the command waits while it does not return.

        Raises:
            SandboxUnavailable: the box is gone or its engine does not answer.
            Refused: the provider has no such user.
        """
        ...

    async def kill(self, user: User | None = None) -> None:
        """End everything that a user runs in the box; None ends both users' processes."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or a whole tree of this machine to `target`, owned by the specification's user. Links stay links.

        Raises:
            OSError: the box does not take it: its disk is full, or a file is in the way.
        """
        ...

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write one file; directories that are missing are made. Raises as `upload` does."""
        ...

    async def download(self, path: str, into: Path, *, max_bytes: int, max_files: int = 100_000) -> Downloaded:
        """Copy a file or a tree out of the box, to `into`, which must not exist. No link is ever followed, here or there.

        Raises:
            FileNotFoundError: there is no such path in the box.
            DownloadTooLarge: it holds more than it may; nothing is kept.
        """
        ...

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """The content of one regular file. Raises as `download` does."""
        ...

    async def close(self) -> None:
        """Destroy the box and everything in it. Can be repeated, and is safe before `start`."""
        ...


class DownloadTooLarge(Exception):
    """A path in a box holds more bytes or files than the caller takes."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the provider's machine that a box may read. Comes from settings, never from a record."""

    source: Path
    """Every user of the machine must be able to reach and read it."""
    target: str
    """An absolute path in the box."""


@dataclass(frozen=True, slots=True)
class SandboxTag:
    """What every box carries, so that whoever finds it knows whose it is."""

    installation: str
    host: str
    holder: SandboxHolder
    expires_at: datetime
    """Of the first lease; renewals stand in the log."""


@dataclass(frozen=True, slots=True)
class FoundSandbox:
    """A box that exists, whoever made it."""

    id: str
    tag: SandboxTag
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Enforces:
    """Which limits and network policies a provider holds here, on this machine."""

    limits: frozenset[Limit] = frozenset()
    networks: frozenset[str] = field(default_factory=lambda: frozenset({"public"}))
    users: frozenset[User] = frozenset({"agent"})
    isolates: bool = True
    """False if a command can reach what is outside of the box."""
    images: bool = True
    """Whether a box can be made of an image of the specification's."""


class SandboxProvider(Protocol):
    """Makes boxes of one kind. One per process."""

    name: ClassVar[str]
    at_best: ClassVar[Enforces]
    """What it can promise on a machine that has everything: what goes beyond is refused where a run is published."""

    async def enforces(self) -> Enforces:
        """What it can promise here.

        Raises:
            SandboxUnavailable: its engine does not answer, or something that it needs is not installed.
        """
        ...

    async def host(self) -> str:
        """The machine that boxes are made on: not this one if the engine is elsewhere."""
        ...

    def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        tag: SandboxTag,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
    ) -> Sandbox:
        """A box that is not started yet.

        Args:
            gateway: the socket on this machine that a box with the network `gateway` is given.
            mounts: what it may read beside its image. A provider without mounts refuses them at the start.
        """
        ...

    async def found(self) -> list[FoundSandbox]:
        """Every box of this provider on its host, of whatever installation."""
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """Remove a box that somebody else may have made; nothing happens if there is none."""
        ...

    async def close(self) -> None:
        """Let go of clients. Boxes stay."""
        ...


@runtime_checkable
class AttachingProvider(Protocol):
    """A provider whose boxes outlive the process that started them. Optional."""

    async def attach(self, found: FoundSandbox, spec: SandboxSpec) -> Sandbox:
        """A started box of this host, whoever started it; what runs in it goes on.

        Args:
            found: as `found` tells of it.
            spec: that it was started with.

        Raises:
            SandboxUnavailable: it has ended.
        """
        ...


async def refuse_unless_enforced(provider: SandboxProvider, spec: SandboxSpec) -> str | None:
    """The sentence why a provider cannot hold a box to its specification here, or None if it can."""
    return unenforced(provider.name, await provider.enforces(), spec)


def unenforced(provider: str, can: Enforces, spec: SandboxSpec) -> str | None:
    """The sentence why what a provider promises is not enough for a specification, or None if it is."""
    if spec.image is not None and not can.images:
        return f"the sandbox provider {provider} runs the programs of its machine and no image, found {spec.image}: {_USE}"
    open_limits = [name for name in ("cpus", "memory_mib", "pids", "disk_mib") if getattr(spec, name) is not None]
    for limit in open_limits:
        if limit not in can.limits:
            return f"the sandbox provider {provider} cannot enforce {limit} here, found {getattr(spec, limit)}: {_USE}"
    if spec.network not in can.networks:
        known = ", ".join(sorted(can.networks))
        return f"the sandbox provider {provider} knows the networks {known}, found {spec.network}: {_USE}"
    if spec.user not in can.users:
        return f"the sandbox provider {provider} has no user {spec.user}: {_USE}"
    return None


_USE = "use another provider, or a specification that asks for less"
