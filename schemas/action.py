"""Actions and what they brought about: how an agent and its environment talk through the log.

    ActionRequested  ─▶  ObservationReturned (what the agent sees)
                         StepRewarded, EnvironmentCalled (what the agent never sees)

The agent side carries a sealed ticket and the latest sealed receipt, both unopened, so any env_worker can answer any action
from its record alone. An action that is handled twice has observations of one id, and the first by offset is the one that
happened.
"""

import hashlib
from typing import Annotated, Literal

import orjson
from pydantic import Field

from schemas.envelope import Headers, SessionEvent, composition_headers
from schemas.failure import ErrorInfo
from schemas.identities import event_id
from schemas.step import Call, Execution
from schemas.values import ChatMessage, Composition, JsonObject, Name, Reward, Value


class ToolCall(Value):
    """The agent calls one of the environment's tools."""

    type: Literal["tool_call"] = "tool_call"
    id: str
    """The id under which the model made the call: its observation is a message of role `tool` with this `tool_call_id`."""
    name: Annotated[str, Field(max_length=512)]
    arguments: JsonObject = {}


class Utterance(Value):
    """The agent says something: its message is the action, in a conversation or in a world that is acted on in words."""

    type: Literal["utterance"] = "utterance"
    text: str


Action = Annotated[ToolCall | Utterance, Field(discriminator="type")]


def chained_digest(previous: str, action: ToolCall | Utterance) -> str:
    """SHA-256 over all actions so far: the digest before this one, and the action."""
    body = orjson.dumps(action.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(previous.encode() + b"\n" + body).hexdigest()


def action_id(session: str, execution: str, source: str, index: int) -> str:
    """Id of an ActionRequested.

    Args:
        execution: that of the model call which asked for the action. An execution that takes a session over asks again under
            the same id, so that what keeps a journal of actions can tell.
    """
    return event_id("ActionRequested", session, execution, source, index)


def observation_id(action: str) -> str:
    """Id of the ObservationReturned to an action."""
    return event_id("ObservationReturned", action)


class ActionRequested(SessionEvent):
    """The agent acts. Written by the agent side, answered by any env_worker."""

    kind: Literal["ActionRequested"] = "ActionRequested"
    execution: Execution
    source: Literal["agent", "gateway"] = "agent"
    index: Annotated[int, Field(ge=0)]
    """Of the session's actions, from 0, without a gap."""
    step: Name | None = None
    """Id of the AgentStepped whose answer asked for this; null when no model did."""
    action: Action
    composition: Composition
    """For the environment's own roles."""
    max_output_bytes: Annotated[int, Field(ge=1)]
    """Longest text that the agent wants to see."""
    ticket: str
    """Sealed, unopened, from SessionReady."""
    receipt: str | None = None
    """Sealed, unopened, from the observation before; null for the first action."""

    def headers(self) -> Headers:
        return [*super().headers(), *composition_headers(self.composition)]


class ObservationReturned(SessionEvent):
    """The environment answered an action. Holds no reward and nobody's thoughts: the agent side reads it."""

    kind: Literal["ObservationReturned"] = "ObservationReturned"
    action: Name
    """Id of the ActionRequested."""
    execution: Execution
    """That of the action."""
    index: Annotated[int, Field(ge=0)]
    messages: list[ChatMessage] = []
    """What the agent sees, as chat messages: the result of a tool call, or what somebody says."""
    done: bool = False
    """The world has come to its end; nobody acts any more."""
    truncated: bool = False
    """The environment broke the episode off at a limit of its own."""
    receipt: str | None = None
    """Sealed: the world after the action, and what was earned so far. Null when there is a failure."""
    failure: ErrorInfo | None = None
    """Why the action could not be carried out; never the agent's fault, and the session ends with it."""
    escaped: bool = False
    """True when something had to be escaped or cut to fit the log."""
    duration_s: Annotated[float, Field(ge=0)] = 0.0
    worker: str = ""


class StepRewarded(SessionEvent):
    """An action earned something, or nothing. Written by env_worker alone, and never shown to the agent."""

    kind: Literal["StepRewarded"] = "StepRewarded"
    action: Name
    """Id of the ActionRequested."""
    execution: Execution
    """That of the action."""
    index: Annotated[int, Field(ge=0)]
    reward: Reward | None
    """Null means that the environment gives no reward for this action, and only tells something about it."""
    components: dict[str, Reward] = {}
    info: JsonObject = {}
    """Diagnostics, as Gymnasium's `info`."""


class EnvironmentCalled(SessionEvent):
    """An environment asked a model of one of its roles (a simulated user, a judge), whatever came of the step or the verdict.

    Written by env_worker and verifier_worker, and never shown to the agent: the answer may tell what it is not to know. A step
    or a verification that is done twice has two sets of calls, because both were paid for.
    """

    kind: Literal["EnvironmentCalled"] = "EnvironmentCalled"
    stage: Literal["agent", "verification"]
    cause: Name
    """Id of the ActionRequested, or of the EpisodeCompleted."""
    execution: Execution
    """The handling of the action or of the episode in which the call was made."""
    index: Annotated[int, Field(ge=0)]
    """Among the calls of this handling, from 0."""
    role: str
    call: Call
    message: ChatMessage
    """The answer, canonical."""
    response: JsonObject
    """The provider's response, verbatim; `{"omitted_bytes": …}` where it was too long."""
    escaped: bool = False
    """True when something had to be escaped or cut to fit the log."""
