"""An episode in this process, from row to verdict, with an agent that does what it is told.

It keeps to what workers do: a world travels as JSON between any two actions, nobody acts after the end, and `verify` gets the
world and the rewards from here, not from the agent. What an environment promises is checked on the way.
"""

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from rollstream.environments.cleanup import CleanUpStack
from rollstream.environments.observing import finite, finite_components, info_of, seen_of
from rollstream.environments.protocol import (
    Blobs,
    Environment,
    Episode,
    Graders,
    OpenServices,
    OpensResources,
    RoleModels,
    Sandboxes,
    Seeded,
    Services,
    SteppedEnvironment,
    StepResult,
    StepServices,
    Task,
    Verdict,
    World,
    is_stepped,
)
from rollstream.environments.registry import WORLDLESS
from rollstream.errors import EnvironmentFailure
from rollstream.models.protocol import Completion
from rollstream.sandboxes.held import SessionBoxes
from rollstream.testing.completions import scripted
from schemas.action import Action, ToolCall, Utterance
from schemas.session import Submission
from schemas.values import ChatMessage, EpisodeLimits
from schemas.verdict import StepReward

CLEANUP_S = 30.0
_ACTION: TypeAdapter[ToolCall | Utterance] = TypeAdapter(Action)


class BrokenPromise(AssertionError):
    """The environment did what its protocol rules out."""


class ActedAfterTheEnd(Exception):
    """The script has actions left when the world has come to its end; a worker refuses them."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One action and what came of it."""

    action: ToolCall | Utterance
    result: StepResult
    seen: list[ChatMessage]
    """What the agent sees of it."""
    world: World
    """After the action."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode and its verdict."""

    seeded: Seeded
    steps: list[Stepped]
    episode: Episode
    verdict: Verdict

    @property
    def rewards(self) -> list[float | None]:
        return [step.result.reward for step in self.steps]


class ScriptedRoles:
    """`RoleModels` whose answers are given: the next of a list for each role, or a function of what was asked.

    An exception among the answers is raised.
    """

    def __init__(
        self,
        answers: Mapping[str, Sequence[str | Exception]] | Callable[[str, Sequence[ChatMessage]], str] = (MappingProxyType({})),
    ) -> None:
        self._answers = answers
        self.asked: list[tuple[str, list[ChatMessage]]] = []

    async def complete(self, messages: Sequence[ChatMessage], role: str) -> Completion:
        said = self._next(role, messages)
        self.asked.append((role, list(messages)))
        if isinstance(said, Exception):
            raise said
        return scripted({"role": "assistant", "content": said})

    def _next(self, role: str, messages: Sequence[ChatMessage]) -> str | Exception:
        if callable(self._answers):
            return self._answers(role, messages)
        before = sum(1 for asked, _ in self.asked if asked == role)
        answers = self._answers.get(role, ())
        if before >= len(answers):
            message = f"expected a model in the role {role}, found {len(answers)} scripted answers, all used"
            raise EnvironmentFailure(message, stage="agent", kind="role_unbound")
        return answers[before]


class NoGraders:
    """For environments that need none."""

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        raise EnvironmentFailure("this play has no graders", stage="verification", kind="no_graders")


async def play(
    environment: Environment[Any],
    task: Task,
    actions: Sequence[ToolCall | Utterance] = (),
    submission: Submission | None = None,
    *,
    models: RoleModels | None = None,
    graders: Graders | None = None,
    sandboxes: Sandboxes | None = None,
    blobs: Blobs | None = None,
) -> Played:
    """Play one task: every action in turn, then hand in, then the verdict.

    Args:
        submission: an empty one if None.
        models: what environments ask by role; none if None.
        sandboxes: where `verify` gets boxes from; none if None.
        blobs: likewise, what is too long for a record.

    Raises:
        BrokenPromise: the environment did what its protocol rules out.
        ActedAfterTheEnd: there are more actions than the world lets happen.
        BoundaryFailure: the environment refused, or failed.
    """
    roles = models or ScriptedRoles()
    seeded = environment.seed(task)
    world = first_world(environment, seeded)
    steps: list[Stepped] = []
    messages = list(seeded.messages)
    async with opened(environment, world if actions else None, sandboxes=sandboxes, blobs=blobs) as begun:
        world = begun.world if actions else world
        for index, action in enumerate(actions):
            if steps and (steps[-1].result.done or steps[-1].result.truncated):
                raise ActedAfterTheEnd(f"the world ended with action {index - 1}, and {len(actions) - index} are left")
            if world is None or not is_stepped(environment):
                raise BrokenPromise(f"environment {environment.name} has actions to be done and no world to do them in")
            taken = await step(environment, world, action, StepServices(roles, index, begun.services, f"action {index}"))
            steps.append(taken)
            begun.world = world = taken.world
            messages += [said_by_agent(action), *taken.seen]
    handed_in = submission or Submission()
    truncated = bool(steps) and steps[-1].result.truncated and not steps[-1].result.done
    episode = Episode(
        messages=[*messages, {"role": "assistant", "content": handed_in.text}],
        submission=handed_in,
        stop_reason="truncated" if truncated else "completed",
        world=world,
        steps=[StepReward(index=index, reward=taken.result.reward) for index, taken in enumerate(steps)],
    )
    verdict = await environment.verify(task, episode, Services(graders or NoGraders(), roles, sandboxes, blobs))
    finite(environment.name, "reward", verdict.reward, "verification")
    finite_components(environment.name, verdict.components, "verification")
    _require_json(environment.name, dict(verdict.diagnostics))
    return Played(seeded, steps, episode, verdict)


async def play_oracle(
    environment: Environment[Any],
    task: Task,
    *,
    models: RoleModels | None = None,
    graders: Graders | None = None,
    sandboxes: Sandboxes | None = None,
    blobs: Blobs | None = None,
) -> Played | None:
    """Play the environment's own solution; None if the task has none."""
    reference = environment.reference(task)
    if reference is None:
        return None
    actions = list(environment.reference_actions(task)) if is_stepped(environment) else []
    # As they travel to the harness.
    travelled = [_ACTION.validate_json(_ACTION.dump_json(action)) for action in actions]
    return await play(environment, task, travelled, reference, models=models, graders=graders, sandboxes=sandboxes, blobs=blobs)


def succeeds(environment: Environment[Any], verdict: Verdict) -> bool:
    """Whether a verdict counts as success, by its own word or by the environment's threshold."""
    if verdict.success is not None:
        return verdict.success
    return verdict.reward is not None and verdict.reward >= environment.success_threshold


def first_world(environment: Environment[Any], seeded: Seeded) -> World | None:
    """Where a seeded task begins, as it comes back from JSON."""
    if seeded.interaction in WORLDLESS:
        return None
    if not is_stepped(environment) or not isinstance(seeded.world, environment.world_type):
        raise BrokenPromise(
            f"environment {environment.name} asks for {seeded.interaction}, which takes a `step` and a world of its "
            f"`world_type`, found {type(seeded.world).__name__}"
        )
    return travelled_world(environment, seeded.world)


@runtime_checkable
class HoldsBoxes(Sandboxes, Protocol):
    """Boxes that can be held from one action to the next."""

    def held(self, session: str, journals: Path) -> SessionBoxes: ...


@dataclass(slots=True)
class Opened:
    """A world with what its environment holds for it."""

    world: World | None
    """As it is now: what `close` will be given."""
    services: OpenServices | None = None


@asynccontextmanager
async def opened(
    environment: Environment[Any],
    world: World | None,
    session: str = "played",
    *,
    sandboxes: Sandboxes | None = None,
    blobs: Blobs | None = None,
) -> AsyncIterator[Opened]:
    """Have an environment open what a first world needs, and undo all of it at the end.

    Args:
        sandboxes: boxes that can be held, such as `OwnBoxes`; none if None.

    Raises:
        BrokenPromise: something could not be undone, or what was opened is no world.
    """
    if world is None or not is_stepped(environment) or not isinstance(environment, OpensResources):
        yield Opened(world)
        return
    with tempfile.TemporaryDirectory(prefix="rollstream-journals-") as journals:
        boxes = sandboxes.held(session, Path(journals)) if isinstance(sandboxes, HoldsBoxes) else None
        stack = CleanUpStack(f"environment {environment.name}", CLEANUP_S)
        services = OpenServices(session, 0, stack, {}, boxes, blobs)
        begun = Opened(world, services)

        async def close() -> None:
            await environment.close(begun.world, services)

        failures: list[EnvironmentFailure] = []
        try:
            begun.world = travelled_world(environment, await environment.open(world, services))
            if not getattr(environment, "verify_closes", False):
                stack.push(close)
            yield begun
        finally:
            failures += await stack.run()
        if failures:
            raise BrokenPromise("; ".join(map(str, failures)))


async def step(
    environment: SteppedEnvironment[Any, Any], world: World, action: ToolCall | Utterance, services: StepServices
) -> Stepped:
    """One action, with everything checked that holds of every step."""
    before = world.model_dump_json()
    stepped, result = await environment.step(world, action, services)
    if world.model_dump_json() != before:
        raise BrokenPromise(f"environment {environment.name} changed the world that it was given; change a copy")
    if not isinstance(stepped, environment.world_type) or not isinstance(result, StepResult):
        raise BrokenPromise(f"environment {environment.name}: expected (world, StepResult) from step, found {stepped!r:.80}")
    finite(environment.name, "reward", result.reward, "agent")
    finite_components(environment.name, result.components, "agent")
    info_of(environment.name, result.info)
    shown = seen_of(environment.name, action, result, EpisodeLimits().max_output_bytes)
    return Stepped(action, result, shown.messages, travelled_world(environment, stepped))


def travelled_world(environment: SteppedEnvironment[Any, Any], world: World) -> World:
    """A world as it comes back from JSON."""
    try:
        written = world.model_dump_json()
        back = environment.world_type.model_validate_json(written)
    except (ValidationError, ValueError) as error:
        raise BrokenPromise(f"a world of environment {environment.name} does not survive JSON: {error}") from None
    if back != world:
        raise BrokenPromise(
            f"a world of environment {environment.name} is another one when it comes back from JSON: {written:.200}"
        )
    return cast("World", back)


def said_by_agent(action: ToolCall | Utterance) -> ChatMessage:
    """The agent's message that an action was in."""
    if isinstance(action, Utterance):
        return {"role": "assistant", "content": action.text}
    function = {"name": action.name, "arguments": json.dumps(action.arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": action.id, "type": "function", "function": function}],
    }


def _require_json(name: str, diagnostics: Mapping[str, object]) -> None:
    try:
        json.dumps(diagnostics, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise BrokenPromise(f"environment {name}: expected JSON values in diagnostics, found {error}") from None
