"""Steps: one model call, or one event of a black-box agent."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from schemas.envelope import SessionEvent
from schemas.values import ChatMessage, JsonObject, Name, Sampling, Usage, Value


class Execution(Value):
    """One handling of a session by one worker."""

    id: Name
    fence: Annotated[int, Field(ge=0)] = 0
    """The consumer group's generation: a later owner has a higher one."""
    worker: str = ""


class Call(Value):
    """One model call, without its text: what a trainer and a bill need."""

    turn: Annotated[int, Field(ge=0)]
    model: str
    """The id the server answered to."""
    finish_reason: str | None = None
    usage: Usage = Usage()
    sampling: Sampling = Sampling()
    started_at: AwareDatetime
    duration_s: Annotated[float, Field(ge=0)]
    attempts: Annotated[int, Field(ge=1)] = 1
    """How many times the request was sent before it was answered."""
    policy_version: str | None = None
    cost_usd: Annotated[float, Field(ge=0)] | None = None
    """What whoever made the call says that it cost; null when nobody said."""


class AgentStepped(SessionEvent):
    """The agent made one step."""

    kind: Literal["AgentStepped"] = "AgentStepped"
    execution: Execution
    source: Literal["agent", "gateway"] = "agent"
    index: Annotated[int, Field(ge=0)]
    previous: Name | None = None
    """Id of the step before, which may be an earlier execution's: a trajectory is what its last step leads back to."""
    role: str = "policy"
    """Which of the run's models was called."""
    call: Call
    new_messages: list[ChatMessage] = []
    """What the prompt had beyond the session's first messages and earlier steps: observations, tool results."""
    message: ChatMessage
    """The answer, canonical."""
    response: JsonObject
    """The provider's response, verbatim (escaped where JSON cannot carry it)."""
    escaped: bool = False
    """True when some text or number of the response had to be escaped or cut to fit the log."""
