"""Valid events for tests: one function for each, and the whole chain from a task to its terminal record.

Times are fixed offsets from `START`, so that durations in expectations can be read off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rollstream.eventlog.reading import Record
from rollstream.eventlog.retries import schedule
from schemas import identities
from schemas.action import (
    ActionRequested,
    EnvironmentCalled,
    ObservationReturned,
    StepRewarded,
    ToolCall,
    action_id,
    observation_id,
)
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted, EpisodeTiming, StopReason
from schemas.failure import ErrorInfo
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored, StepReward
from schemas.run import DatasetManifest, RunPublished
from schemas.sandbox import SandboxHolder, SandboxLeased, SandboxSpec
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
TIMING = EpisodeTiming(queued_s=1.0, agent_s=2.0, environment_s=0.25, model_s=1.5)


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


def sandbox_leased(
    sandbox: str = "box-1", *, session: str | None = "session-1", fence: int = 1, lease_s: float = 60.0
) -> SandboxLeased:
    """A box of an agent_worker, leased at `START`."""
    return SandboxLeased.create(
        sandbox,
        provider="docker",
        installation="cluster/",
        host="here",
        holder=SandboxHolder(
            worker="agent_worker@host:1", run="run-1", session=session, consumer_group="agent_worker", fence=fence
        ),
        spec=SandboxSpec(env={"KEY": CANARY}, files={"tests.py": CANARY}),
        lease_s=lease_s,
        at=START,
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
    cost_usd: float | None = None

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
        return Call(
            turn=0,
            model="small-1b",
            finish_reason="stop",
            usage=self.usage,
            started_at=at(1.5),
            duration_s=1.5,
            cost_usd=self.cost_usd,
        )

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

    def acted(self, index: int = 0, call: ToolCall | None = None) -> ActionRequested:
        execution = self.execution()
        return ActionRequested(
            event_id=action_id(self.session, execution.id, "agent", index),
            occurred_at=at(3.25),
            caused_at=at(1),
            execution=execution,
            index=index,
            step=self.stepped().event_id,
            action=call or ToolCall(id="call-0", name="add", arguments={"a": 1, "b": 1}),
            composition=self.task.composition,
            max_output_bytes=1_000_000,
            ticket=f"sealed {CANARY}",
            receipt=None if index == 0 else f"sealed {CANARY}",
            **self.ids(),
        )

    def observed(self, index: int = 0, text: str = "2") -> ObservationReturned:
        action = self.acted(index)
        return ObservationReturned(
            event_id=observation_id(action.event_id),
            occurred_at=at(3.5),
            caused_at=at(3.25),
            action=action.event_id,
            execution=action.execution,
            index=index,
            messages=[{"role": "tool", "tool_call_id": "call-0", "content": text}],
            receipt=f"sealed {CANARY}",
            worker="env_worker@host:1",
            **self.ids(),
        )

    def step_rewarded(self, index: int = 0, reward: float | None = 0.5) -> StepRewarded:
        action = self.acted(index)
        return StepRewarded(
            event_id=identities.event_id("StepRewarded", action.event_id),
            occurred_at=at(3.5),
            caused_at=at(3.25),
            action=action.event_id,
            execution=action.execution,
            index=index,
            reward=reward,
            components={"sum": 0.25},
            info={"why": "it adds up"},
            **self.ids(),
        )

    def environment_called(self, index: int = 0, role: str = "user") -> EnvironmentCalled:
        """What a simulated user said of its private goal while it answered the first action."""
        action = self.acted()
        return EnvironmentCalled(
            event_id=identities.event_id("EnvironmentCalled", action.event_id, "handling", index),
            occurred_at=at(3.5),
            caused_at=action.caused_at,
            stage="agent",
            cause=action.event_id,
            execution=Execution(id="handling", worker="env_worker@host:1"),
            index=index,
            role=role,
            call=self.call(),
            message={"role": "assistant", "content": f"I want {CANARY}."},
            response={"text": f"I want {CANARY}."},
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

    def interaction(self) -> list[Event]:
        """The whole chain of an attempt that acted once."""
        acted = [self.acted(), self.observed(), self.step_rewarded(), self.environment_called()]
        completed = self.completed().model_copy(update={"actions": [self.acted().event_id]})
        return [self.ready(), self.stepped(), *acted, completed, self.verdict(), self.scored()]


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


def tool_call(call_id: str, name: str, arguments: str) -> JsonObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS: list[JsonObject] = [
    {
        "type": "function",
        "function": {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
    },
    {
        "type": "function",
        "function": {"name": "sum", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
]


def with_tools(record: RolloutScored) -> RolloutScored:
    """The same attempt, played with three tool calls and rewards for two steps."""
    first = [tool_call("call-1", "search", '{"q": "1"}'), tool_call("call-2", "sum", '{"a": 1}')]
    # Ids may come again: some servers number the calls of each answer.
    second = [tool_call("call-1", "search", '{"q": "2"}')]
    messages: list[ChatMessage] = [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": None, "tool_calls": first},
        {"role": "tool", "tool_call_id": "call-1", "content": "one"},
        {"role": "tool", "tool_call_id": "call-2", "content": "two"},
        {"role": "assistant", "content": "Once more.", "tool_calls": second},
        {"role": "tool", "tool_call_id": "call-1", "content": "three"},
        {"role": "assistant", "content": "It is 2."},
    ]
    rewards = [StepReward(index=0, reward=0.25), StepReward(index=1, reward=0.75)]
    return record.model_copy(update={"messages": messages, "tools": TOOLS, "steps": rewards})
