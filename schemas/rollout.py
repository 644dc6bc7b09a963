"""RolloutScored: the terminal record of an attempt, and what trainers get.

`mask.loss` says "do not train on it", `mask.baseline` says "do not count it in the group's baseline".
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from schemas.envelope import Event, Headers, SessionIds, now
from schemas.episode import TRUNCATED, EpisodeCompleted, EpisodeTiming, Sequence
from schemas.failure import ErrorInfo
from schemas.identities import event_id
from schemas.session import Submission
from schemas.step import Call
from schemas.values import ChatMessage, Composition, JsonObject, Reward, Usage, Value
from schemas.verdict import StepReward, VerdictReached

Status = Literal["completed", "truncated", "errored", "cancelled"]


class Mask(Value):
    """Two bits for trainers, and why."""

    loss: bool
    baseline: bool
    reason: str | None = None


class Versions(Value):
    """Identities and versions of what produced the rollout."""

    environment: str | None = None
    harness: str | None = None
    harness_version: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    sandbox_image: str | None = None


def terminal_event_id(session: str, revision: int = 0) -> str:
    """Id of a session's terminal record. A regrade (revision > 0) is another record, so it has another id."""
    return event_id("RolloutScored", session, revision) if revision else event_id("RolloutScored", session)


class RolloutScored(Event, SessionIds):
    """One attempt ended. One of these counts for each attempt: highest (round, revision), then first by offset."""

    kind: Literal["RolloutScored"] = "RolloutScored"
    revision: Annotated[int, Field(ge=0)] = 0
    verdict: str | None = None
    """Id of the VerdictReached it used; null when there is none."""
    status: Status
    stop_reason: str
    error: ErrorInfo | None = None
    reward: Reward | None
    """Null means "not scored" (an infrastructure failure); it is never the same as 0.0."""
    success: bool | None
    reward_components: dict[str, Reward] = {}
    steps: list[StepReward] = []
    mask: Mask
    submission: Submission | None = None
    messages: list[ChatMessage] = []
    tools: list[JsonObject] = []
    calls: list[Call] = []
    usage: Usage = Usage()
    sequences: list[Sequence] = []
    composition: Composition | None = None
    versions: Versions = Versions()
    timing: EpisodeTiming = EpisodeTiming()
    submitted_at: datetime | None = None
    seeded_at: datetime | None = None

    def key(self) -> bytes:
        return self.group.id.encode()

    def subject(self) -> str:
        return self.rollout

    def headers(self) -> Headers:
        return [
            *super().headers(),
            *self.id_headers(self.event_id),
            ("revision", b"%d" % self.revision),
            ("status", self.status.encode()),
        ]

    @classmethod
    def of_verdict(cls, episode: EpisodeCompleted, verdict: VerdictReached) -> "RolloutScored":
        """The terminal record of a session that was scored."""
        truncated = episode.stop_reason in TRUNCATED
        usage = Usage()
        for call in episode.calls:
            usage = usage + call.usage
        return cls(
            event_id=terminal_event_id(episode.session, verdict.revision),
            occurred_at=now(),
            caused_at=verdict.occurred_at,
            **episode.ids(),
            revision=verdict.revision,
            verdict=verdict.event_id,
            status="truncated" if truncated else "completed",
            stop_reason=episode.stop_reason,
            reward=verdict.reward,
            success=verdict.success,
            reward_components=verdict.components,
            steps=verdict.steps,
            mask=Mask(loss=False, baseline=False),
            submission=episode.submission,
            messages=episode.messages,
            tools=episode.tools,
            calls=episode.calls,
            usage=usage,
            sequences=episode.sequences,
            composition=episode.composition,
            versions=Versions(
                environment=verdict.environment_version,
                harness=episode.composition.harness,
                harness_version=episode.harness_version,
                model=episode.calls[-1].model if episode.calls else None,
            ),
            timing=episode.timing.model_copy(update={"verify_s": verdict.duration_s}),
            submitted_at=episode.submitted_at,
            seeded_at=episode.seeded_at,
        )

    @classmethod
    def of_failure(cls, ids: SessionIds, error: ErrorInfo, caused_at: datetime, revision: int = 0) -> "RolloutScored":
        """The terminal record of an attempt that failed: no reward, masked twice."""
        return cls(
            event_id=terminal_event_id(ids.session, revision),
            occurred_at=now(),
            caused_at=caused_at,
            **ids.ids(),
            revision=revision,
            status="errored",
            stop_reason=error.kind,
            error=error,
            reward=None,
            success=None,
            mask=Mask(loss=True, baseline=True, reason=error.kind),
        )

    @classmethod
    def of_cancellation(cls, ids: SessionIds, caused_at: datetime) -> "RolloutScored":
        """The terminal record of an attempt that was called off: no reward, masked twice."""
        return cls(
            event_id=terminal_event_id(ids.session),
            occurred_at=now(),
            caused_at=caused_at,
            **ids.ids(),
            status="cancelled",
            stop_reason="cancelled",
            reward=None,
            success=None,
            mask=Mask(loss=True, baseline=True, reason="cancelled"),
        )
