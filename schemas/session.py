"""Sessions: the environment's answer to a task."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.envelope import SessionEvent
from schemas.values import ChatMessage, Composition, EpisodeLimits, JsonObject, Name, Value

Interaction = Literal["single_turn", "tools", "conversation", "gymnasium", "agent_in_env", "task_folder"]
Placement = Literal["none", "agent_sandboxed", "env_sandboxed", "agent_in_env", "separate"]


class Submission(Value):
    """What the agent hands in: its last message, or an artifact."""

    text: str = ""
    artifact: str | None = None
    """For example a unified diff."""


class SessionReady(SessionEvent):
    """A SessionDescriptor: "accepted; here is how to interact". Holds nothing that grades."""

    kind: Literal["SessionReady"] = "SessionReady"
    composition: Composition
    environment_version: Name
    interaction: Interaction = "single_turn"
    placement: Placement = "none"
    messages: list[ChatMessage]
    """The first observation, as OpenAI chat messages."""
    tools: list[JsonObject] = []
    limits: EpisodeLimits
    ticket: str
    """Sealed: the task's grading data, bound to this session. Carried by the agent side, never opened there."""
    submitted_at: datetime
    """When the task was published; queueing counts from here."""
    failures: Annotated[int, Field(ge=0)] = 0
    """How many sessions of this attempt have failed before, in this round. What was only held back does not count."""
    reference: Submission | None = None
    """The environment's own solution; present only in runs published with the harness `oracle`."""
