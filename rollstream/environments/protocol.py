"""What an environment is: it admits a task, says how to interact with it, and scores what comes back.

A row's fields are grading data unless the environment names them in `public_fields`; grading data reaches `verify` inside a
sealed ticket and nothing else. Only environment code produces reward.

An environment that answers back is a `SteppedEnvironment`. Its world is a value that travels sealed from one action to the
next, so that any worker can carry out any action, and nobody keeps state. What it may use meanwhile stands in `services`, and
is imported from here as well: who writes an environment needs this module alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, field_validator

from rollstream.blobs import BlobReference
from rollstream.environments.services import (
    Blobs as Blobs,
    GraderCrashed as GraderCrashed,
    GraderRaised as GraderRaised,
    Graders as Graders,
    GraderTimeout as GraderTimeout,
    OpenServices as OpenServices,
    RoleModels as RoleModels,
    Sandboxes as Sandboxes,
    Services as Services,
    StepServices as StepServices,
    require_sandboxes as require_sandboxes,
    role_models as role_models,
)
from rollstream.errors import Refused
from schemas.action import ToolCall, Utterance
from schemas.episode import StopReason
from schemas.sandbox import SandboxSpec
from schemas.session import Interaction, Placement, Submission, Workspace
from schemas.values import ChatMessage, Composition, JsonObject
from schemas.verdict import StepReward

Timed = TypeVar("Timed", contravariant=True)


class Task(BaseModel):
    """Base of an environment's own task schema: validated at admission, rebuilt from the ticket for `verify`.

    Rows arrive flat: an unmodified NeMo Gym row's `verifier_metadata` or `task_data` is merged into the top level, and its
    `responses_create_params.input` and `.tools` are here as `messages` and `tools`. Unknown fields are kept out.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, validate_by_name=True)

    messages: list[ChatMessage] | None = None
    """The first observation, when the row brings it ready-made; otherwise the environment renders its own."""
    tools: list[JsonObject] | None = None

    @field_validator("messages")
    @classmethod
    def _leave_the_agent_to_answer(cls, messages: list[ChatMessage] | None) -> list[ChatMessage] | None:
        if not messages:
            return None
        if messages[-1].get("role") == "assistant":
            raise ValueError("expected messages that wait for the agent, found an assistant's message at their end")
        return messages


T = TypeVar("T", bound=Task)


class World(BaseModel):
    """Base of a world's state: everything that the next action depends on, as a value that survives JSON.

    A world that cannot be written down keeps what it takes to make it again, such as a seed and all actions so far.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


W = TypeVar("W", bound=World)


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Limits of one task. Each holds where it is lower than the run's own; None leaves the run's."""

    episode_timeout_s: float | None = None
    agent_timeout_s: float | None = None
    max_steps: int | None = None
    max_model_tokens: int | None = None
    max_output_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Seeded:
    """A task accepted: what the agent sees first.

    Attributes:
        world: where the world begins; for every interaction but `single_turn`. Made again from the task for the first action
            and for an episode without any, so two seeds of a task must give equal worlds.
        placement: `none`; `agent_in_env`, the agent works in a box that the environment describes; or `env_sandboxed`, the
            world is a box of the environment's own. The others follow from the harness.
        sandbox: the agent's box, for `agent_in_env`.
        workspace: what stands in it, and what is taken out of it at the end.
        roles: of models, beside the policy, that the run must bind for this task (`--role user=NAME`): what `step` and
            `verify` ask for. A run that does not is refused.
    """

    messages: list[ChatMessage]
    tools: list[JsonObject] = field(default_factory=list)
    interaction: Interaction = "single_turn"
    placement: Placement = "none"
    world: World | None = None
    sandbox: SandboxSpec | None = None
    workspace: Workspace | None = None
    limits: TaskLimits = TaskLimits()
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an action brought about, as in Gymnasium.

    Attributes:
        observation: what the agent sees: a text (bytes are taken for UTF-8), or chat messages. A text becomes the result of a
            tool call, and what a user says next after an utterance.
        reward: of this action; None when the environment gives none for it.
        done: the world has come to its end.
        truncated: the environment breaks the episode off, at a limit of its own.
        info: diagnostics, never shown to the agent; JSON values only.
        components: what the reward is made of.
    """

    observation: str | bytes | Sequence[ChatMessage]
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    info: Mapping[str, object] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Episode:
    """What the agent left behind.

    Attributes:
        world: as the last action left it, from the sealed receipt; None for `single_turn`.
        steps: what the actions earned, in order, from the same receipt.
    """

    messages: list[ChatMessage]
    submission: Submission
    stop_reason: StopReason
    world: World | None = None
    steps: Sequence[StepReward] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The environment's terminal score.

    Attributes:
        reward: None means "could not be scored", which is not 0.0; prefer raising `EnvironmentFailure`, which is retried.
        success: None lets the environment's `success_threshold` decide.
        diagnostics: why; JSON values only.
    """

    reward: float | None
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    diagnostics: Mapping[str, object] = field(default_factory=dict)
    hermetic: bool = True


class Environment(Protocol[T]):
    """One world. Instances are stateless and shared by all sessions of a worker.

    One whose `seed` waits for something, such as a server, says so with `seed_blocks = True`, and is seeded in a thread.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    """Raised whenever the same submission could get another reward."""
    task_type: type[T]
    public_fields: ClassVar[frozenset[str]]
    """Fields of a row that the agent side may see. `messages` and `tools` always are."""
    success_threshold: ClassVar[float]
    """Lowest reward that counts as success, normally 1.0."""

    def seed(self, task: T) -> Seeded:
        """Accept a task. Pure and fast.

        Raises:
            Refused: this task cannot be played, with the reason.
        """
        ...

    def reference(self, task: T) -> Submission | None:
        """A submission that scores full reward, for the harness `oracle`; None if the task has none."""
        ...

    async def verify(self, task: T, episode: Episode, services: Services) -> Verdict:
        """Score an episode.

        Raises:
            EnvironmentFailure: scoring itself failed. A wrong, empty or unparsable answer is a verdict, never an exception.
        """
        ...


@runtime_checkable
class ShowsExample(Protocol):
    """An environment that shows a task, by which `rollstream matrix` tells what can be composed with it. Optional."""

    example: ClassVar[Mapping[str, object]]
    """A row that it accepts."""


class SteppedEnvironment(Environment[T], Protocol[T, W]):
    """An environment that answers back. Its `seed` names another interaction than `single_turn`, and gives a `world`.

    `verify` finds the last world and the rewards of the steps in the episode, out of a sealed receipt.
    """

    world_type: type[W]

    async def step(self, world: W, action: ToolCall | Utterance, services: StepServices) -> tuple[W, StepResult]:
        """Carry out one action.

        The world that comes in is not to be changed: it may be stepped again, when a record is handled twice. What an agent
        can do wrong (an unknown tool, a bad argument, an illegal move) is an observation, never an exception.

        Raises:
            EnvironmentFailure: the step itself failed; the session ends, is tried again if that can help, and scores no zero.
        """
        ...

    def reference_actions(self, task: T) -> Sequence[ToolCall | Utterance]:
        """What the harness `oracle` does before it hands in `reference`."""
        ...


@runtime_checkable
class OpensResources(Protocol):
    """An environment whose worlds have something outside themselves: a box, a connection, a server's session. Optional.

    One worker holds it from the first action of a session to its end, and undoes everything that was pushed on
    `services.cleanup`, in reverse order, `close` among it. What is killed undoes nothing: what is outside needs a lease.
    An action that another worker gets fails with `world_elsewhere`, and the attempt is tried again in a new session; an
    environment that can go on elsewhere has `resume` too (`ResumesResources`). One whose `verify` needs what is outside, and
    lets go of it afterwards, says so with `verify_closes = True`: `close` is called for sessions without a verdict only.
    """

    async def open(self, world: Any, services: OpenServices) -> Any:
        """The world of a session before its first action, with what it takes to find again what was opened.

        Raises:
            BoundaryFailure: it could not be opened. What was pushed is undone, and `close` is not called.
        """
        ...

    async def close(self, world: Any, services: OpenServices) -> None:
        """Let go of what `open` opened; called once the session is over, with the last world that the worker knows."""
        ...


def opens_resources(environment: object) -> TypeGuard[OpensResources]:
    """Whether an environment opens something. `isinstance` says the same, but takes as long as much of a step."""
    return hasattr(environment, "open") and hasattr(environment, "close")


@runtime_checkable
class ResumesResources(OpensResources, Protocol):
    """One that can go on in another worker, because what it opened has a lease of its own. Optional.

    A worker that stops, or loses a session to another one, leaves it as it is then, and closes nothing.
    """

    async def resume(self, world: Any, services: OpenServices) -> Any:
        """The world before an action that is not the first, in a worker that did not open it.

        Raises:
            BoundaryFailure: what was opened is not there any more.
        """
        ...


@runtime_checkable
class HandsOver(ResumesResources, Protocol):
    """One whose resources some workers can go on with and some cannot, or that can meet again what it has open. Optional."""

    async def leave(self, world: Any, services: OpenServices) -> bool:
        """Let go of what is open, so that another worker can resume; False where none could, and it is to be closed."""
        ...

    def holds(self, world: Any, services: OpenServices) -> bool:
        """Whether what is open in this worker is what a world speaks of that another worker has answered with."""
        ...


def require_roles(environment: Environment[Any], seeded: Seeded, composition: Composition) -> None:
    """Make sure that a run binds a model to every role that a task needs.

    Raises:
        Refused: it does not.
    """
    missing = sorted(seeded.roles - composition.models.keys())
    if missing:
        bound = ", ".join(sorted(composition.models))
        options = " ".join(f"--role {role}=MODEL" for role in missing)
        raise Refused(
            f"environment {environment.name} needs a model in the role {', '.join(missing)} for this task, and the run binds "
            f"{bound}; add {options}",
            kind="role_unbound",
        )


def verification_limit_s(environment: Environment[Any], task: Task, default_s: float) -> float:
    """Longest that a verification may take: the environment's word, or else the settings'."""
    return environment.verification_timeout_s(task) if isinstance(environment, TimesVerification) else default_s


def is_stepped(environment: Environment[Any]) -> TypeGuard[SteppedEnvironment[Any, Any]]:
    """Whether an environment can carry out actions."""
    return hasattr(environment, "step")


@dataclass(frozen=True, slots=True)
class ScoredVerdict:
    """What an environment said of one attempt that was scored, as a report gives it back."""

    task: str | None
    index: int
    """Of the attempt in its group."""
    reward: float
    success: bool | None
    components: Mapping[str, float]
    diagnostics: Mapping[str, Any]
    """JSON, as the verdict had it; absent names must be expected, since older versions wrote them."""


@runtime_checkable
class LocalisesRows(Protocol):
    """An environment whose rows may name what stands beside the task file. Optional.

    Workers see rows, and never the machine that they were published from: whatever a row names there becomes part of it.
    """

    def localise(self, row: JsonObject, folder: Path, keep: Callable[[bytes], BlobReference]) -> JsonObject:
        """A row that means the same anywhere. Called where a task file is published, on every pass over it.

        The same files must give the same row: ids and hashes come out of it.

        Args:
            row: flat, and not validated yet.
            folder: what paths in it are relative to.
            keep: takes what is too long for a row, and says what to call it there.

        Raises:
            Refused: something is missing or too big, with one sentence.
        """
        ...


@runtime_checkable
class TimesVerification(Protocol[Timed]):
    """An environment that needs another time for `verify` than `limits.verification_timeout_seconds`. Optional."""

    def verification_timeout_s(self, task: Timed) -> float:
        """Longest that `verify` may take for a task, in all."""
        ...


@runtime_checkable
class AggregatesMetrics(Protocol):
    """An environment that has metrics of its own over many verdicts. Optional."""

    def aggregate_metrics(self, verdicts: Iterable[ScoredVerdict]) -> Mapping[str, float]:
        """Metrics by name, which `rollstream report` prints beside its own. Pure.

        Args:
            verdicts: at least one, and perhaps a million: they can be gone through once.
        """
        ...
