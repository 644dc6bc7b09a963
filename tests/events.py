"""Valid events for tests: one function for each, and the whole chain from a task to its terminal record.

Times are fixed offsets from `START`, so that durations in expectations can be read off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rollstream.eventlog.reading import Record
from rollstream.eventlog.retries import schedule
from schemas import identities
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted, EpisodeTiming, StopReason
from schemas.failure import ErrorInfo
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.run import DatasetManifest, RunPublished
from schemas.session import SessionReady, Submission
from schemas.step import AgentStepped, Call, Execution
from schemas.task import TaskSubmitted
from schemas.values import ChatMessage, Composition, EpisodeLimits, GroupRef, JsonObject, TaskRef, Usage
from schemas.verdict import VerdictReached
from topics.catalogue import BY_EVENT

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
CANARY = "CANARY-GRADING-4711"
"""Stands in every task's grading data, and must stand nowhere else."""
COMPOSITION = Composition(harness="chat", models={"policy": "small"})

USAGE = Usage(prompt_tokens=10, completion_tokens=5)
TIMING = EpisodeTiming(queued_s=1.0, agent_s=2.0, model_s=1.5)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def run_published(run: str = "run-1", *, groups: int = 1, attempts: int = 1, environment: str = "math") -> RunPublished:
    return RunPublished.create(
        run=run,
        occurred_at=at(-1),
        dataset=DatasetManifest(name="sums", sha256="0" * 64, rows=groups),
        groups=groups,
        groups_sha256="1" * 64,
        attempts=attempts,
        environments={environment: groups},
        composition=COMPOSITION,
        limits=EpisodeLimits(),
        versions={"rollstream": "0"},
    )


def task_submitted(
    task_id: str = "task-1", *, run: str = "run-1", environment: str = "math", attempts: int = 1, epoch: int = 0
) -> TaskSubmitted:
    return TaskSubmitted.create(
        run=run,
        environment=environment,
        task=TaskRef(id=task_id, dataset="sums", split="test", index=0, epoch=epoch),
        row={"question": "1 + 1 = ?", "expected_answer": CANARY},
        at=START,
        attempts=attempts,
        composition=COMPOSITION,
    )


@dataclass(frozen=True)
class Attempt:
    """One attempt at a task, and every event of it. `round_` and `try_` choose the session."""

    task: TaskSubmitted = field(default_factory=task_submitted)
    index: int = 0
    round_: int = 0
    try_: int = 0
    question: str = "1 + 1 = ?"
    answer: str = "It is 2."
    reward: float = 1.0
    components: dict[str, float] = field(default_factory=dict)
    stop_reason: StopReason = "completed"
    usage: Usage = USAGE
    timing: EpisodeTiming = TIMING
    verify_s: float = 0.5

    @property
    def rollout(self) -> str:
        return identities.rollout_id(self.task.group, self.index)

    @property
    def session(self) -> str:
        return identities.session_id(self.rollout, self.round_, self.try_)

    def execution(self) -> Execution:
        return Execution(id=f"{self.session}/execution", worker="agent_worker@host:1")

    def ids(self) -> JsonObject:
        return {
            "run": self.task.run,
            "group": GroupRef(id=self.task.group, size=self.task.attempts, index=self.index),
            "task": self.task.task,
            "rollout": self.rollout,
            "session": self.session,
            "round": self.round_,
            "try_": self.try_,
            "environment": self.task.environment,
        }

    def ready(self) -> SessionReady:
        return SessionReady(
            event_id=identities.event_id("SessionReady", self.session),
            occurred_at=at(1),
            caused_at=self.task.occurred_at,
            composition=self.task.composition,
            environment_version="1",
            messages=[{"role": "user", "content": self.question}],
            limits=EpisodeLimits(),
            ticket=f"sealed {CANARY}",
            submitted_at=self.task.occurred_at,
            reference=Submission(text=CANARY),
            **self.ids(),
        )

    def call(self) -> Call:
        return Call(turn=0, model="small-1b", finish_reason="stop", usage=self.usage, started_at=at(1.5), duration_s=1.5)

    def stepped(self) -> AgentStepped:
        execution = self.execution()
        return AgentStepped(
            event_id=identities.event_id("AgentStepped", self.session, execution.id, "agent", 0),
            occurred_at=at(3),
            caused_at=at(1),
            execution=execution,
            index=0,
            call=self.call(),
            message=self.message(),
            response={"id": "response-1", "choices": [{"message": self.message()}]},
            **self.ids(),
        )

    def message(self) -> ChatMessage:
        return {"role": "assistant", "content": self.answer}

    def completed(self) -> EpisodeCompleted:
        return EpisodeCompleted(
            event_id=identities.event_id("EpisodeCompleted", self.session),
            occurred_at=at(4),
            caused_at=at(1),
            execution=self.execution(),
            composition=self.task.composition,
            environment_version="1",
            harness_version="1",
            stop_reason=self.stop_reason,
            submission=Submission(text=self.answer),
            messages=[{"role": "user", "content": self.question}, self.message()],
            steps=[self.stepped().event_id],
            calls=[self.call()],
            timing=self.timing,
            limits=EpisodeLimits(),
            seeded_at=at(1),
            submitted_at=self.task.occurred_at,
            ticket=f"sealed {CANARY}",
            **self.ids(),
        )

    def verdict(self, revision: int = 0) -> VerdictReached:
        return VerdictReached(
            event_id=identities.event_id("VerdictReached", self.session, revision, "execution"),
            occurred_at=at(5 + revision),
            caused_at=at(4),
            execution=self.execution(),
            revision=revision,
            episode=self.completed().event_id,
            environment_version="1",
            reward=self.reward,
            success=self.reward >= 1.0,
            components=self.components,
            duration_s=self.verify_s,
            **self.ids(),
        )

    def retry(self, *, next_round: int | None = None, failures: int = 1) -> RetryScheduled:
        """Its session failed on the agent's side, and is to be followed by another one."""
        cause = ErrorInfo(kind="model_unavailable", stage="agent", message="503", retryable=True)
        planned = schedule(self.ready(), cause, failures=failures, delay_s=2.0, at=at(6), worker="agent_worker@host:1")
        if next_round is None:
            return planned
        return planned.model_copy(update={"next_round": next_round, "next_try": 0})

    def verification_retry(self) -> RetryScheduled:
        """Its episode could not be verified, and is to be verified again."""
        cause = ErrorInfo(kind="grader_crashed", stage="verification", message="died", retryable=True)
        return schedule(self.completed(), cause, failures=1, delay_s=2.0, at=at(6), worker="verifier_worker@host:1")

    def scored(self, revision: int = 0) -> RolloutScored:
        record = RolloutScored.of_verdict(self.completed(), self.verdict(revision))
        return record.model_copy(update={"occurred_at": at(5 + revision)})

    def failed(self, kind: str = "model_unavailable", message: str = "the model server answered 503") -> RolloutScored:
        error = ErrorInfo(kind=kind, stage="agent", message=message, retryable=True)
        record = RolloutScored.of_failure(self.ready(), error, caused_at=at(1))
        return record.model_copy(update={"occurred_at": at(6)})

    def events(self) -> list[Event]:
        """The whole chain after the task, ending in a score."""
        return [self.ready(), self.stepped(), self.completed(), self.verdict(), self.scored()]


class Log:
    """Numbers records as a broker would: one partition a topic, offsets from 0."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int], int] = {}

    def record(self, event: Event) -> Record:
        topic = BY_EVENT[type(event)].name
        return self.raw(topic, event.to_json(), key=event.key(), headers=tuple(event.headers()), at=event.occurred_at)

    def raw(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: tuple[tuple[str, bytes], ...] = (),
        at: datetime = START,
        partition: int = 0,
    ) -> Record:
        offset = self._ends.get((topic, partition), 0)
        self._ends[topic, partition] = offset + 1
        return Record(topic, partition, offset, round(at.timestamp() * 1000), key, value, headers)

    def records(self, *events: Event) -> list[Record]:
        return [self.record(event) for event in events]


def attempts(task: TaskSubmitted, *rewards: float) -> Iterator[Attempt]:
    """One attempt a reward, in the order of the group."""
    for index, reward in enumerate(rewards):
        yield Attempt(task, index=index, reward=reward)
