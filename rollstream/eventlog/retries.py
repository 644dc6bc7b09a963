"""Failure x attempt -> wait so long and try again, or give up. Pure: no I/O, and the time is handed in.

The delay grows exponentially and is spread by a jitter that depends on the rollout alone, so that planning the same failure
twice (a record redelivered after a crash) gives the same answer.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rollstream.settings import RetrySettings
from schemas.episode import EpisodeCompleted
from schemas.failure import ErrorInfo
from schemas.identities import event_id
from schemas.retry import RetryScheduled, RetryStage
from schemas.session import SessionReady

Retriable = SessionReady | EpisodeCompleted | RetryScheduled
"""Events whose handling can be tried again."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often and how patiently one kind of failure is tried again.

    Attributes:
        attempts: how often the stage may run in all; 1 means never again.
        first_s: delay after the first failure.
        factor: growth of the delay from one failure to the next.
        most_s: longest delay.
    """

    attempts: int
    first_s: float = 1.0
    factor: float = 3.0
    most_s: float = 300.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`by_kind` is looked up first, then `by_stage`, then `default`."""

    default: Backoff
    by_stage: Mapping[str, Backoff] = field(default_factory=dict)
    by_kind: Mapping[str, Backoff] = field(default_factory=dict)

    def backoff(self, error: ErrorInfo) -> Backoff:
        return self.by_kind.get(error.kind) or self.by_stage.get(error.stage) or self.default


def policy_of(settings: RetrySettings) -> RetryPolicy:
    """The policy that the settings describe."""

    def backoff(attempts: int) -> Backoff:
        return Backoff(attempts, settings.first_delay_s, settings.factor, settings.most_delay_s)

    return RetryPolicy(
        default=backoff(settings.agent_attempts), by_stage={"verification": backoff(settings.verification_attempts)}
    )


def plan(policy: RetryPolicy, error: ErrorInfo, failures: int, rollout: str) -> float | None:
    """How long to wait before the next try, in seconds; None to give up.

    Args:
        failures: how often this stage of this rollout has failed, this time included; from 1.
    """
    backoff = policy.backoff(error)
    if not error.retryable or failures >= backoff.attempts:
        return None
    try:
        delay_s = backoff.first_s * backoff.factor ** (failures - 1)
    except OverflowError:
        delay_s = backoff.most_s
    return min(delay_s, backoff.most_s) * _jitter(rollout, failures)


def _jitter(rollout: str, failures: int) -> float:
    """Between 0.5 and 1.5, evenly spread over rollouts."""
    digest = hashlib.blake2b(f"{rollout}/{failures}".encode(), digest_size=4).digest()
    return 0.5 + int.from_bytes(digest, "big") / 2**32


def failures_before(event: Retriable) -> int:
    """How often the stage that handles `event` has failed before."""
    return 0 if isinstance(event, EpisodeCompleted) else event.failures


def schedule(event: Retriable, cause: ErrorInfo, *, failures: int, delay_s: float, at: datetime, worker: str) -> RetryScheduled:
    """The event that lets the handling of `event` be tried again.

    Args:
        failures: of the stage so far; the same as before when the work was only held back.
    """
    following = (event.round, event.try_ + 1)
    stage: RetryStage = "agent"
    episode = None
    revision, version = 0, None
    if isinstance(event, RetryScheduled):
        stage, following, episode = event.stage, (event.next_round, event.next_try), event.episode
        revision, version = event.revision, event.environment_version
    elif isinstance(event, EpisodeCompleted):
        stage, following, episode = "verification", (event.round, event.try_), event
    not_before = at + timedelta(seconds=delay_s)
    retry = _retry(
        event, stage, following, cause, failures=failures, at=at, not_before=not_before, worker=worker, episode=episode
    )
    return retry if not revision else _of_revision(retry, revision, version)


def redrive(
    session: SessionReady, following: tuple[int, int], cause: ErrorInfo, *, at: datetime, worker: str
) -> RetryScheduled:
    """The event that opens another session of an attempt because somebody asked for it.

    Args:
        session: any of the attempt, for its ticket.
        following: round and try of the session to open; in a new round, nothing has failed yet.
    """
    failures = 0 if following[0] > session.round else session.failures
    return _retry(session, "agent", following, cause, failures=failures, at=at, not_before=at, worker=worker)


def regrade(
    episode: EpisodeCompleted, revision: int, version: str, cause: ErrorInfo, *, at: datetime, worker: str
) -> RetryScheduled:
    """The event that lets an episode be verified once more because somebody asked for it.

    Args:
        revision: of the verdict to be reached, above that of every verdict there is.
        version: of the environment that is to verify.
    """
    following = (episode.round, episode.try_)
    retry = _retry(episode, "verification", following, cause, failures=0, at=at, not_before=at, worker=worker, episode=episode)
    return _of_revision(retry, revision, version)


def _of_revision(retry: RetryScheduled, revision: int, version: str | None) -> RetryScheduled:
    """Another event than the retry of the first verification, and so of another id."""
    name = event_id("RetryScheduled", retry.session, retry.stage, retry.next_round, retry.next_try, retry.failures, revision)
    return retry.model_copy(update={"event_id": name, "revision": revision, "environment_version": version})


def _retry(
    event: Retriable,
    stage: RetryStage,
    following: tuple[int, int],
    cause: ErrorInfo,
    *,
    failures: int,
    at: datetime,
    not_before: datetime,
    worker: str,
    episode: EpisodeCompleted | None = None,
) -> RetryScheduled:
    next_round, next_try = following
    return RetryScheduled(
        event_id=event_id("RetryScheduled", event.session, stage, next_round, next_try, failures),
        occurred_at=at,
        caused_at=event.occurred_at,
        **event.ids(),
        stage=stage,
        failures=failures,
        next_round=next_round,
        next_try=next_try,
        not_before=not_before,
        cause=cause,
        composition=event.composition,
        limits=event.limits,
        ticket=event.ticket,
        submitted_at=event.submitted_at,
        episode=episode,
        worker=worker,
    )
