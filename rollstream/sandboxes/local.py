"""No box at all: commands are processes of this machine, in a temporary directory, with the rights of whoever runs this.

For machines where nothing else works, and code that is trusted. It enforces nothing, and so refuses every specification
that asks for a limit or for no network.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from rollstream.cancelling import shielded
from rollstream.errors import Refused, Stage
from rollstream.sandboxes.base import BaseSandbox, Command
from rollstream.sandboxes.capture import Captures
from rollstream.sandboxes.processes import NotStarted, run_process
from rollstream.sandboxes.protocol import Enforces, FoundSandbox, Mount, SandboxTag, refuse_unless_enforced
from rollstream.sandboxes.records import make_own, recorded, write_record
from schemas.sandbox import SandboxSpec, User

CLOSING = "closing"
MARK = "ROLLSTREAM_LOCAL_BOX"
"""Variable that tells the processes of a box from all others."""
SWEEPS = 100


class LocalProvider:
    """Makes directories."""

    name: ClassVar[str] = "local"
    at_best: ClassVar[Enforces] = Enforces(isolates=False, images=False)

    def __init__(self, stage: Stage, *, state_dir: Path | None = None) -> None:
        self.stage: Stage = stage
        self.state_dir = state_dir or Path(tempfile.gettempdir()) / f"rollstream-local-{os.geteuid()}"

    async def enforces(self) -> Enforces:
        return self.at_best

    async def host(self) -> str:
        return f"{socket.gethostname()}:{self.state_dir}"

    def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        tag: SandboxTag,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
    ) -> "LocalSandbox":
        return LocalSandbox(self, sandbox_id, spec, tag, mounts)

    async def found(self) -> list[FoundSandbox]:
        return await asyncio.to_thread(lambda: [*recorded(self.state_dir)])

    async def destroy(self, sandbox_id: str) -> None:
        folder = self.state_dir / sandbox_id
        # Said first: a command that is killed here did not fail by itself.
        with contextlib.suppress(OSError):
            (folder / CLOSING).touch()
        await asyncio.to_thread(kill_marked, sandbox_id)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def close(self) -> None:
        """There is nothing to let go of."""


class LocalSandbox(BaseSandbox):
    """A directory, and the processes that are marked as its own."""

    def __init__(
        self, provider: LocalProvider, sandbox_id: str, spec: SandboxSpec, tag: SandboxTag, mounts: Sequence[Mount] = ()
    ) -> None:
        super().__init__(sandbox_id, spec, provider.stage)
        self._provider = provider
        self._tag = tag
        self._mounts = mounts
        self._folder = provider.state_dir / sandbox_id
        self._asked = spec.workdir
        self.workdir = str(self._folder / "workspace")
        self._ends_at = 0.0

    @property
    def users(self) -> frozenset[User]:
        return frozenset({"agent"})

    def path(self, path: str) -> str:
        """As usual, and what was meant for the work directory that was asked for is found in the one there is."""
        if Path(path).is_relative_to(self._asked):
            path = str(Path(path).relative_to(self._asked))
        return super().path(path)

    async def start(self) -> None:
        sentence = await refuse_unless_enforced(self._provider, self.spec)
        if sentence is None and self._mounts:
            sentence = f"the sandbox provider local mounts nothing, found {self._mounts[0].source}: put it on the PATH"
        if sentence is not None:
            raise Refused(sentence, stage=self._stage, kind="sandbox_policy")
        try:
            self._make_folders()
        except OSError as error:
            raise self.unavailable(f"cannot be made: {error}") from error
        self._ends_at = asyncio.get_running_loop().time() + self.spec.ttl_s
        try:
            await self.write_files()
        except BaseException:
            await shielded(self.close())
            raise

    def _make_folders(self) -> None:
        make_own(self._provider.state_dir)
        Path(self.workdir).mkdir(parents=True)
        (self._folder / "home").mkdir()
        write_record(self._folder, self._tag)

    async def run(self, command: Command, captures: Captures) -> int:
        self._require_alive()
        env = {**command.env, "HOME": str(self._folder / "home"), MARK: self.id}
        left_s = self._ends_at - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s) as deadline:
                code = await run_process(command.argv, captures, stdin=command.stdin, env=env, cwd=command.cwd)
        except TimeoutError:
            if not deadline.expired():
                raise
            await self.kill()
            raise self.unavailable(f"it is gone: its {self.spec.ttl_s:g} s are over") from None
        except NotStarted as failed:
            error = failed.error
            if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
                raise self.unavailable(f"no process can be started: {error}") from error
            await captures.add("stderr", f"{error.filename or command.argv[0]}: {error.strerror}\n".encode())
            return 126 if isinstance(error, PermissionError) else 127
        if code >= 128:
            self._require_alive()
        return code

    def _require_alive(self) -> None:
        closed = not Path(self.workdir).is_dir() or (self._folder / CLOSING).exists()
        if closed or asyncio.get_running_loop().time() > self._ends_at:
            raise self.unavailable("it is gone: not started, closed, or its time is over")

    async def kill(self, user: User | None = None) -> None:
        if not await asyncio.to_thread(kill_marked, self.id):
            raise self.unavailable("its processes make new ones faster than they can be killed")

    async def oom_kills(self) -> int:
        return 0

    async def close(self) -> None:
        await self._provider.destroy(self.id)


def kill_marked(sandbox_id: str) -> bool:
    """Kill every process of a box: first all are stopped, so that none makes another. False if they win."""
    stopped: dict[int, psutil.Process] = {}
    for _ in range(SWEEPS):
        fresh = [process for process in _marked(sandbox_id) if process.pid not in stopped]
        if not fresh:
            break
        for process in fresh:
            with contextlib.suppress(psutil.Error):
                process.suspend()
                stopped[process.pid] = process
    else:
        return False
    for process in stopped.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(stopped.values()), timeout=1)
    return True


def _marked(sandbox_id: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == sandbox_id:
                yield process
