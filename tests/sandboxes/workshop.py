"""An environment of tests, in a file of its own so that worker processes can load it: a program with two bugs in a box."""

from typing import Any, ClassVar

from rollstream.environments.boxes import BoxEnvironment, BoxWorld, Earned
from rollstream.environments.protocol import Episode, Services, StepServices, Task, Verdict
from rollstream.sandboxes.protocol import Sandbox
from schemas.action import ToolCall
from schemas.sandbox import SandboxSpec

BROKEN = "def add(a, b):\n    return a - b\n\n\ndef twice(a):\n    return a\n"
TESTS = """\
import unittest
from sums import add, twice


class Sums(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 2), 4)

    def test_twice(self):
        self.assertEqual(twice(2), 4)
"""
COUNT = "python3 -B -m unittest -v test_sums 2>&1 | grep -c '[.][.][.] ok$'"


class Workshop(BoxWorld):
    passing: int = 0


class WorkshopTask(Task):
    pass


class WorkshopEnvironment(BoxEnvironment[WorkshopTask, Workshop]):
    """Every action earns its share of the tests that it makes pass."""

    name: ClassVar[str] = "workshop"
    version: ClassVar[str] = "1"
    task_type = WorkshopTask
    world_type = Workshop

    def begin(self, task: WorkshopTask) -> Workshop:
        files = {"sums.py": BROKEN, "test_sums.py": TESTS}
        return Workshop(spec=SandboxSpec(memory_mib=128, disk_mib=16, pids=64, files=files))

    def prompt(self, task: WorkshopTask) -> list[Any]:
        return [{"role": "user", "content": "sums.py has two bugs. Mend them."}]

    async def look(self, box: Sandbox, before: Workshop, after: Workshop, action: ToolCall, services: StepServices) -> Earned:
        after.passing = int((await box.exec(["sh", "-c", COUNT], timeout_s=30)).stdout.text)
        return Earned((after.passing - before.passing) / 2, {"tests": float(after.passing)})

    async def score(self, task: WorkshopTask, world: Workshop, episode: Episode, services: Services) -> Verdict:
        return Verdict(reward=world.passing / 2)
