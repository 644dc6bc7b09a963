"""What an environment is: it admits a task, says how to interact with it, and scores what comes back.

A row's fields are grading data unless the environment names them in `public_fields`; grading data reaches `verify` inside a
sealed ticket and nothing else. Only environment code produces reward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator

from rollstream.errors import EnvironmentFailure
from schemas.episode import StopReason
from schemas.session import Interaction, Placement, Submission
from schemas.values import ChatMessage, JsonObject

R = TypeVar("R")


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


@dataclass(frozen=True, slots=True)
class Seeded:
    """A task accepted: what the agent sees first."""

    messages: list[ChatMessage]
    tools: list[JsonObject] = field(default_factory=list)
    interaction: Interaction = "single_turn"
    placement: Placement = "none"


@dataclass(frozen=True, slots=True)
class Episode:
    """What the agent left behind."""

    messages: list[ChatMessage]
    submission: Submission
    stop_reason: StopReason


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


class GraderTimeout(EnvironmentFailure):
    """A grading function did not answer within its deadline, and its process was killed.

    An environment that knows the submission to be at fault catches this and scores it; uncaught, it is retried.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, stage="verification", kind="grader_timeout", retryable=True)


class GraderCrashed(EnvironmentFailure):
    """The process of a grading function died (killed, out of memory, segmentation fault). A retry can help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, stage="verification", kind="grader_crashed", retryable=True)


class GraderRaised(EnvironmentFailure):
    """A grading function raised. That is a bug in the environment, so a retry cannot help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, stage="verification", kind="grader_raised", retryable=False)


class Graders(Protocol):
    """Runs a grading function that may hang or crash, in a process that can be killed."""

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """Call a module-level `function` with picklable arguments in another process.

        The process imports the function's module and nothing else of the application, and knows none of its secrets. A
        function `prepare_grading()` in that module is called once before, outside the deadline: slow imports belong there.

        Returns:
            What `function` returned, which must be a JSON value: the process has read what an agent wrote, so nothing
            that could run code is accepted from it.

        Raises:
            GraderTimeout: it did not answer within the deadline; its process was killed.
            GraderCrashed: its process died; a retry can help.
            GraderRaised: it raised; a retry cannot help.
        """
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What `verify` may use. Handed in by the verifier_worker; environments own no clients."""

    graders: Graders


class Environment(Protocol[T]):
    """One world. Instances are stateless and shared by all sessions of a worker."""

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
