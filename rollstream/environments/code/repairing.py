"""What the environments of code repair have in common.

The agent works in one box; its patch, and nothing else of that box, is verified in another.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Generic, TypeVar

from rollstream.environments.code import verdicts, verification
from rollstream.environments.code.verification import Repair
from rollstream.environments.protocol import Episode, ScoredVerdict, Seeded, Services, Task, Verdict
from schemas.sandbox import SandboxSpec
from schemas.session import Submission, Workspace

R = TypeVar("R", bound=Task)


class RepairEnvironment(ABC, Generic[R]):
    """An environment whose tasks are repositories with a bug."""

    success_threshold: ClassVar[float] = 1.0

    @abstractmethod
    def instruction(self, task: R) -> str:
        """What the agent is told, from public fields alone."""

    @abstractmethod
    def box(self, task: R) -> SandboxSpec:
        """The agent's box."""

    @abstractmethod
    def workspace(self, task: R) -> Workspace:
        """What stands in the agent's box."""

    @abstractmethod
    def repair(self, task: R) -> Repair:
        """How a patch is verified."""

    @abstractmethod
    def solution(self, task: R) -> str:
        """The patch that mends it; empty if nobody knows."""

    def seed(self, task: R) -> Seeded:
        return Seeded(
            messages=task.messages or [{"role": "user", "content": self.instruction(task)}],
            interaction="agent_in_env",
            placement="agent_in_env",
            sandbox=self.box(task),
            workspace=self.workspace(task),
        )

    def reference(self, task: R) -> Submission | None:
        patch = self.solution(task)
        return Submission(text="The bug is mended.", artifact=patch) if patch.strip() else None

    def verification_timeout_s(self, task: R) -> float:
        return self.repair(task).evaluation.timeout_s + verification.OVERHEAD_S

    async def verify(self, task: R, episode: Episode, services: Services) -> Verdict:
        verdict = await verification.verify(self.repair(task), episode.submission, services)
        if episode.stop_reason == "completed":
            return verdict
        # A limit of the agent's is an outcome: what it had done until then is scored, and it is said.
        diagnostics = {**verdict.diagnostics, "agent_stopped": episode.stop_reason}
        return Verdict(verdict.reward, verdict.success, verdict.components, diagnostics, verdict.hermetic)

    def aggregate_metrics(self, found: Iterable[ScoredVerdict]) -> Mapping[str, float]:
        return verdicts.aggregated(found)
