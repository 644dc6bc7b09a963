"""Boxes without a daemon: namespaces by bubblewrap, limits by control groups, the programs of this machine.

A box is one bubblewrap process whose pid 1 waits for the box's time to be over; it dies with whoever started it. Commands
enter its namespaces (`enter.py`). What outlives a holder that was killed is a record and empty control groups, which
the reaper finds.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from rollstream.cancelling import shielded
from rollstream.errors import Refused, SandboxUnavailable, Stage
from rollstream.sandboxes import enter
from rollstream.sandboxes.base import BaseSandbox, Command
from rollstream.sandboxes.capture import Captures
from rollstream.sandboxes.cgroups import Cgroups, CgroupsUnusable
from rollstream.sandboxes.door import Door, Request
from rollstream.sandboxes.pids import kill_beside, kill_if_same, stat_of
from rollstream.sandboxes.processes import NotStarted
from rollstream.sandboxes.protocol import (
    GATEWAY_SOCKET,
    Enforces,
    FoundSandbox,
    Mount,
    SandboxTag,
    refuse_unless_enforced,
)
from rollstream.sandboxes.records import RECORD, make_own, read_record, recorded, write_record
from schemas.sandbox import SandboxSpec, User

START_TIMEOUT_S = 30.0
NETWORKS = frozenset({"none", "gateway", "public"})
FIRST_UID = 1_000_000_000
UIDS = 500_000_000
"""A box's uid on this machine is one of these many, by its id; nobody else has them."""
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; ulimit -c 0; exec "$@"'
"""Shell: join the control groups that are named before `--`, then become the command after it."""
KILLS = 20
"""How often a box is tried to be cleared before it counts as lost."""
KEEP = """
end=$(($(date +%s) + $1))
echo ready
while :; do
    now=$(date +%s)
    [ -n "$now" ] || continue
    [ "$now" -lt "$end" ] || exit 0
    sleep $((end - now))
done
"""
"""Shell: pid 1 of a box. The kernel lets nothing in the box kill it, but its `sleep` and its `date` may be."""
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "gitconfig": "[safe]\n\tdirectory = *\n[user]\n\tname = agent\n\temail = agent@sandbox.invalid\n",
}
OF_MACHINE = ("/etc/alternatives", "/etc/ca-certificates", "/etc/ld.so.cache", "/etc/ssl", "/lib32", "/libx32")


class BubblewrapProvider:
    """Makes boxes on this machine. As root, with all limits; otherwise only what namespaces alone can hold."""

    name: ClassVar[str] = "bubblewrap"
    at_best: ClassVar[Enforces] = Enforces(
        limits=frozenset({"cpus", "memory_mib", "pids", "disk_mib"}), networks=NETWORKS, images=False
    )

    def __init__(self, stage: Stage, *, state_dir: Path | None = None) -> None:
        self.stage: Stage = stage
        self.state_dir = state_dir or default_state_dir()
        self.cgroups: Cgroups | None = None
        self.door = Door()

    async def enforces(self) -> Enforces:
        if shutil.which("bwrap") is None:
            raise self.unavailable("the program bwrap is not installed: on Debian, `apt-get install bubblewrap`")
        if os.geteuid() != 0:
            return replace(self.at_best, limits=frozenset({"disk_mib"}))
        self.prepare()
        return self.at_best

    def prepare(self) -> None:
        """Find the control groups of this machine.

        Raises:
            SandboxUnavailable: it does not let us make any.
        """
        if self.cgroups is None:
            try:
                self.cgroups = Cgroups.of_machine()
            except CgroupsUnusable as error:
                raise self.unavailable(str(error)) from error

    def unavailable(self, message: str) -> SandboxUnavailable:
        return SandboxUnavailable(message, stage=self.stage)

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
    ) -> "BubblewrapSandbox":
        return BubblewrapSandbox(self, sandbox_id, spec, tag, gateway, mounts)

    async def found(self) -> list[FoundSandbox]:
        return await asyncio.to_thread(lambda: [*recorded(self.state_dir)])

    async def destroy(self, sandbox_id: str) -> None:
        if os.geteuid() == 0:
            self.prepare()
        try:
            await asyncio.to_thread(self._destroy, sandbox_id)
        except OSError as error:
            raise self.unavailable(f"sandbox {sandbox_id} cannot be removed: {error}") from error

    def _destroy(self, sandbox_id: str) -> None:
        folder = self.state_dir / sandbox_id
        record = read_record(folder)
        if record is not None and record.get("pid"):
            kill_if_same(record["pid"], record["start_ticks"])
        if self.cgroups is not None:
            self.cgroups.group(sandbox_id).remove()
        # Its record goes last: what cannot be removed now is found again.
        with contextlib.suppress(FileNotFoundError):
            for path in [*folder.iterdir()]:
                if path.name != RECORD:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        await self.door.close()


def default_state_dir() -> Path:
    """Where the boxes of this machine are recorded, whoever of the same user asks."""
    if os.geteuid() == 0:
        return Path("/run/rollstream/sandboxes")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"rollstream-sandboxes-{os.geteuid()}"


def private_above(path: Path, uid: int) -> Path | None:
    """The first directory on the way to a path that a user who owns none of it may not pass."""
    for folder in reversed(path.absolute().parents):
        found = folder.stat()
        if found.st_uid != uid and not found.st_mode & stat.S_IXOTH:
            return folder
    return None


class _Pipe:
    """A pipe whose ends are closed once each: a number that was closed may be somebody else's a moment later."""

    def __enter__(self) -> "_Pipe":
        self.read, self.write = os.pipe()
        self._open = [self.read, self.write]
        return self

    def close_write(self) -> None:
        self._open.remove(self.write)
        os.close(self.write)

    def __exit__(self, *raised: object) -> None:
        for fd in self._open:
            os.close(fd)


class BubblewrapSandbox(BaseSandbox):
    """One bubblewrap process and the commands that enter it."""

    def __init__(
        self,
        provider: BubblewrapProvider,
        sandbox_id: str,
        spec: SandboxSpec,
        tag: SandboxTag,
        gateway: Path | None,
        mounts: Sequence[Mount] = (),
    ) -> None:
        super().__init__(sandbox_id, spec, provider.stage)
        self._provider = provider
        self._tag = tag
        self._gateway = gateway
        self._mounts = mounts
        self._folder = provider.state_dir / sandbox_id
        number = int.from_bytes(sha256(sandbox_id.encode()).digest()[:8], "big") % UIDS
        self._uid = FIRST_UID + number if os.geteuid() == 0 else os.geteuid()
        self._keeper: asyncio.subprocess.Process | None = None
        self._pid = 0

    @property
    def users(self) -> frozenset[User]:
        return frozenset({"agent"})

    async def start(self) -> None:
        sentence = await refuse_unless_enforced(self._provider, self.spec)
        if sentence is None and (self.spec.network == "gateway") != (self._gateway is not None):
            sentence = f"expected a gateway socket exactly if the network is gateway, found {self.spec.network}"
        closed = [path for mount in self._mounts if (path := _closed_to_others(mount.source)) is not None]
        if sentence is None and closed and os.geteuid() == 0:
            sentence = f"a box is another user's: expected one that everybody gets through to, found {closed[0]} closed"
        if sentence is not None:
            raise Refused(sentence, stage=self._stage, kind="sandbox_policy")
        try:
            await self._start_keeper()
            await self.write_files()
        except OSError as error:
            await self.close()
            raise self.unavailable(f"cannot be made: {error}") from error
        except BaseException:
            await shielded(self.close())
            raise

    async def _start_keeper(self) -> None:
        self._prepare_folder()
        for path in (self._folder, self._gateway, *(mount.source for mount in self._mounts)):
            if path is not None and (private := private_above(path, self._uid)) is not None:
                raise OSError(
                    f"{path} lies in {private}, which only its owner may pass, and every box has a user of its own: "
                    f"`chmod o+x {private}`, or keep it elsewhere"
                )
        with _Pipe() as ready, _Pipe() as info:
            argv = [*_as_uid(self._uid), "bwrap", *self._options(info.write), "--", "/bin/sh", "-c", KEEP, "sh"]
            self._keeper = await asyncio.create_subprocess_exec(
                *self._joined([*argv, f"{self.spec.ttl_s:.0f}"]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=ready.write,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[info.write],
                start_new_session=True,
                env={"PATH": os.defpath},
            )
            ready.close_write()
            info.close_write()
            said = await self._first_line(ready.read)
            if said != b"ready\n":
                raise OSError(await self._complaint(self._keeper))
            self._pid = int(json.loads(os.read(info.read, 4096))["child-pid"])
        found = stat_of(self._pid)
        if found is None:
            raise OSError("it ended at once")
        write_record(self._folder, self._tag, pid=self._pid, start_ticks=found.start_ticks)

    async def _first_line(self, fd: int) -> bytes:
        """What the keeper says first; nothing if it ends without."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(fd, readable.set)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await readable.wait()
        except TimeoutError:
            return b""
        finally:
            loop.remove_reader(fd)
        return os.read(fd, 64)

    async def _complaint(self, keeper: asyncio.subprocess.Process) -> str:
        assert keeper.stderr is not None
        with contextlib.suppress(ProcessLookupError):
            keeper.kill()
        lines = (await keeper.stderr.read(4096)).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "bubblewrap ended without a word"

    def _prepare_folder(self) -> None:
        make_own(self._provider.state_dir)
        self._folder.mkdir()
        self._folder.chmod(0o711)
        # Before anything that outlives this process.
        write_record(self._folder, self._tag)
        etc = self._folder / "etc"
        etc.mkdir()
        for name, text in ETC.items():
            (etc / name).write_text(text)
        if self.spec.disk_mib is None:
            for name in ("work", "home", "tmp", "shm"):
                (self._folder / name).mkdir()
                os.chown(self._folder / name, self._uid, self._uid)
        if self._provider.cgroups is not None:
            self._provider.cgroups.group(self.id).create(self.spec)

    def _joined(self, argv: Sequence[str]) -> list[str]:
        """A command that joins the box's control groups first."""
        return ["/bin/sh", "-c", JOIN, "sh", *self._procs_files(), "--", *argv]

    def _procs_files(self) -> list[str]:
        if self._provider.cgroups is None:
            return []
        return [str(path) for path in self._provider.cgroups.group(self.id).procs_files()]

    def _options(self, info_fd: int) -> list[str]:
        options = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"]
        options += ["--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--as-pid-1"]
        options += ["--info-fd", str(info_fd), "--setenv", "PATH", "/usr/bin:/bin", *_programs()]
        for name in ETC:
            options += ["--ro-bind", str(self._folder / "etc" / name), f"/etc/{name}"]
        options += ["--proc", "/proc", "--dev", "/dev"]
        for name, path in (("work", self.workdir), ("home", "/home/agent"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
            options += self._writable(name, path)
        if self.spec.network == "public":
            options += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        for mount in self._mounts:
            options += ["--ro-bind", str(mount.source), mount.target]
        if self._gateway is not None:
            options += ["--bind", str(self._gateway), GATEWAY_SOCKET]
        return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]

    def _writable(self, name: str, path: str) -> list[str]:
        if self.spec.disk_mib is None:
            return ["--bind", str(self._folder / name), path]
        return ["--size", str(self.spec.disk_mib * 2**20), "--tmpfs", path]

    async def run(self, command: Command, captures: Captures) -> int:
        code = await self._enter(command, captures, self._procs_files())
        if code == enter.BOX_GONE or code >= 128:
            self._require_running()
        return code

    async def _enter(self, command: Command, captures: Captures, groups: Sequence[str]) -> int:
        self._require_running()
        request = Request(self._pid, self._uid, groups, command.cwd, command.argv, command.env)
        try:
            return await self._provider.door.run(request, captures, command.stdin)
        except NotStarted as error:
            raise self.unavailable(f"no process can be started: {error}") from error

    def _require_running(self) -> None:
        found = stat_of(self._pid)
        if self._keeper is None or self._keeper.returncode is not None or found is None or found.exiting:
            raise self.unavailable("it is gone: not started, closed, or its time is over")

    async def kill(self, user: User | None = None) -> None:
        command = Command(("/bin/sh", "-c", "kill -9 -1; exit 0"), {"PATH": "/usr/bin:/bin"}, "agent", "/", b"")
        captures = Captures(4096)
        for _ in range(KILLS):
            # Not in the control groups, which may be full. Everything but pid 1 and the killer goes, in one system call.
            if await self._enter(command, captures, []) == 0:
                return
            self._require_running()
            # The killer was killed, by one that does the same: nothing in the box can prevent it from outside.
            await asyncio.to_thread(kill_beside, self._pid)
        raise self.unavailable(f"its processes could not be killed: {captures.stderr.output().text.strip()}")

    async def oom_kills(self) -> int:
        return 0 if self._provider.cgroups is None else self._provider.cgroups.group(self.id).oom_kills()

    async def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                keeper.kill()
            await keeper.wait()
        await self._provider.destroy(self.id)


def _closed_to_others(path: Path) -> Path | None:
    """What keeps other users from a file or directory; None if nothing does."""
    try:
        if not os.stat(path).st_mode & 0o004:
            return path
        return next((parent for parent in path.resolve().parents if not os.stat(parent).st_mode & 0o001), None)
    except OSError:
        return path


def _as_uid(uid: int) -> list[str]:
    """What goes before a command that root starts as somebody else."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--no-new-privs"]


@cache
def _programs() -> list[str]:
    """Mounts of this machine's programs, read-only."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64", "sbin"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for text in OF_MACHINE:
        options += ["--ro-bind-try", text, text]
    return options
