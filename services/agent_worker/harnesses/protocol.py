"""What a harness is: it opens an agent session, is activated once a turn, and hands in a submission.

A harness orchestrates models, tools and context. It never sees grading data and never says what anything is worth. It has no
way to the environment either: it says what the agent does, and is activated again with what came of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from rollstream.errors import ModelFailure, RollstreamError
from rollstream.models.protocol import Completion, ContextOverflow
from rollstream.sandboxes.protocol import Sandbox
from rollstream.settings import HarnessSettings
from schemas.action import ToolCall, Utterance
from schemas.episode import StopReason
from schemas.session import Interaction, SessionReady, Submission
from schemas.values import ChatMessage, JsonObject


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a harness can play."""

    interactions: frozenset[Interaction]
    tools: bool = False
    needs_sandbox: bool = False


class LimitReached(RollstreamError):
    """The agent has used up its steps or its tokens. Let it pass: it ends the episode, as an outcome."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the agent has reached its limit: {reason}")
        self.reason: StopReason = reason


class Models(Protocol):
    """The run's models by role. Every call is recorded as an AgentStepped event."""

    async def complete(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = (), role: str = "policy"
    ) -> Completion:
        """One model call.

        Raises:
            ContextOverflow: the prompt does not fit; stop with `context_overflow`.
            ModelFailure: let it pass; it is not the agent's fault.
            LimitReached: let it pass; the episode ends, and is scored.
        """
        ...

    async def record(self, completion: Completion, new_messages: Sequence[ChatMessage] = (), role: str = "policy") -> None:
        """A call that an agent in a box made by itself, as its own events tell of it. Durable when this returns.

        Args:
            new_messages: what came between the last call and this one, such as results of the agent's own tools.

        Raises:
            LimitReached: it was one too many; let it pass.
        """
        ...


class Door(Protocol):
    """The way from a box to the policy model."""

    @property
    def failure(self) -> ModelFailure | ContextOverflow | None:
        """How the model failed last, if its last call did: what a program in the box cannot be trusted to tell."""
        ...

    async def open(self) -> None:
        """Make sure that the model answers at `model_url`. Before every command: what kills those of the last closes it.

        Raises:
            BoundaryFailure: the box cannot have it.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentBox:
    """The box that an agent works in. It is started, its workspace stands, and it is closed by whoever made it.

    Attributes:
        model_url: where the policy model answers inside of the box once the door is open, without `/v1`; None when the box has
            no way to it.
        model: the id to ask for there.
        program: of a harness that has one: its path in the box, or its name, where the image brings it.
        settings: what this process's settings say of harnesses.
        tools_url: where the environment's tools are called by the Model Context Protocol; empty where it has none.
    """

    sandbox: Sandbox
    model_url: str | None = None
    model: str = ""
    door: Door | None = None
    program: str = ""
    settings: HarnessSettings = field(default_factory=HarnessSettings)
    tools_url: str = ""


@dataclass(frozen=True, slots=True)
class Mistake:
    """What was meant to be an action and cannot be one, such as a call whose arguments are no JSON: answered on the spot."""

    reply: ChatMessage
    """What the agent sees instead of an observation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One activation of the agent.

    Attributes:
        messages: what the agent added to the transcript, usually one assistant message.
        stop_reason: None when the agent would go on if the environment answered.
        actions: what it does, in order; the next activation gets all that came of it. Where an environment is acted on in
            words, a turn without actions is an utterance: the text of its last message.
    """

    messages: list[ChatMessage]
    stop_reason: StopReason | None
    actions: Sequence[ToolCall | Utterance | Mistake] = ()


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

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> AgentSession:
        """Start a session.

        Args:
            box: where the placement gives the agent one. What is handed in of it is harvested after `close`.

        Raises:
            Refused: this harness cannot play what the descriptor asks for.
        """
        ...
