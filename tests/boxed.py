"""An environment for tests whose agent works in a box, in which `answer.txt` must hold a word; verified in a fresh one."""

from typing import Any, ClassVar

from rollstream.environments.protocol import Episode, Seeded, Services, Task, Verdict, require_sandboxes
from schemas.sandbox import SandboxSpec
from schemas.session import Submission, Workspace

ANSWER = "answer.txt"


class BoxedTask(Task):
    word: str
    image: str | None = None
    box: dict[str, Any] = {}
    """What the specification says beside the image."""
    verify_s: float = 0.0
    """How long the verification stays in its box."""


class BoxedEnvironment:
    name: ClassVar[str] = "boxed"
    version: ClassVar[str] = "1"
    task_type = BoxedTask
    public_fields: ClassVar[frozenset[str]] = frozenset({"image", "box"})
    success_threshold: ClassVar[float] = 1.0

    def seed(self, task: BoxedTask) -> Seeded:
        return Seeded(
            [{"role": "user", "content": f"Write the word into {ANSWER}."}],
            placement="agent_in_env",
            sandbox=self._spec(task),
            workspace=Workspace(files=[ANSWER]),
        )

    @staticmethod
    def _spec(task: BoxedTask) -> SandboxSpec:
        return SandboxSpec(image=task.image, **{"memory_mib": 64, "disk_mib": 8, **task.box})

    def reference(self, task: BoxedTask) -> Submission | None:
        return Submission(text="done", files={ANSWER: task.word})

    async def verify(self, task: BoxedTask, episode: Episode, services: Services) -> Verdict:
        async with require_sandboxes(services).fresh(self._spec(task)) as box:
            await box.write(ANSWER, episode.submission.files.get(ANSWER, "").encode())
            found = await box.exec(["sh", "-c", f"sleep {task.verify_s}; cat {ANSWER}"])
        return Verdict(float(found.stdout.text == task.word), diagnostics={"sandbox": box.id})
