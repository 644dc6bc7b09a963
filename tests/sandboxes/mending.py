"""An environment for tests: mend a file in a box, checked in a fresh one."""

from typing import ClassVar

from rollstream.blobs import BlobReference
from rollstream.environments.protocol import Episode, Seeded, Services, Task, Verdict
from schemas.sandbox import SandboxSpec
from schemas.session import Submission, Workspace
from tests.sandboxes.agents import INIT, SPEC


class MendTask(Task):
    archive: str
    check: str


class MendEnvironment:
    name: ClassVar[str] = "mend"
    version: ClassVar[str] = "1"
    task_type = MendTask
    public_fields: ClassVar[frozenset[str]] = frozenset({"archive"})
    success_threshold: ClassVar[float] = 1.0

    def seed(self, task: MendTask) -> Seeded:
        return Seeded(
            messages=[{"role": "user", "content": "Mend calc.py: add must add."}],
            interaction="agent_in_env",
            placement="agent_in_env",
            sandbox=SPEC,
            workspace=Workspace(archive=task.archive, commands=[INIT], base="HEAD"),
        )

    def reference(self, task: MendTask) -> Submission | None:
        return None

    async def verify(self, task: MendTask, episode: Episode, services: Services) -> Verdict:
        assert services.sandboxes is not None
        assert services.blobs is not None
        archive = BlobReference.parse(task.archive)
        assert archive is not None
        content = await services.blobs.get(archive)
        patch = episode.submission.artifact or ""
        async with services.sandboxes.fresh(SandboxSpec(memory_mib=256, disk_mib=64)) as box:
            await box.exec(["tar", "-xf", "-"], stdin=content)
            await box.exec(INIT)
            applied = await box.exec(["git", "apply", "-"], stdin=patch.encode())
            checked = await box.exec(["python3", "-c", task.check])
        return Verdict(reward=float(bool(patch) and applied.ok and checked.ok))
