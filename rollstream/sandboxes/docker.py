"""Boxes as hardened containers of a Docker engine.

A container's only own process is `sleep TTL`, as nobody: it ends the box when its time is over, even if every worker is
gone, and nothing that runs in the box can kill it. Commands are `exec`s of uid 1000 or of a root without capabilities.
"""

import asyncio
import contextlib
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

import docker
import docker.errors
import docker.types
import docker.utils

from rollstream.cancelling import shielded
from rollstream.errors import Refused, SandboxUnavailable, Stage
from rollstream.sandboxes.base import BaseSandbox, Command
from rollstream.sandboxes.capture import Captures
from rollstream.sandboxes.docker_engine import API_TIMEOUT_S, ATTEMPTS, DEFAULT_IMAGE, DockerEngine
from rollstream.sandboxes.hijack import EngineLost, EngineRefused, started
from rollstream.sandboxes.protocol import (
    GATEWAY_SOCKET,
    Enforces,
    FoundSandbox,
    Limit,
    Mount,
    SandboxTag,
    refuse_unless_enforced,
)
from rollstream.sandboxes.tags import HANDLE, from_labels, labels
from schemas.sandbox import SandboxSpec, User

UIDS: Mapping[User, str] = {"agent": "1000:1000", "root": "0:0"}
LIMITS: Mapping[str, Limit] = {"MemoryLimit": "memory_mib", "PidsLimit": "pids", "CpuCfsQuota": "cpus"}
"""What an engine says of itself -> the limit that it can then hold."""
KEEPER = "65534:65534"
HOME = "/home/agent"
OOM_FILES = "cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events 2>/dev/null"
GONE = 137
"""Exit code of what was killed: the command, or the whole container under it."""


class DockerProvider:
    """Makes containers on one engine: `unix://` or plain `tcp://`."""

    name: ClassVar[str] = "docker"
    at_best: ClassVar[Enforces] = Enforces(
        limits=frozenset(LIMITS.values()) | {"disk_mib"},
        networks=frozenset({"none", "gateway", "public"}),
        users=frozenset(UIDS),
    )

    def __init__(self, stage: Stage, *, image: str | None = None, host: str | None = None) -> None:
        """
        Raises:
            UsageError: the engine is addressed in a way that commands cannot be streamed over.
        """
        self.stage: Stage = stage
        self.image = image or DEFAULT_IMAGE
        self.engine = DockerEngine(stage, host)
        self.bare: set[tuple[str, str]] = set()
        """Image ids, each with a directory that is known to be empty in it."""

    async def enforces(self) -> Enforces:
        await self.engine.api()
        held = [limit for flag, limit in LIMITS.items() if self.engine.info.get(flag)]
        return replace(self.at_best, limits=frozenset({*held, "disk_mib"}))

    async def host(self) -> str:
        await self.engine.api()
        info = self.engine.info
        return f"docker:{info.get('ID') or info.get('Name') or self.engine.address}"

    def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        tag: SandboxTag,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
    ) -> "DockerSandbox":
        return DockerSandbox(self, sandbox_id, spec, tag, gateway, mounts)

    async def attach(self, found: FoundSandbox, spec: SandboxSpec) -> "DockerSandbox":
        box = self.create(found.id, spec, found.tag)
        await box.require_running()
        return box

    async def found(self) -> list[FoundSandbox]:
        api = await self.engine.api()
        containers = await self.engine.call(api.containers, all=True, filters={"label": HANDLE})
        return [
            FoundSandbox(container["Labels"][HANDLE], tag, datetime.fromtimestamp(container["Created"], UTC))
            for container in containers
            if (tag := from_labels(container["Labels"])) is not None
        ]

    async def destroy(self, sandbox_id: str) -> None:
        # A holder that died at the start may have left the other container, too.
        await asyncio.gather(*(self.engine.remove(name(sandbox_id)) for name in (container_name, twin_name)))

    async def close(self) -> None:
        await self.engine.close()


def container_name(sandbox_id: str) -> str:
    return f"rollstream-{sandbox_id}"


def twin_name(sandbox_id: str) -> str:
    """A container that is never started, from which the image's work directory is copied."""
    return f"{container_name(sandbox_id)}-image"


@dataclass(frozen=True, slots=True)
class _Mounts:
    """What a box may write, and what it is given."""

    tmpfs: dict[str, str]
    binds: list[str]

    @classmethod
    def of(cls, spec: SandboxSpec, gateway: Path | None, mounts: Sequence[Mount]) -> "_Mounts":
        binds = [f"{mount.source}:{mount.target}:ro" for mount in mounts]
        binds += [f"{gateway}:{GATEWAY_SOCKET}"] if gateway is not None else []
        if spec.disk_mib is None:
            return cls({}, binds)
        options = f"rw,exec,nosuid,nodev,size={spec.disk_mib}m"
        own = f"{options},uid=1000,gid=1000,mode=0755"
        return cls({spec.workdir: own, HOME: own, "/tmp": f"{options},mode=1777"}, binds)


class DockerSandbox(BaseSandbox):
    """One container."""

    def __init__(
        self,
        provider: DockerProvider,
        sandbox_id: str,
        spec: SandboxSpec,
        tag: SandboxTag,
        gateway: Path | None,
        mounts: Sequence[Mount] = (),
    ) -> None:
        super().__init__(sandbox_id, spec, provider.stage)
        self._provider = provider
        self._engine = provider.engine
        self._tag = tag
        self._gateway = gateway
        self._mounts = mounts
        self._container = container_name(sandbox_id)

    @property
    def users(self) -> frozenset[User]:
        return frozenset(UIDS)

    async def start(self) -> None:
        sentence = await refuse_unless_enforced(self._provider, self.spec)
        if sentence is None and (self.spec.network == "gateway") != (self._gateway is not None):
            sentence = f"expected a gateway socket exactly if the network is gateway, found {self.spec.network}"
        if sentence is not None:
            raise Refused(sentence, stage=self._stage, kind="sandbox_policy")
        image = self.spec.image or self._provider.image
        image_id = await self._engine.ensure_image(image)
        api = await self._engine.api()
        try:
            await self._create(api, image)
            await self._call(api.start, self._container)
            if self.spec.disk_mib is not None and (image_id, self.workdir) not in self._provider.bare:
                await self._fill_workdir(api, image_id)
            await self.write_files()
        except BaseException:
            await shielded(self.close())
            raise

    async def _create(self, api: docker.APIClient, image: str) -> None:
        spec = self.spec
        mounts = _Mounts.of(spec, self._gateway, self._mounts)
        memory = None if spec.memory_mib is None else spec.memory_mib * 2**20
        host_config = api.create_host_config(
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=None if spec.cpus is None else round(spec.cpus * 1e9),
            pids_limit=spec.pids,
            network_mode="bridge" if spec.network == "public" else "none",
            read_only=spec.disk_mib is not None,
            tmpfs=mounts.tmpfs,
            shm_size=None if spec.disk_mib is None else spec.disk_mib * 2**20,
            binds=mounts.binds,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            init=True,
            auto_remove=True,
            ulimits=[
                docker.types.Ulimit(name="core", soft=0, hard=0),
                docker.types.Ulimit(name="nofile", soft=4096, hard=4096),
            ],
        )
        made = await self._call(
            api.create_container,
            image,
            name=self._container,
            entrypoint=["sleep"],
            command=[f"{spec.ttl_s:.0f}"],
            user=KEEPER,
            working_dir="/",
            hostname="sandbox",
            labels=labels(self.id, self._tag),
            host_config=host_config,
        )
        # An engine that cannot enforce a limit says so, and makes the container all the same.
        discarded = [warning for warning in made.get("Warnings") or () if "limit" in warning.lower()]
        if discarded:
            raise Refused(
                f"the engine does not enforce what is asked: {discarded[0]}", stage=self._stage, kind="sandbox_policy"
            )

    async def _fill_workdir(self, api: docker.APIClient, image_id: str) -> None:
        """Copy what the image has in the work directory, which a file system of its own now covers."""
        twin = twin_name(self.id)
        with tempfile.TemporaryFile() as archive:
            try:
                made = await self._call(
                    api.create_container, image_id, name=twin, entrypoint=["true"], labels=labels(self.id, self._tag)
                )
                await self._engine.call(partial(_archive, api, made["Id"], self.workdir, archive))
            finally:
                await self._engine.remove(twin)
            if await asyncio.to_thread(_holds_files, archive):
                await self._put(archive, self.workdir)
            else:
                self._provider.bare.add((image_id, self.workdir))

    async def run(self, command: Command, captures: Captures) -> int:
        api = await self._engine.api()
        made = await self._call(
            api.exec_create,
            self._container,
            list(command.argv),
            environment=dict(command.env),
            user=UIDS[command.user],
            workdir=command.cwd,
            stdin=True,
        )
        try:
            async with started(self._engine.address, api.api_version, made["Id"]) as stream:
                feeding = asyncio.create_task(stream.feed(command.stdin))
                try:
                    async for name, chunk in stream.frames():
                        await captures.add(name, chunk)
                finally:
                    feeding.cancel()
                    await asyncio.wait([feeding])
                    if not feeding.cancelled():
                        feeding.result()
        except EngineRefused as error:
            raise self.unavailable(f"the engine does not run the command: {error}") from error
        except EngineLost as error:
            raise self.unavailable(f"lost the engine at {self._engine.address}: {error}") from error
        return await self._exit_code(api, made["Id"])

    async def _exit_code(self, api: docker.APIClient, exec_id: str) -> int:
        for attempt in range(ATTEMPTS):
            state = await self._call(api.exec_inspect, exec_id)
            if not state["Running"]:
                break
            # The streams end a moment before the engine has seen the end of the process.
            await asyncio.sleep(0.02 * (attempt + 1))
        else:
            raise self.unavailable("the engine closed the streams of a command that still runs")
        code = state["ExitCode"]
        if code is None or code == GONE:
            await self._require_alive(api)
        return int(GONE if code is None else code)

    async def _require_alive(self, api: docker.APIClient) -> None:
        """Make sure that a command was killed alone, and not with its container: the engine knows of that a moment later.

        Raises:
            SandboxUnavailable: with its container.
        """
        for attempt in range(ATTEMPTS):
            await self.require_running()
            # Nothing enters a container whose first process has ended; one that is full lets nobody in either, for now.
            if await self._enters(api):
                return
            await asyncio.sleep(0.005 * (attempt + 1))

    async def _enters(self, api: docker.APIClient) -> bool:
        """Whether a command can be started."""
        made = await self._call(api.exec_create, self._container, ["true"], user=KEEPER)
        try:
            await self._call(api.exec_start, made["Id"])
        except SandboxUnavailable:
            return False
        return bool((await self._call(api.exec_inspect, made["Id"]))["ExitCode"] == 0)

    async def require_running(self) -> None:
        """Make sure that the container has not ended.

        Raises:
            SandboxUnavailable: it has.
        """
        api = await self._engine.api()
        state = await self._call(api.inspect_container, self._container)
        if not state["State"]["Running"]:
            raise self.unavailable("its container has ended")

    async def kill(self, user: User | None = None) -> None:
        for one in [user] if user else UIDS:
            await self._kill_all_of(one)

    async def _kill_all_of(self, user: User) -> None:
        api = await self._engine.api()
        if await self._killed(api, user):
            return
        # No process could be made: the box is full of them.
        await self._limit_pids(api, -1)
        for _ in range(ATTEMPTS):
            if await self._killed(api, user):
                break
            await asyncio.sleep(0.05)
        else:
            raise self.unavailable(f"what {user} runs could not be killed")
        await self._limit_pids(api, self.spec.pids or -1)

    async def _killed(self, api: docker.APIClient, user: User) -> bool:
        """Kill everything of a user's, in one system call. False if the killer could not run."""
        made = await self._call(api.exec_create, self._container, ["sh", "-c", "kill -9 -1; exit 0"], user=UIDS[user])
        await self._call(api.exec_start, made["Id"])
        state = await self._call(api.exec_inspect, made["Id"])
        if state["ExitCode"] == 0:
            return True
        await self.require_running()
        return False

    async def _limit_pids(self, api: docker.APIClient, limit: int) -> None:
        url = f"{api.base_url}/v{api.api_version}/containers/{self._container}/update"
        answer = await self._call(api.post, url, json={"PidsLimit": limit}, timeout=API_TIMEOUT_S)
        if not answer.ok:
            raise self.unavailable(f"the engine does not change its limit of processes: {answer.text}")

    async def oom_kills(self) -> int:
        if self.spec.memory_mib is None:
            return 0
        api = await self._engine.api()
        made = await self._call(api.exec_create, self._container, ["sh", "-c", OOM_FILES], user=KEEPER, stderr=False)
        text = (await self._call(api.exec_start, made["Id"])).decode(errors="replace")
        counts = [line.split() for line in text.splitlines()]
        return sum(int(words[1]) for words in counts if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit())

    async def close(self) -> None:
        await self._engine.remove(self._container)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the provider's, and a container that is gone is `SandboxUnavailable`."""
        try:
            return await self._engine.call(function, *args, **kwargs)
        except docker.errors.NotFound as error:
            raise self.unavailable(f"it is gone: {error.explanation or error}") from error


def _archive(api: docker.APIClient, container: str, path: str, into: IO[bytes]) -> None:
    """Write a container's directory into a file, as a tar; nothing if it has none."""
    # All of it is read: a stream that is left open blocks every later call on the container.
    with contextlib.suppress(docker.errors.NotFound):
        stream, _ = api.get_archive(container, path)
        for chunk in stream:
            into.write(chunk)


def _holds_files(archive: IO[bytes]) -> bool:
    """Whether a tar has more than its top directory."""
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            return tar.next() is not None and tar.next() is not None
    except tarfile.ReadError:
        return False
