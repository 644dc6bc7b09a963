"""Agents in boxes, played by the real handler against a scripted model; no broker."""

import contextlib
import io
import tarfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rollstream.blobs import BlobStore
from rollstream.errors import SandboxUnavailable
from rollstream.models.openai import ModelPool
from rollstream.sandboxes import registry as providers
from rollstream.sandboxes.leases import Leases
from rollstream.sandboxes.protocol import Mount, Sandbox
from rollstream.sandboxes.reaper import Reaper
from rollstream.settings import HarnessSettings, ModelSettings, SandboxSettings, Settings
from rollstream.testing.model_server import Call, Reply, Request, Script, ScriptedModelServer, Text, ToolCalls
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted
from schemas.events import EVENTS, decode
from schemas.sandbox import SandboxHolder, SandboxSpec
from schemas.session import SessionReady, Workspace
from schemas.step import AgentStepped
from schemas.values import Composition, EpisodeLimits
from services.agent_worker.boxes import AgentBoxes
from services.agent_worker.egress import Egress
from services.agent_worker.handler import PlayHandler
from services.agent_worker.pauses import Pauses
from tests.controls import unheard
from tests.events import Attempt

WORKER = "agent_worker@test:1"
KEY_ENV = "AGENTS_TEST_KEY"
BUG = "def add(a, b):\n    return a - b\n"
FIX = "sed -i 's/a - b/a + b/' calc.py"
SPEC = SandboxSpec(memory_mib=1024, disk_mib=256, pids=256, network="gateway")
INIT = ["sh", "-c", "git init -q . && git add -A && git commit -q -m base"]


class Log:
    """A `Publisher` that keeps what it is given, as it would be read again."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def publish(self, events: Iterable[Event]) -> None:
        self.events += [decode(event.to_json(), EVENTS[event.kind]) for event in events]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def steps(self) -> list[AgentStepped]:
        return [event for event in self.events if isinstance(event, AgentStepped)]

    @property
    def completed(self) -> EpisodeCompleted:
        (found,) = [event for event in self.events if isinstance(event, EpisodeCompleted)]
        return found


class Keeping:
    """Boxes of an installation without a broker: really leased, told to a list."""

    def __init__(self, settings: SandboxSettings, log: Log) -> None:
        self.installation = f"agents-{uuid4().hex[:8]}"
        self.provider = providers.load(settings, "agent")
        self.leases = Leases(self.provider, log, installation=self.installation, lease_s=60)

        async def read(since: object) -> Iterable[Event]:
            return log.events

        self.reaper = Reaper(self.provider, read, log, self.installation, WORKER)

    def lease(
        self,
        provider: str,
        spec: SandboxSpec,
        holder: SandboxHolder,
        *,
        gateway: Path | None = None,
        mounts: Sequence[Mount] = (),
    ) -> AbstractAsyncContextManager[Sandbox]:
        return self.leases.lease(spec, holder, gateway=gateway, mounts=mounts)

    async def fence_off(self, provider: str, holder: SandboxHolder) -> None:
        await self.reaper.fence_off(holder)


@dataclass(slots=True, eq=False)
class Scene:
    server: ScriptedModelServer
    handler: PlayHandler
    log: Log
    keeping: Keeping
    blobs: BlobStore
    settings: Settings
    boxes: AgentBoxes

    async def play(self, descriptor: SessionReady) -> EpisodeCompleted:
        await self.handler.play(descriptor)
        return self.log.completed

    async def repair(self, harness: str, **changes: object) -> SessionReady:
        """A session whose task is to mend `calc.py`."""
        archive = await self.blobs.put(tar({"calc.py": BUG, "README.md": "adds\n"}))
        workspace = Workspace(archive=str(archive), commands=[INIT], base="HEAD", files=["notes.txt"])
        return ready(harness, self.keeping.provider.name, workspace=workspace, **changes)


def tar(files: dict[str, str]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return raw.getvalue()


def ready(harness: str, provider: str, **changes: object) -> SessionReady:
    """A session that is played in a box."""
    limits = EpisodeLimits.model_validate(changes.pop("limits", {}))
    interaction = changes.pop("interaction", "agent_in_env")
    values = {
        "composition": Composition(harness=harness, models={"policy": "small"}, sandbox=provider),
        "limits": limits,
        "interaction": interaction,
        "placement": "agent_in_env" if interaction == "agent_in_env" else "agent_sandboxed",
        "sandbox": SPEC,
        "reference": None,
        "messages": [{"role": "user", "content": "Mend calc.py: add must add."}],
    }
    return Attempt().ready().model_copy(update={**values, **changes})


def fixes(request: Request) -> Reply:
    """A model that runs one command, by whatever tool it is offered, and then says so."""
    return runs(FIX)(request)


def runs(command: str, answer: str = "It is mended.") -> Script:
    """A model that runs a command in its first turn."""

    def script(request: Request) -> Reply:
        if request.tool_results:
            return Text(answer)
        if "Bash" in request.tools:
            call = Call("Bash", {"command": command, "description": "run it"})
        elif "exec_command" in request.tools:
            call = Call("exec_command", {"cmd": command})
        else:
            call = Call("shell_command", {"command": command})
        return ToolCalls([call], text="I'll run it.")

    return script


@asynccontextmanager
async def agents(
    provider: str,
    script: Script,
    folder: Path,
    *,
    harnesses: HarnessSettings | None = None,
    image: str | None = None,
    **model: object,
) -> AsyncIterator[Scene]:
    async with ScriptedModelServer(script) as server:
        small = ModelSettings.model_validate(
            {"base_url": server.base_url, "model": "small-1b", "max_retries": 0, "api_key_env": KEY_ENV, **model}
        )
        section = SandboxSettings(provider=provider, image=image, unsafe_local=provider == "local")
        settings = Settings(
            data_dir=folder / "data", models={"small": small}, sandboxes=section, harnesses=harnesses or HarnessSettings()
        )
        log, models, egress, blobs = Log(), ModelPool(settings), Egress(settings), BlobStore.of(settings)
        keeping = Keeping(section, log)
        boxes = AgentBoxes(settings, keeping, egress, blobs, WORKER)
        pauses = Pauses(unheard(), log, WORKER)
        handler = PlayHandler(models, log, pauses, WORKER, cleanup_timeout_s=30, boxes=boxes)
        try:
            yield Scene(server, handler, log, keeping, blobs, settings, boxes)
        finally:
            await models.close()
            await egress.close()
            left = []
            with contextlib.suppress(SandboxUnavailable):
                # An engine that is away has none.
                left = [box.id for box in await keeping.provider.found() if box.tag.installation == keeping.installation]
            await keeping.provider.close()
            assert not left, f"boxes were left: {left}"
