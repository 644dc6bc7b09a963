"""Base for environments whose tools change a state: a state class, functions as tools, a score at the end.

    class Purse(World):
        coins: int = 0

    class PurseEnvironment(ToolEnvironment[PurseTask, Purse]):
        name, version, task_type, world_type = "purse", "1", PurseTask, Purse

        def begin(self, task):
            return Purse(coins=task.coins)

        @tool
        async def spend(self, world: Purse, coins: Annotated[int, Field(ge=1)]) -> str:
            "Spend some coins."
            if coins > world.coins:
                raise ToolError(f"there are only {world.coins}")
            world.coins -= coins
            return f"{world.coins} left"

        async def score(self, task, world, episode, services):
            return Verdict(reward=float(world.coins == task.left))

A tool changes the world that it is given, which is a copy, and returns what the agent sees: text, or anything that pydantic can
write as JSON. It must do the same to the same world and arguments, because an action may be carried out twice.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from rollstream.environments.protocol import (
    Episode,
    Seeded,
    Services,
    StepResult,
    StepServices,
    Task,
    TaskLimits,
    Verdict,
    World,
)
from rollstream.errors import BoundaryFailure, EnvironmentFailure, Refused
from schemas.action import ToolCall, Utterance
from schemas.events import describe
from schemas.session import Submission
from schemas.values import ChatMessage, JsonObject

T = TypeVar("T", bound=Task)
W = TypeVar("W", bound=World)
F = TypeVar("F", bound=Callable[..., Any])

MARK = "__rollstream_tool__"
_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


class ToolError(Exception):
    """What the agent did cannot be done; it sees the message, and the world stays as it was."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returns that does more than show something.

    Attributes:
        shown: what the agent sees.
        reward: of this call.
        done: the world has come to its end.
        truncated: the environment breaks the episode off.
    """

    shown: object
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    info: Mapping[str, object] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)


def tool(function: F) -> F:
    """Offer an async method `(self, world, …)` to the agent, under its own name, with its docstring as description.

    Arguments need types; `Annotated[int, Field(description=…)]` says more. An argument called `services` gets the
    `StepServices`, and is not shown.
    """
    is_async: bool = inspect.iscoroutinefunction(function)
    if not is_async:
        raise TypeError(f"expected an async function as tool, found {function!r}")
    setattr(function, MARK, True)
    return function


@dataclass(frozen=True, slots=True)
class Combination:
    """How what the steps earned and the terminal score become one reward; both stand in the components besides."""

    terminal: float = 1.0
    """Weight of the terminal score."""
    steps: float = 0.0
    """Weight of the sum of all step rewards."""

    def combine(self, verdict: Verdict, step_rewards: Sequence[float]) -> Verdict:
        """The verdict with the combined reward. Without step rewards and without weight for them, it is left as it is."""
        if verdict.reward is None or (not step_rewards and not self.steps):
            return verdict
        shaping = sum(step_rewards, 0.0)
        components = {**verdict.components, "terminal": verdict.reward, "steps": shaping}
        reward = self.terminal * verdict.reward + self.steps * shaping
        return Verdict(reward, verdict.success, components, verdict.diagnostics, verdict.hermetic)


@dataclass(frozen=True, slots=True)
class _Tool:
    """One tool of a class."""

    name: str
    description: str
    arguments: type[BaseModel]
    wants_services: bool

    @classmethod
    def of(cls, name: str, function: Callable[..., Any]) -> "_Tool":
        parameters = list(inspect.signature(function).parameters.values())
        if len(parameters) < 2:
            raise TypeError(f"expected tool {name} as a method that takes self and a world")
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in parameters[2:]:
            if parameter.name == "services":
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or parameter.name not in hints:
                raise TypeError(f"expected argument {parameter.name} of tool {name} with a type and a name of its own")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
        try:
            # As strict as JSON allows: "3" is no integer, and what nobody asked for is a mistake.
            arguments = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid", strict=True), **fields)
        except PydanticUserError as error:
            raise TypeError(f"the arguments of tool {name} have no JSON schema: {error}") from None
        return cls(name, inspect.cleandoc(function.__doc__ or ""), arguments, "services" in [p.name for p in parameters])

    def offered(self) -> JsonObject:
        """The tool as an OpenAI function tool."""
        parameters = _untitled(self.arguments.model_json_schema())
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def _untitled(schema: Any) -> Any:
    """A JSON schema without the titles and the docstring that pydantic makes up."""
    if isinstance(schema, dict):
        kept = {name: item for name, item in schema.items() if name != "title" or not isinstance(item, str)}
        if isinstance(kept.get("properties"), dict):
            kept["properties"] = {name: _untitled(item) for name, item in kept["properties"].items()}
        return {name: item if name == "properties" else _untitled(item) for name, item in kept.items()}
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    return schema


class ToolEnvironment(Generic[T, W]):
    """Inherit, name `name`, `version`, `task_type`, `world_type`, write `begin`, tools and `score`."""

    name: ClassVar[str]
    version: ClassVar[str]
    task_type: type[T]
    world_type: type[W]
    public_fields: ClassVar[frozenset[str]] = frozenset()
    success_threshold: ClassVar[float] = 1.0
    combination: ClassVar[Combination] = Combination()
    limits: ClassVar[TaskLimits] = TaskLimits()
    _tools: ClassVar[Mapping[str, _Tool]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        marked = {name: getattr(cls, name) for name in dir(cls) if hasattr(getattr(cls, name), MARK)}
        cls._tools = {name: _Tool.of(name, function) for name, function in marked.items()}

    def begin(self, task: T) -> W:
        """Where the world of a task begins."""
        raise NotImplementedError

    def prompt(self, task: T) -> list[ChatMessage]:
        """What the agent sees first, when the row brings no messages."""
        raise Refused(f"expected messages in a task of environment {self.name}, found none")

    async def score(self, task: T, world: W, episode: Episode, services: Services) -> Verdict:
        """The terminal score, from how the world ended; the steps' rewards are combined with it afterwards."""
        raise NotImplementedError

    def step_reward(self, before: W, after: W, call: ToolCall) -> float | None:
        """What a call earned whose tool did not say so itself."""
        return None

    def reference(self, task: T) -> Submission | None:
        return None

    def reference_actions(self, task: T) -> Sequence[ToolCall | Utterance]:
        return ()

    def tools(self) -> list[JsonObject]:
        """All tools, as they are offered to the model."""
        return [one.offered() for one in self._tools.values()]

    def seed(self, task: T) -> Seeded:
        offered = task.tools or self.tools()
        unknown = sorted(str(name) for name in map(_name_of, offered) if name not in self._tools)
        if unknown:
            known = ", ".join(sorted(self._tools))
            raise Refused(f"expected tools of environment {self.name}, which has {known}; found {', '.join(unknown)}")
        return Seeded(
            messages=task.messages or self.prompt(task),
            tools=offered,
            interaction="tools",
            world=self.begin(task),
            limits=self.limits,
        )

    async def step(self, world: W, action: ToolCall | Utterance, services: StepServices) -> tuple[W, StepResult]:
        if not isinstance(action, ToolCall):
            return world, StepResult("error: this world is acted on with tools only")
        found = self._tools.get(action.name)
        if found is None:
            return world, StepResult(
                f"error: no tool is called {action.name!r:.100}; there are {', '.join(sorted(self._tools))}"
            )
        try:
            # Through JSON mode: strict, and yet a list may become a set and a text a date.
            arguments = found.arguments.model_validate_json(_ANYTHING.dump_json(action.arguments))
        except ValidationError as error:
            return world, StepResult(f"error: expected valid arguments of {action.name}, found {describe(error)}")
        after = world.model_copy(deep=True)
        given = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        if found.wants_services:
            given["services"] = services
        try:
            returned = await getattr(self, action.name)(after, **given)
        except ToolError as error:
            return world, StepResult(f"error: {error}")
        except BoundaryFailure:
            raise
        except Exception as error:
            message = f"tool {action.name} of environment {self.name} raised {type(error).__name__}: {error}"
            raise EnvironmentFailure(message, stage="agent", kind="tool_raised") from error
        result = returned if isinstance(returned, ToolResult) else ToolResult(returned)
        reward = self.step_reward(world, after, action) if result.reward is None else result.reward
        shown = self._shown(action.name, result.shown)
        return after, StepResult(shown, reward, result.done, result.truncated, result.info, result.components)

    async def verify(self, task: T, episode: Episode, services: Services) -> Verdict:
        if not isinstance(episode.world, self.world_type):
            found = f"expected how the world of environment {self.name} ended, found a {type(episode.world).__name__}"
            raise EnvironmentFailure(found, stage="verification", kind="no_world")
        verdict = await self.score(task, episode.world, episode, services)
        return self.combination.combine(verdict, [step.reward for step in episode.steps if step.reward is not None])

    def _shown(self, name: str, value: object) -> str | bytes:
        if isinstance(value, str | bytes):
            return value
        try:
            return _ANYTHING.dump_json(value).decode()
        except (ValueError, TypeError) as error:
            message = f"tool {name} of environment {self.name} returned what is no JSON: {error}"
            raise EnvironmentFailure(message, stage="agent", kind="bad_observation") from None


def _name_of(offered: JsonObject) -> object:
    function = offered.get("function")
    return function.get("name") if isinstance(function, dict) else None
