"""What environments may use while they open, step and verify. Handed in by the workers: environments own no clients."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollstream.blobs import BlobReference
from rollstream.environments.cleanup import CleanUpStack
from rollstream.errors import EnvironmentFailure
from rollstream.models.protocol import Completion
from rollstream.sandboxes.held import SessionBoxes
from rollstream.sandboxes.protocol import Sandbox
from schemas.sandbox import SandboxSpec
from schemas.values import ChatMessage

R = TypeVar("R")


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


class RoleModels(Protocol):
    """The run's models by the roles that environments give them. Every call is recorded with what came of it."""

    async def complete(self, messages: Sequence[ChatMessage], role: str) -> Completion:
        """One model call.

        Raises:
            ContextOverflow: the prompt does not fit.
            ModelFailure: let it pass; it is not the agent's fault.
            EnvironmentFailure: the run binds no model to this role.
        """
        ...


class Sandboxes(Protocol):
    """Boxes of the run's sandbox backend, each under a lease in the name of the session."""

    def fresh(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """A started box that nobody has used, for the time of the `with`; destroyed afterwards whatever happened.

        Raises:
            SandboxUnavailable: the backend failed; a retry can help.
            Refused: it cannot hold the box to its specification, or has no such image.
        """
        ...


class Blobs(Protocol):
    """What is too long for a record, by reference."""

    async def get(self, reference: BlobReference) -> bytes: ...
    async def put(self, content: bytes) -> BlobReference: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What `verify` may use. Handed in by the verifier_worker; environments own no clients."""

    graders: Graders
    models: RoleModels | None = None
    """The run's models by role, for judges; None where no run binds any. `role_models` says so in a sentence."""
    sandboxes: Sandboxes | None = None
    """None where the run names no sandbox backend. `require_sandboxes` says so in a sentence."""
    blobs: Blobs | None = None


@dataclass(frozen=True, slots=True)
class OpenServices:
    """What an environment may use that holds something outside its worlds, for one session in one worker.

    Attributes:
        fence: of whoever acts, never falling: what is outside should refuse a lower one than it has seen.
        cleanup: `cleanup.push(callback)` lets something be undone once the session is over.
        live: objects that cannot be written down (a connection, a box). They are this worker's: `resume` finds none.
        boxes: of the run's sandbox backend, to be held from one action to the next; None where the run names none.
        blobs: what is too long for a record.
    """

    session: str
    fence: int
    cleanup: CleanUpStack
    live: dict[str, Any]
    boxes: SessionBoxes | None = None
    blobs: Blobs | None = None


@dataclass(frozen=True, slots=True)
class StepServices:
    """What `step` may use. Handed in by the env_worker."""

    models: RoleModels
    index: int
    """Of the action, from 0."""
    opened: OpenServices | None = None
    """What `open` was given, for an environment that has one."""
    action: str = ""
    """Id of the action; one that is carried out again, here or elsewhere, has the same."""
    max_output_bytes: int = 1_000_000
    """Longest text that the agent wants to see; what is longer loses its end, if nobody cuts it better."""


def role_models(services: Services, role: str) -> RoleModels:
    """The models that a verification may ask.

    Raises:
        EnvironmentFailure: there are none.
    """
    if services.models is None:
        message = f"expected a run that binds a model to the role {role}, found none"
        raise EnvironmentFailure(message, stage="verification", kind="role_unbound")
    return services.models


def require_sandboxes(services: Services) -> Sandboxes:
    """The boxes that a verification may start.

    Raises:
        EnvironmentFailure: there are none.
    """
    if services.sandboxes is None:
        message = "expected a run that names a sandbox backend, found none; publish it with --sandbox"
        raise EnvironmentFailure(message, stage="verification", kind="no_sandbox")
    return services.sandboxes
