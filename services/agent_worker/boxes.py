"""The box of an agent: leased, its workspace prepared, its way to the model opened, and what is left in it taken out.

Only placements with a box of the agent's get one. A box serves one execution: a session that is taken over starts again in a
box of its own, and the one of a lower fence is removed first.
"""

import gzip
import inspect
import os
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollstream.blobs import BlobReference, BlobStore
from rollstream.errors import EnvironmentFailure, ModelFailure, Refused
from rollstream.eventlog.groups import group_name
from rollstream.models.protocol import ContextOverflow
from rollstream.placements import placement_of
from rollstream.sandboxes import relay
from rollstream.sandboxes.harvest import Base, keep_base, last_line
from rollstream.sandboxes.protocol import GATEWAY_SOCKET, Mount, Sandbox
from rollstream.settings import CliSettings, Settings
from schemas.sandbox import SandboxHolder, SandboxSpec
from schemas.session import PLACEMENTS_WITH_A_BOX, SessionReady, Submission, Workspace
from schemas.step import Execution
from services.agent_worker.egress import MCP, Egress, Passage
from services.agent_worker.harnesses.protocol import AgentBox, Harness
from services.agent_worker.harvest import MAX_BASE_BYTES, Harvest
from services.agent_worker.mcp import ToolDesk
from topics.catalogue import SESSIONS_READY

RELAY_PORT = 8080
RELAY_TIMEOUT_S = 30.0
PREPARE_TIMEOUT_S = 900.0
"""One command of a workspace, or unpacking its archive."""
LIFE_AFTER_S = 900.0
"""How much longer than its episode a box may live: it is prepared before and harvested after."""
PROGRAMS = "/opt/rollstream"
"""Where programs of the machine stand in boxes."""


class Leasing(Protocol):
    """Where boxes come from."""

    def lease(
        self,
        provider: str,
        spec: SandboxSpec,
        holder: SandboxHolder,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
    ) -> AbstractAsyncContextManager[Sandbox]: ...
    async def fence_off(self, provider: str, holder: SandboxHolder) -> None: ...


class RelayedDoor:
    """`Door` of a box whose only way out is a socket."""

    def __init__(self, box: Sandbox, passage: Passage) -> None:
        self._box = box
        self._passage = passage

    @property
    def failure(self) -> ModelFailure | ContextOverflow | None:
        return self._passage.failure

    async def open(self) -> None:
        self._passage.failure = None
        argv = ["python3", "-I", "-S", "-c", inspect.getsource(relay), str(RELAY_PORT), GATEWAY_SOCKET]
        done = await self._box.exec(argv, cwd="/", timeout_s=RELAY_TIMEOUT_S, max_output_bytes=4096)
        if not done.ok:
            raise Refused(
                "the relay to the model, which needs python3 in the box's image, does not run: "
                f"{last_line(done) or f'exit code {done.exit_code}'}",
                stage="agent",
                kind="no_relay",
            )


@dataclass(slots=True, eq=False)
class OpenBox:
    """A box in use, for whoever plays its session."""

    box: AgentBox
    passage: Passage | None
    workspace: Workspace
    base: Base | None
    harvest: Harvest

    @property
    def waiting_s(self) -> float:
        """How long the model has been silent, in a call that the agent made by itself."""
        return 0.0 if self.passage is None else self.passage.waiting_s

    @property
    def desk(self) -> ToolDesk | None:
        """Where the agent calls the environment's tools by itself."""
        return None if self.passage is None else self.passage.desk

    async def stop(self) -> None:
        """End everything of the agent's, so that nothing changes any more what is taken out."""
        await self.box.sandbox.kill()

    async def take(self, submission: Submission) -> Submission:
        return await self.harvest.take(self.workspace, self.base, submission)


class AgentBoxes:
    """Gives agents their boxes."""

    def __init__(self, settings: Settings, keeping: Leasing, egress: Egress, blobs: BlobStore, worker: str) -> None:
        self._settings = settings
        self._keeping = keeping
        self._egress = egress
        self._blobs = blobs
        self._worker = worker
        self._group = settings.kafka.topic_prefix + group_name("agent_worker", SESSIONS_READY, settings.pool)

    @asynccontextmanager
    async def of(self, descriptor: SessionReady, harness: Harness, execution: Execution) -> AsyncIterator[OpenBox | None]:
        """The box of a session's agent, prepared; None where the placement gives it none.

        Raises:
            SandboxUnavailable: the provider failed; a retry can help.
            Refused: there can be no such box here.
            EnvironmentFailure: the workspace cannot be prepared.
        """
        placement = placement_of(descriptor.placement, harness.capabilities.needs_sandbox)
        provider = descriptor.composition.sandbox
        if placement not in PLACEMENTS_WITH_A_BOX or provider is None:
            yield None
            return
        spec = self._spec(descriptor)
        holder = SandboxHolder(
            worker=self._worker,
            run=descriptor.run,
            session=descriptor.session,
            consumer_group=self._group,
            fence=execution.fence,
        )
        settings = _settings_of(self._settings, harness.name)
        mount, program = program_of(harness.name, settings)
        async with AsyncExitStack() as stack:
            passage = None
            if spec.network == "gateway":
                name = descriptor.composition.models.get("policy", "default")
                desk = ToolDesk(descriptor.tools, descriptor.limits.max_steps) if _acts(descriptor) else None
                passage = await stack.enter_async_context(self._egress.passage(name, desk))
            await self._keeping.fence_off(provider, holder)
            gateway = None if passage is None else passage.socket
            mounts = [] if mount is None else [mount]
            sandbox = await stack.enter_async_context(
                self._keeping.lease(provider, spec, holder, gateway=gateway, mounts=mounts)
            )
            workspace = descriptor.workspace or Workspace()
            base = await self._prepare(sandbox, workspace)
            if base is not None:
                stack.callback(base.close)
            box = AgentBox(sandbox, program=program, settings=self._settings.harnesses)
            if passage is not None:
                box = AgentBox(
                    sandbox,
                    f"http://127.0.0.1:{RELAY_PORT}",
                    passage.model.model,
                    RelayedDoor(sandbox, passage),
                    program,
                    self._settings.harnesses,
                    "" if passage.desk is None else f"http://127.0.0.1:{RELAY_PORT}{MCP}",
                )
            limit = self._settings.blobs.inline_limit_bytes
            yield OpenBox(box, passage, workspace, base, Harvest(sandbox, self._blobs, limit))

    def _spec(self, descriptor: SessionReady) -> SandboxSpec:
        spec = descriptor.sandbox or self._settings.sandboxes.agent
        least = descriptor.limits.episode_timeout_s + LIFE_AFTER_S
        return spec if spec.ttl_s >= least else spec.model_copy(update={"ttl_s": least})

    async def _prepare(self, box: Sandbox, workspace: Workspace) -> Base | None:
        """Make the workspace stand in a new box.

        Raises:
            EnvironmentFailure: it does not; what the environment describes is to blame.
            BlobUnavailable: its archive cannot be had.
        """
        if workspace.archive is not None:
            await self._unpack(box, workspace.archive)
        for argv in workspace.commands:
            done = await box.exec(argv, timeout_s=PREPARE_TIMEOUT_S, max_output_bytes=64 * 1024)
            if not done.ok:
                said = f"no end within {PREPARE_TIMEOUT_S:g} s" if done.timed_out else last_line(done)
                raise _workspace_failed(f"{' '.join(argv)[:200]} (exit code {done.exit_code}): {said}", done.timed_out)
        return None if workspace.base is None else await keep_base(box, workspace.base, MAX_BASE_BYTES)

    async def _unpack(self, box: Sandbox, archive: str) -> None:
        reference = BlobReference.parse(archive)
        if reference is None:
            raise _workspace_failed(f"expected the reference of a blob as the archive, found {archive[:100]!r}")
        content = await self._blobs.get(reference)
        if content[:2] == b"\x1f\x8b":
            try:
                content = gzip.decompress(content)
            except (OSError, EOFError, zlib.error) as error:
                raise _workspace_failed(f"archive {archive}: {error}") from None
        # As the agent's user, in its box: whatever the archive says, it can reach nothing else.
        argv = ["tar", "-xf", "-", "--no-same-owner"]
        done = await box.exec(argv, stdin=content, timeout_s=PREPARE_TIMEOUT_S, max_output_bytes=64 * 1024)
        if not done.ok:
            raise _workspace_failed(f"archive {archive}: {last_line(done) or f'exit code {done.exit_code}'}")


def _acts(descriptor: SessionReady) -> bool:
    """Whether there is a world to call tools in."""
    return bool(descriptor.tools) and descriptor.interaction != "single_turn"


def _workspace_failed(what: str, retryable: bool = False) -> EnvironmentFailure:
    message = f"the workspace cannot be prepared: {what}"
    return EnvironmentFailure(message, stage="agent", kind="workspace_failed", retryable=retryable)


def _settings_of(settings: Settings, harness: str) -> CliSettings | None:
    found = getattr(settings.harnesses, harness, None)
    return found if isinstance(found, CliSettings) else None


EXECUTABLES = {"claude_code": "claude", "codex": "codex"}


def program_of(harness: str, settings: CliSettings | None) -> tuple[Mount | None, str]:
    """What is mounted for a harness, and what its program is called in the box.

    Raises:
        Refused: there is no such program on this machine.
    """
    name = EXECUTABLES.get(harness, "")
    if settings is None or not settings.path:
        return None, name
    source = Path(settings.path).expanduser().absolute()
    target = f"{PROGRAMS}/{harness}"
    if source.is_file() and os.access(source, os.X_OK):
        return Mount(source, f"{target}/{source.name}"), f"{target}/{source.name}"
    if source.is_dir() and not name:
        return Mount(source, target), target
    for inside in (f"bin/{name}", name):
        if (source / inside).is_file():
            return Mount(source, target), f"{target}/{inside}"
    wanted = f"a program, or a directory with {name}," if name else "a program or a directory"
    raise Refused(
        f"expected {wanted} at harnesses.{harness}.path, found {source}: correct the path",
        stage="agent",
        kind="harness_missing",
    )
