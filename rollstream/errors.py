"""Every failure that rollstream knows by name.

    RollstreamError
    ├── UsageError              the caller asked for something that cannot be; the message says what to do
    │   ├── BrokerUnavailable   no broker answers, or none can be started here
    │   └── StoreUnavailable    there is no published store to read
    ├── BrokerRefuses           the broker will never take what is written: a deployment's fault, which ends a worker
    ├── NothingToExport         what was asked is sound, and no attempt matches it
    ├── Poison                  a record that nobody can ever handle (undecodable, wrong kind, no ids)
    ├── BoundaryFailure         something outside our code failed; says whether a retry can help
    │   ├── ModelFailure        the model server
    │   ├── EnvironmentFailure  an environment plug-in or what it depends on
    │   │   └── NoRoom          a worker holds as many open worlds as it may; nothing was tried
    │   ├── SandboxUnavailable  a sandbox or its engine; never a command that failed
    │   └── EpisodeTimeout      one of our own limits passed that is not an agent's outcome
    └── Refused                 what was asked cannot work together (composition, admission): terminal, one sentence

An *outcome* (wrong answer, agent limit reached) is never an exception: it is an event with a reward.
Anything not listed here is a bug: it propagates, is dead-lettered with its traceback, and fails tests.
"""

from typing import Literal

Stage = Literal["admission", "seed", "agent", "verification", "cleanup"]


class RollstreamError(Exception):
    """Base of all named failures. `str(error)` is one sentence: what was expected, what was found, what to do."""


class UsageError(RollstreamError):
    """Bad input from a person. The CLI prints it in one line and exits with 2."""


class BrokerUnavailable(UsageError):
    """No broker can be reached or started. The CLI exits with 3."""


class BrokerRefuses(RollstreamError):
    """The broker said of records that it will not have them, now or later; repeating them cannot help."""


class StoreUnavailable(UsageError):
    """No published trajectory store can be read. The CLI exits with 4."""


class NothingToExport(RollstreamError):
    """An export would be empty. The message says what was looked at, and the CLI exits with 1."""


class Poison(RollstreamError):
    """A record that can never be handled, however often it is read."""


class BoundaryFailure(RollstreamError):
    """A failure at the edge of the system, typed at the place where it happens.

    Attributes:
        stage: where in the episode it happened.
        kind: short machine-readable name, e.g. `model_unavailable`.
        retryable: whether trying again can help.
        retry_after_s: when the failing side said how long to wait; null leaves it to the retry policy.
        counts: False when nothing was tried (an open circuit breaker): waiting then uses up no attempt.
    """

    retry_after_s: float | None = None
    counts: bool = True

    def __init__(self, message: str, *, stage: Stage, kind: str, retryable: bool) -> None:
        super().__init__(message)
        self.stage: Stage = stage
        self.kind = kind
        self.retryable = retryable


class ModelFailure(BoundaryFailure):
    """The model server failed; never the agent's fault, never a zero reward."""

    def __init__(self, message: str, *, kind: str, retryable: bool, stage: Stage = "agent") -> None:
        super().__init__(message, stage=stage, kind=kind, retryable=retryable)


class CircuitOpen(ModelFailure):
    """The model server has failed so often that nobody asks it for a while; this call was not made."""

    counts = False

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, kind="model_circuit_open", retryable=True)
        self.retry_after_s = retry_after_s


class EnvironmentFailure(BoundaryFailure):
    """An environment could not seed, step or verify, for a reason that is not the agent's."""

    def __init__(self, message: str, *, stage: Stage, kind: str = "environment_error", retryable: bool = False) -> None:
        super().__init__(message, stage=stage, kind=kind, retryable=retryable)


class NoRoom(EnvironmentFailure):
    """A worker holds resources of as many sessions as it may. Nothing was opened, so waiting for it uses up no attempt."""

    KIND = "no_room"
    counts = False
    retry_after_s = 5.0

    def __init__(self, message: str) -> None:
        super().__init__(message, stage="agent", kind=self.KIND, retryable=True)


class SandboxUnavailable(BoundaryFailure):
    """A sandbox or its engine failed, which says nothing about what ran in it. A command that fails is a result."""

    def __init__(self, message: str, *, stage: Stage) -> None:
        super().__init__(message, stage=stage, kind="sandbox_unavailable", retryable=True)


class EpisodeTimeout(BoundaryFailure):
    """A limit that protects the system passed (not one of the agent's own limits, which are outcomes)."""

    def __init__(self, message: str, *, stage: Stage) -> None:
        super().__init__(message, stage=stage, kind="timeout", retryable=True)


class Refused(BoundaryFailure):
    """The task or the composition cannot run; trying again cannot help."""

    def __init__(self, message: str, *, stage: Stage = "admission", kind: str = "refused") -> None:
        super().__init__(message, stage=stage, kind=kind, retryable=False)
