"""What a harness is: it opens an agent session, is activated once a turn, and hands in a submission.

A harness orchestrates models, tools and context. It never sees grading data and never says what anything is worth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rollstream.models.protocol import Completion
from schemas.episode import StopReason
from schemas.session import Interaction, SessionReady, Submission
from schemas.values import ChatMessage, JsonObject


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a harness can play."""

    interactions: frozenset[Interaction]
    tools: bool = False
    needs_sandbox: bool = False


class Models(Protocol):
    """The run's models by role. Every call is recorded as an AgentStepped event."""

    async def complete(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = (), role: str = "policy"
    ) -> Completion:
        """One model call.

        Raises:
            ContextOverflow: the prompt does not fit; stop with `context_overflow`.
            ModelFailure: let it pass; it is not the agent's fault.
        """
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One activation of the agent.

    Attributes:
        messages: what the agent added to the transcript, usually one assistant message.
        stop_reason: None when the agent would go on if the environment answered.
    """

    messages: list[ChatMessage]
    stop_reason: StopReason | None


class AgentSession(Protocol):
    """One agent at work on one session."""

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        """React to what the environment shows: the first observation, or what is new since the last turn."""
        ...

    async def close(self) -> Submission:
        """Hand in what there is, also after a limit or a failure. Called once."""
        ...


class Harness(Protocol):
    """Opens agent sessions. Instances are stateless and shared by all sessions of a worker."""

    name: ClassVar[str]
    version: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    async def open(self, descriptor: SessionReady, models: Models) -> AgentSession:
        """Start a session.

        Raises:
            Refused: this harness cannot play what the descriptor asks for.
        """
        ...
