"""Retries as events: who waits for what, until when. A waiting retry survives every restart because it stands in the log."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from schemas.envelope import Headers, SessionEvent, composition_headers
from schemas.episode import EpisodeCompleted
from schemas.failure import ErrorInfo
from schemas.values import Composition, EpisodeLimits, Name

RetryStage = Literal["agent", "verification"]
"""What happens again: a new session from its seed on, or the verification of the episode that there is."""


class RetryScheduled(SessionEvent):
    """Something is to be tried again. The ids are those of the session that failed or was held back.

    Stage `agent` opens a new session (`next_round`, `next_try`) from the ticket; stage `verification` verifies `episode` again.
    """

    kind: Literal["RetryScheduled"] = "RetryScheduled"
    stage: RetryStage
    failures: Annotated[int, Field(ge=0)]
    """How often this stage has failed so far; work that was only held back (a paused run, an open breaker) adds none."""
    next_round: Annotated[int, Field(ge=0)]
    next_try: Annotated[int, Field(ge=0)]
    not_before: AwareDatetime
    cause: ErrorInfo
    composition: Composition
    limits: EpisodeLimits
    ticket: str
    """Sealed for the session of the ids; the next session gets its own."""
    submitted_at: datetime
    episode: EpisodeCompleted | None = None
    worker: Name = "unknown"
    """Who scheduled it."""
    revision: Annotated[int, Field(ge=0)] = 0
    """Of the verdict to be reached: above 0, an episode that has ended is verified once more, and both records are kept."""
    environment_version: Name | None = None
    """Which version of the environment is to verify; null for whichever there is."""

    @model_validator(mode="after")
    def _verification_has_its_episode(self) -> Self:
        if (self.stage == "verification") != (self.episode is not None):
            raise ValueError("a retry of stage verification carries its episode, and no other does")
        return self

    def key(self) -> bytes:
        return self.rollout.encode()

    def headers(self) -> Headers:
        return [
            *super().headers(),
            *composition_headers(self.composition),
            ("stage", self.stage.encode()),
            ("next_round", b"%d" % self.next_round),
            ("next_try", b"%d" % self.next_try),
            ("revision", b"%d" % self.revision),
        ]
