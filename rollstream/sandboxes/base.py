"""What boxes of every provider have in common: how a command is cut short, and how files travel.

Providers say how a command is run and how everything of a user is killed; files go through `tar` in the box.
"""

import asyncio
import contextlib
import shutil
import tarfile
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from rollstream.cancelling import shielded
from rollstream.errors import Refused, SandboxUnavailable, Stage
from rollstream.sandboxes import transfer
from rollstream.sandboxes.capture import Captures
from rollstream.sandboxes.protocol import (
    MAX_OUTPUT_BYTES,
    Downloaded,
    DownloadTooLarge,
    ExecResult,
    OnOutput,
    Stdin,
    Stream,
)
from schemas.sandbox import SandboxSpec, User

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
TRANSFER_TIMEOUT_S = 600.0
SPOOLED = 8 * 1024 * 1024
"""Bytes of an archive that are held in memory; a larger one goes through a temporary file."""
GNU_TAR_CHANGED = 1
"""Exit code of GNU tar when a file changed while it was read."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command, with everything decided."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    user: User
    cwd: str
    stdin: Stdin


class BaseSandbox(ABC):
    """A box whose provider fills in the abstract methods."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, stage: Stage) -> None:
        self.id = sandbox_id
        self.workdir = spec.workdir
        self.spec = spec
        self._stage = stage
        self._ooms = 0

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def run(self, command: Command, captures: Captures) -> int:
        """Run a command to its end, whatever that takes; 128 + the signal that killed it."""

    @abstractmethod
    async def kill(self, user: User | None = None) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def oom_kills(self) -> int:
        """How often the kernel has killed something in the box for want of memory."""

    @property
    @abstractmethod
    def users(self) -> frozenset[User]: ...

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
        user = user or self.spec.user
        if user not in self.users:
            known = ", ".join(sorted(self.users))
            raise Refused(f"expected a user that the box has ({known}), found {user}", stage=self._stage, kind="sandbox_policy")
        home = "/root" if user == "root" else "/home/agent"
        merged = {"PATH": PATH, "HOME": home, "LANG": "C.UTF-8", **self.spec.env, **(env or {})}
        command = Command(tuple(argv), merged, user, self.path(cwd or "."), stdin)
        captures = Captures(max_output_bytes, on_output)
        started = time.monotonic()
        code: int | None = None
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                code = await self.run(command, captures)
        except BaseException as error:
            timed_out = isinstance(error, TimeoutError) and deadline.expired()
            await shielded(self._cut_short(user, error))
            if not timed_out:
                raise
        ooms = self._ooms if code == 0 else await self.oom_kills()
        oom_killed, self._ooms = ooms > self._ooms, ooms
        took_s = time.monotonic() - started
        return ExecResult(code, captures.stdout.output(), captures.stderr.output(), timed_out, oom_killed, took_s)

    async def _cut_short(self, user: User, error: BaseException) -> None:
        if isinstance(error, SandboxUnavailable | asyncio.CancelledError):
            # The box is gone, or going, maybe since whoever cancelled this has given it up: what can be killed is, and the
            # first failure is the one that is told.
            with contextlib.suppress(SandboxUnavailable):
                await self.kill(user)
        else:
            await self.kill(user)

    def path(self, path: str) -> str:
        """An absolute path in the box."""
        return str(PurePosixPath(self.workdir) / path)

    def unavailable(self, message: str) -> SandboxUnavailable:
        return SandboxUnavailable(f"sandbox {self.id}: {message}", stage=self._stage)

    async def upload(self, source: Path, target: str) -> None:
        with tempfile.SpooledTemporaryFile(max_size=SPOOLED) as archive:
            await asyncio.to_thread(transfer.pack, source, PurePosixPath(self.path(target)).name, archive)
            await self._put(archive, target)

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        with tempfile.SpooledTemporaryFile(max_size=SPOOLED) as archive:
            transfer.pack_text(PurePosixPath(self.path(path)).name, content, mode, archive)
            await self._put(archive, path)

    async def write_files(self) -> None:
        """Write the specification's files.

        Raises:
            Refused: they cannot be written, say because they are larger than the disk.
        """
        for path, text in self.spec.files.items():
            try:
                await self.write(path, text.encode())
            except OSError as error:
                raise Refused(str(error), stage=self._stage, kind="sandbox_files") from error

    async def _put(self, archive: IO[bytes], target: str) -> None:
        archive.seek(0)
        # Not `tar -C`: a directory in the way of `mkdir -p` then is the command's failure, and said.
        script = 'mkdir -p -- "$1" && cd -- "$1" && exec tar -xpf - --no-same-owner'
        folder = str(PurePosixPath(self.path(target)).parent)
        argv = ["sh", "-c", script, "sh", folder]
        done = await self.exec(argv, stdin=_aiter(archive), timeout_s=TRANSFER_TIMEOUT_S, max_output_bytes=4096)
        if not done.ok:
            raise OSError(f"expected to write {target} in sandbox {self.id}, found: {_why(done)}")

    async def download(self, path: str, into: Path, *, max_bytes: int, max_files: int = 100_000) -> Downloaded:
        try:
            with await self._fetch(path, max_bytes, max_files) as archive:
                return await asyncio.to_thread(transfer.unpack, archive, into, max_bytes=max_bytes, max_files=max_files)
        except FileNotFoundError:
            raise FileNotFoundError(f"sandbox {self.id} has no {path}") from None
        except tarfile.TarError as error:
            await asyncio.to_thread(shutil.rmtree, into, ignore_errors=True)
            raise self.unavailable(f"expected a tar of {path}, found {error}") from error
        except DownloadTooLarge as error:
            await asyncio.to_thread(_remove, into)
            raise DownloadTooLarge(f"{path} of sandbox {self.id}: {error}") from None

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        with tempfile.TemporaryDirectory(prefix="rollstream-read-") as folder:
            target = Path(folder) / "file"
            await self.download(path, target, max_bytes=max_bytes, max_files=1)
            if not target.is_file():
                raise FileNotFoundError(f"sandbox {self.id} has no regular file {path}")
            return target.read_bytes()

    async def _fetch(self, path: str, max_bytes: int, max_files: int) -> IO[bytes]:
        """The tar of a path in the box, which the caller closes."""
        room = max_bytes + max_files * 2048 + 20_480
        archive = tempfile.SpooledTemporaryFile(max_size=SPOOLED)  # noqa: SIM115 (the caller closes it)
        size = 0

        async def keep(stream: Stream, chunk: bytes) -> None:
            nonlocal size
            if stream == "stdout":
                size += len(chunk)
                if size > room:
                    raise DownloadTooLarge(f"expected at most {max_bytes} bytes, found more")
                archive.write(chunk)

        try:
            target = PurePosixPath(self.path(path))
            script = '[ -e "$2" ] || [ -L "$2" ] || exit 44; cd -- "$1" && exec tar -cf - -- "$2"'
            argv = ["sh", "-c", f'cd -- "$1" || exit 44; {script}', "sh", str(target.parent), target.name or "."]
            done = await self.exec(argv, timeout_s=TRANSFER_TIMEOUT_S, max_output_bytes=4096, on_output=keep)
            if done.exit_code == 44:
                raise FileNotFoundError(path)
            if done.exit_code not in (0, GNU_TAR_CHANGED):
                raise OSError(f"expected to read {path} in sandbox {self.id}, found: {_why(done)}")
            archive.seek(0)
        except BaseException:
            archive.close()
            raise
        return archive


async def _aiter(archive: IO[bytes]) -> AsyncIterator[bytes]:
    for chunk in transfer.chunks(archive):
        yield chunk


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _why(done: ExecResult) -> str:
    if done.timed_out:
        return f"nothing within {TRANSFER_TIMEOUT_S:g} s"
    lines = done.stderr.text.strip().splitlines()
    return lines[0] if lines else f"exit code {done.exit_code}"
