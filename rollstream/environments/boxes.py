"""Base for environments whose world is a box: its tools run commands there, and change its files.

    class Workshop(BoxWorld):
        tidy: bool = False

    class WorkshopEnvironment(BoxEnvironment[WorkshopTask, Workshop]):
        name, version, task_type, world_type = "workshop", "1", WorkshopTask, Workshop

        def begin(self, task):
            return Workshop(spec=SandboxSpec(files={"bench/saw": "rusty"}))

        async def look(self, box, before, after, action, services):
            after.tidy = (await box.exec(["test", "!", "-e", "bench/saw"])).ok
            return Earned(float(after.tidy) - float(before.tidy))

        async def score(self, task, world, episode, services):
            return Verdict(reward=float(world.tidy))

The world is a value all the same: where the box is found, and whatever `look` remembers of it. `verify` sees no more than that,
so what is to be handed in is taken out of the box by `look`, after every action: nobody says which one is the last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from rollstream.environments.protocol import OpenServices, Seeded, StepResult, StepServices, Task, World
from rollstream.environments.tools import ToolEnvironment, ToolError, ToolResult, tool
from rollstream.errors import EnvironmentFailure
from rollstream.sandboxes.held import BoxHandle, HeldBox
from rollstream.sandboxes.protocol import ExecResult, Sandbox
from schemas.action import ToolCall, Utterance
from schemas.sandbox import SandboxSpec
from schemas.values import JsonObject, truncate_text

T = TypeVar("T", bound=Task)

MOST_COMMAND_S = 60.0
FILE_S = 10.0
OUTPUT_BYTES = 32 * 1024
"""Shown of a command or of a file; the rest is counted."""
NOTES_BYTES = 512
FILE_BYTES = 1024 * 1024
"""Longest file that is read or changed by a tool of its own."""
COMMAND_BYTES = 100_000
"""Linux takes arguments of at most 128 KiB."""
BOX = "box"

SHELL = 'exec 2>&1; if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; fi; exec sh -c "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && exec cat > "$1"'

FilePath = Annotated[str, Field(description="Relative to the work directory, or absolute.", min_length=1, max_length=4096)]


class BoxWorld(World):
    """What is known of a box; inherit, and add what the environment remembers."""

    spec: SandboxSpec = SandboxSpec()
    """What the box is to be."""
    box: BoxHandle | None = None
    """Where it is; None until the first action."""


W = TypeVar("W", bound=BoxWorld)


@dataclass(frozen=True, slots=True)
class Earned:
    """What an action has earned, by how it left the box."""

    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, object] = field(default_factory=dict)


class BoxEnvironment(ToolEnvironment[T, W]):
    """Inherit, name `name`, `version`, `task_type`, `world_type`, write `begin`, `look` and `score`; tools may be added."""

    box_tools: ClassVar[Sequence[str]] = ("bash", "read_file", "write_file", "replace_in_file", "submit")
    """Which of the tools here are offered, beside one's own."""

    async def prepare(self, box: Sandbox, world: W, services: OpenServices) -> None:
        """Make a box ready that was just started, before the first action. May change the world."""

    async def look(self, box: Sandbox, before: W, after: W, action: ToolCall, services: StepServices) -> Earned:
        """What an action that was carried out has earned; what is to be remembered of the box is written into `after`.

        Called when the box has changed as it may; not when the tool refused its arguments.

        Raises:
            EnvironmentFailure: it cannot be found out, and the session is to be tried again.
        """
        return Earned()

    def seed(self, task: T) -> Seeded:
        return replace(super().seed(task), placement="env_sandboxed")

    def tools(self) -> list[JsonObject]:
        hidden = {name for name in BoxEnvironment.box_tools if name not in self.box_tools}
        return [one.offered() for one in self._tools.values() if one.name not in hidden]

    async def open(self, world: W, services: OpenServices) -> W:
        if services.boxes is None:
            message = f"environment {self.name} keeps its world in a sandbox, and the run names no backend; add --sandbox"
            raise EnvironmentFailure(message, stage="agent", kind="no_sandbox")
        found = await services.boxes.found(services.fence)
        if found is not None:
            # The first action again, after a worker that had opened the box for it.
            held, written = found
            _hold(held, services)
            return self.world_type.model_validate_json(written)
        held = await services.boxes.start(world.spec, services.fence)
        _hold(held, services)
        opened = world.model_copy(deep=True, update={"box": held.handle})
        await self.prepare(held.sandbox, opened, services)
        await held.opened(opened.model_dump_json())
        return opened

    async def resume(self, world: W, services: OpenServices) -> W:
        if services.boxes is None or world.box is None:
            message = f"expected a box of a run that names a backend, found {world.box}"
            raise EnvironmentFailure(message, stage="agent", kind="no_sandbox")
        _hold(await services.boxes.attach(world.box, services.fence), services)
        return world

    async def leave(self, world: W, services: OpenServices) -> bool:
        return await held_box(services).leave()

    def holds(self, world: W, services: OpenServices) -> bool:
        return world.box is not None and world.box.sandbox == held_box(services).handle.sandbox

    async def close(self, world: W, services: OpenServices) -> None:
        """The box itself is closed by what `open` has pushed."""

    async def step(self, world: W, action: ToolCall | Utterance, services: StepServices) -> tuple[W, StepResult]:
        """As `ToolEnvironment.step`, done once: an action that comes again gets what the journal tells of it."""
        if services.opened is None:
            raise EnvironmentFailure(f"environment {self.name}: expected a box, found none", stage="agent", kind="no_sandbox")
        held = held_box(services.opened)
        told = await held.begin(services.action, services.opened.fence)
        if told is not None:
            return self.world_type.model_validate_json(str(told.pop("world"))), StepResult(**told)  # type: ignore[arg-type]
        after, result = await super().step(world, action, services)
        if after is not world and isinstance(action, ToolCall):
            earned = await self.look(held.sandbox, world, after, action, services)
            reward = earned.reward if result.reward is None else result.reward
            components = {**result.components, **earned.components}
            result = replace(result, reward=reward, components=components, info={**result.info, **earned.info})
        await held.done(services.action, _told(after, result))
        return after, result

    @tool
    async def bash(
        self,
        world: BoxWorld,
        services: StepServices,
        command: Annotated[str, Field(description="Run by bash in the work directory.", min_length=1)],
        timeout_s: Annotated[
            float, Field(description="After so long, everything that runs in the sandbox is killed.", gt=0, le=MOST_COMMAND_S)
        ] = 30.0,
    ) -> str:
        """Run a command in the sandbox. You see what it prints, long output without its middle, and its exit code.

        Every command has a shell of its own: directories and variables do not last, files and background processes do. Nobody
        can answer prompts.
        """
        if "\0" in command or len(command.encode()) > COMMAND_BYTES:
            raise ToolError(f"expected a command of at most {COMMAND_BYTES} bytes without NUL; use write_file for long texts")
        box = held_box(services.opened).sandbox
        argv = ["/bin/sh", "-c", SHELL, "sh", command]
        return shown(await box.exec(argv, timeout_s=timeout_s, max_output_bytes=_room(services)), timeout_s)

    @tool
    async def read_file(
        self,
        world: BoxWorld,
        services: StepServices,
        path: FilePath,
        first_line: Annotated[int, Field(description="From 1.", ge=1)] = 1,
        lines: Annotated[int, Field(description="At most so many.", ge=1, le=2000)] = 500,
    ) -> str:
        """Read a text file, or some lines of it."""
        text = (await _content(held_box(services.opened).sandbox, path)).decode(errors="backslashreplace")
        every = text.splitlines(keepends=True)
        chosen = every[first_line - 1 : first_line - 1 + lines]
        if len(chosen) == len(every):
            return truncate_text(text, _room(services))
        part = f"lines {first_line} to {first_line - 1 + len(chosen)}" if chosen else "nothing"
        return truncate_text("".join(chosen), _room(services)) + f"\n[{part} of {len(every)} lines]"

    @tool
    async def write_file(self, world: BoxWorld, services: StepServices, path: FilePath, content: str) -> str:
        """Write a text file; one that is there is replaced, and directories that are missing are made."""
        written = await _write(held_box(services.opened).sandbox, path, content.encode())
        return f"{path}: {written} bytes written"

    @tool
    async def replace_in_file(
        self,
        world: BoxWorld,
        services: StepServices,
        path: FilePath,
        old: Annotated[str, Field(description="Exactly as it stands there, and there once only.", min_length=1)],
        new: str,
    ) -> str:
        """Replace a piece of a text file."""
        box = held_box(services.opened).sandbox
        content = await _content(box, path)
        found = content.count(old.encode())
        if found != 1:
            hint = "give more of what stands around it" if found else "copy it from the file"
            raise ToolError(f"expected `old` once in {path}, found it {found} times: {hint}")
        await _write(box, path, content.replace(old.encode(), new.encode()))
        return f"{path}: replaced"

    @tool
    async def submit(self, world: BoxWorld) -> ToolResult:
        """Say that the work is done. What stands in the sandbox now is what counts, and nothing can be done afterwards."""
        return ToolResult("handed in", done=True)


def _room(services: StepServices) -> int:
    """For a text, so that what is said about it is not cut off."""
    return min(OUTPUT_BYTES, max(0, services.max_output_bytes - NOTES_BYTES))


def _hold(held: HeldBox, services: OpenServices) -> None:
    services.live[BOX] = held
    services.cleanup.push(held.close)


def held_box(services: OpenServices | None) -> HeldBox:
    """The box of a session in this worker.

    Raises:
        EnvironmentFailure: there is none.
    """
    held = None if services is None else services.live.get(BOX)
    if not isinstance(held, HeldBox):
        raise EnvironmentFailure("expected a box that was opened, found none", stage="agent", kind="no_sandbox")
    return held


def shown(done: ExecResult, timeout_s: float) -> str:
    """A command as its agent sees it: what it printed, and how it ended."""
    text = done.stdout.text
    if text and not text.endswith("\n"):
        text += "\n"
    if done.timed_out:
        return f"{text}[no end within {timeout_s:g} s: everything that ran in the sandbox was killed]"
    memory = "[something was killed for want of memory]\n" if done.oom_killed else ""
    return f"{text}{memory}[exit code {done.exit_code}]"


async def _content(box: Sandbox, path: str) -> bytes:
    """
    Raises:
        ToolError: it cannot be read.
    """
    argv = ["head", "-c", str(FILE_BYTES + 1), "--", path]
    done = await box.exec(argv, timeout_s=FILE_S, max_output_bytes=2 * FILE_BYTES)
    _require(done, path)
    if done.stdout.size > FILE_BYTES:
        raise ToolError(f"{path} is longer than {FILE_BYTES} bytes; use bash to see or change a part of it")
    return done.stdout.data


async def _write(box: Sandbox, path: str, content: bytes) -> int:
    """
    Raises:
        ToolError: it cannot be written.
    """
    argv = ["/bin/sh", "-c", WRITE, "sh", path]
    _require(await box.exec(argv, stdin=content, timeout_s=FILE_S, max_output_bytes=4096), path)
    return len(content)


def _require(done: ExecResult, path: str) -> None:
    if done.timed_out:
        raise ToolError(f"{path}: nothing happened within {FILE_S:g} s")
    if not done.ok:
        lines = done.stderr.text.strip().splitlines()
        raise ToolError(f"{path}: {lines[-1] if lines else f'exit code {done.exit_code}'}")


def _told(world: BoxWorld, result: StepResult) -> dict[str, Any]:
    """An outcome as the journal keeps it."""
    observation = result.observation
    return {
        "world": world.model_dump_json(),
        "observation": observation.decode(errors="backslashreplace") if isinstance(observation, bytes) else observation,
        "reward": result.reward,
        "done": result.done,
        "truncated": result.truncated,
        "info": dict(result.info),
        "components": dict(result.components),
    }
