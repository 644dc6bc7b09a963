"""Every topic, once. Provisioning, workers, docs and the AsyncAPI page all read this table.

Topics that are not `single` have the same partition count and the same partitioner, so that a session's whole history is
one partition number. No topic is compacted, and by default nothing is ever deleted: the log is the source of truth.
"""

from dataclasses import dataclass
from typing import Literal

from schemas.action import ActionRequested, EnvironmentCalled, ObservationReturned, StepRewarded
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted
from schemas.failure import DeadLettered, DeadLetterSettled
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.run import RunCancelled, RunPaused, RunPublished, RunResumed
from schemas.sandbox import SandboxLeased, SandboxReleased
from schemas.session import SessionReady
from schemas.step import AgentStepped
from schemas.task import TaskSubmitted
from schemas.verdict import VerdictReached

Partitioning = Literal["group", "session", "rollout", "sandbox", "single"]


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic of the installation. `name` is without the installation's prefix."""

    name: str
    event: type[Event]
    """What the topic is about; `also` lists what else stands on it."""
    key: str
    partitioning: Partitioning
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    purpose: str
    also: tuple[type[Event], ...] = ()

    @property
    def events(self) -> tuple[type[Event], ...]:
        return (self.event, *self.also)

    def partitions(self, count: int) -> int:
        """How many partitions the topic has in an installation of `count` partitions."""
        return 1 if self.partitioning == "single" else count

    def config(self, max_record_bytes: int) -> dict[str, str]:
        """Topic-level configuration, as Kafka spells it."""
        return {
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "max.message.bytes": str(max_record_bytes),
            # The broker's clock, not the writers': those disagree, and a broker refuses records from an hour in the future.
            "message.timestamp.type": "LogAppendTime",
        }


TASKS_IN = Topic(
    "tasks.in", TaskSubmitted, "group_id", "group", ("users", "cli"), ("env_worker", "store_worker"),
    "Tasks to attempt, one record a group; bare JSON tasks and unmodified NeMo Gym rows too.",
)  # fmt: skip
SESSIONS_READY = Topic(
    "sessions.ready", SessionReady, "session_id", "session", ("env_worker",), ("agent_worker", "store_worker"),
    "Seeded sessions: the environment accepted the task and says how to interact.",
)  # fmt: skip
ENV_ACTIONS = Topic(
    "env.actions", ActionRequested, "session_id", "session", ("agent_worker",), ("env_worker", "store_worker"),
    "What agents do: tool calls and utterances, each with what any env_worker needs to carry it out.",
)  # fmt: skip
ENV_OBSERVATIONS = Topic(
    "env.observations", ObservationReturned, "session_id", "session", ("env_worker",), ("agent_worker", "store_worker"),
    "What agents see of what they did. The first one to an action is the one that happened.",
)  # fmt: skip
AGENT_STEPS = Topic(
    "agent.steps", AgentStepped, "session_id", "session", ("agent_worker",), ("agent_worker", "store_worker"),
    "Every model call of every agent, with the provider's response.",
)  # fmt: skip
REWARDS_STEPS = Topic(
    "rewards.steps", StepRewarded, "session_id", "session", ("env_worker", "verifier_worker"), ("store_worker",),
    "What actions earned, as the environment says, and the model calls that environments made: what the agent side never sees.",
    also=(EnvironmentCalled,),
)  # fmt: skip
EPISODES_COMPLETED = Topic(
    "episodes.completed", EpisodeCompleted, "session_id", "session", ("agent_worker",),
    ("env_worker", "agent_worker", "verifier_worker", "store_worker"), "Submissions and transcripts, to be verified.",
)  # fmt: skip
VERDICTS = Topic(
    "verdicts", VerdictReached, "session_id", "session", ("verifier_worker",), ("store_worker",),
    "The environment's scores, with diagnostics.",
)  # fmt: skip
ROLLOUTS_SCORED = Topic(
    "rollouts.scored", RolloutScored, "group_id", "group",
    ("env_worker", "agent_worker", "verifier_worker", "cli"), ("trainers", "env_worker", "store_worker"),
    "Terminal records, one that counts for each attempt: what trainers subscribe to.",
)  # fmt: skip
ROLLOUTS_RETRIES = Topic(
    "rollouts.retries", RetryScheduled, "rollout_id", "rollout",
    ("env_worker", "agent_worker", "verifier_worker", "cli"), ("env_worker", "verifier_worker", "store_worker"),
    "What is to be tried again, and not before when: a new session, or the verification of an episode.",
)  # fmt: skip
RUNS_CONTROL = Topic(
    "runs.control", RunPublished, "run_id", "single", ("cli", "agent_worker"),
    ("cli", "env_worker", "agent_worker", "verifier_worker", "store_worker"),
    "Runs: their manifests, and whether they are paused or cancelled.",
    also=(RunPaused, RunResumed, RunCancelled),
)  # fmt: skip
SANDBOXES_LEASES = Topic(
    "sandboxes.leases", SandboxLeased, "sandbox_id", "sandbox", ("agent_worker", "verifier_worker", "cli"),
    ("agent_worker", "verifier_worker", "cli", "store_worker"),
    "Who holds which sandbox and until when, and that it is gone: what the reaper goes by.",
    also=(SandboxReleased,),
)  # fmt: skip
DEAD_LETTERS = Topic(
    "dead.letters", DeadLettered, "the original key", "single",
    ("env_worker", "agent_worker", "verifier_worker", "store_worker", "cli"), ("cli", "store_worker"),
    "Records that nobody could handle: original bytes and headers, and why.",
    also=(DeadLetterSettled,),
)  # fmt: skip

CATALOGUE: tuple[Topic, ...] = (
    TASKS_IN,
    SESSIONS_READY,
    ENV_ACTIONS,
    ENV_OBSERVATIONS,
    AGENT_STEPS,
    REWARDS_STEPS,
    EPISODES_COMPLETED,
    VERDICTS,
    ROLLOUTS_SCORED,
    ROLLOUTS_RETRIES,
    RUNS_CONTROL,
    SANDBOXES_LEASES,
    DEAD_LETTERS,
)
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in CATALOGUE}
BY_EVENT: dict[type[Event], Topic] = {event: topic for topic in CATALOGUE for event in topic.events}
"""Where an event of a class is written."""
