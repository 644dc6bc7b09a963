"""Verdicts: the environment's terminal score of a session."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.envelope import SessionEvent
from schemas.step import Execution
from schemas.values import JsonObject, Name, Reward, Value


class StepReward(Value):
    """Reward of one step of the environment, by index."""

    index: Annotated[int, Field(ge=0)]
    reward: Reward | None


class VerdictReached(SessionEvent):
    """The environment scored a session."""

    kind: Literal["VerdictReached"] = "VerdictReached"
    execution: Execution
    revision: Annotated[int, Field(ge=0)] = 0
    """Raised by a regrade; the highest counts."""
    episode: Name
    """Id of the EpisodeCompleted that was scored."""
    environment_version: Name
    reward: Reward | None
    """Null means "not scored"; it is never the same as 0.0."""
    success: bool | None
    """The environment's own threshold; null when there is no reward."""
    components: dict[str, Reward] = {}
    steps: list[StepReward] = []
    """What the session's actions earned, as its last receipt tells."""
    diagnostics: JsonObject = {}
    """Why: what was parsed, what was compared. Holds no grading data beyond what the verdict itself tells."""
    hermetic: bool = True
    """False when verification shared a box with the agent."""
    duration_s: Annotated[float, Field(ge=0)] = 0.0
