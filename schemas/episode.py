"""Episodes: one try at a rollout, from seed to hand-in."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.envelope import Headers, SessionEvent, composition_headers
from schemas.session import Submission
from schemas.step import Call, Execution
from schemas.values import ChatMessage, Composition, EpisodeLimits, JsonObject, Name, Value

StopReason = Literal[
    "completed", "agent_timeout", "max_steps", "max_model_tokens", "length", "context_overflow", "content_filter", "truncated"
]
"""`truncated`: the environment broke the episode off; the others are the agent's own."""
TRUNCATED: frozenset[str] = frozenset(
    {"agent_timeout", "max_steps", "max_model_tokens", "length", "context_overflow", "content_filter", "truncated"}
)


class Sequence(Value):
    """One flat token stream of a contiguous context. Arrays are packed: little-endian, zstd, base64."""

    token_ids: str
    """int32."""
    spans: list[tuple[int, int, int]]
    """[start, end, call]: tokens [start, end) were sampled by that call; all others were given."""
    logprobs: str | None = None
    """float32, one a token; 0 where it was given."""


class EpisodeTiming(Value):
    """Where an episode's time went, in seconds."""

    queued_s: Annotated[float, Field(ge=0)] = 0.0
    agent_s: Annotated[float, Field(ge=0)] = 0.0
    """From the harness's start to the hand-in; `model_s` and `environment_s` are part of it."""
    environment_s: Annotated[float, Field(ge=0)] = 0.0
    """Waiting for what the environment answers to actions."""
    model_s: Annotated[float, Field(ge=0)] = 0.0
    verify_s: Annotated[float, Field(ge=0)] = 0.0


class EpisodeCompleted(SessionEvent):
    """The agent handed in. Written by the agent side, so it has no reward, by design."""

    kind: Literal["EpisodeCompleted"] = "EpisodeCompleted"
    execution: Execution
    composition: Composition
    environment_version: Name
    harness_version: Name
    stop_reason: StopReason
    submission: Submission
    messages: list[ChatMessage]
    """The whole transcript, canonical OpenAI chat."""
    tools: list[JsonObject] = []
    steps: list[str]
    """Ids of the AgentStepped events that make up this trajectory; steps of other executions do not belong to it."""
    actions: list[str] = []
    """Ids of the ActionRequested events of this trajectory, in order."""
    calls: list[Call]
    sequences: list[Sequence] = []
    timing: EpisodeTiming
    limits: EpisodeLimits
    seeded_at: datetime
    submitted_at: datetime
    ticket: str
    """Sealed, unopened, from SessionReady."""
    receipt: str | None = None
    """Sealed, unopened, from the last observation: the final world and the step rewards. Null when nobody acted."""

    def headers(self) -> Headers:
        return [*super().headers(), *composition_headers(self.composition)]
