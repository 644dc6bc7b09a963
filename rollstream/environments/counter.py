"""`counter`: a number that tools add to. Runs NeMo Gym's `example_session_state_mgmt` rows."""

from collections.abc import Mapping
from typing import ClassVar

from rollstream.environments.protocol import Episode, Services, Task, Verdict, World
from rollstream.environments.tools import ToolEnvironment, tool
from schemas.action import ToolCall
from schemas.session import Submission


class CounterTask(Task):
    initial_count: int = 0
    expected_count: int


class Counter(World):
    count: int


class CounterEnvironment(ToolEnvironment[CounterTask, Counter]):
    """Reward 1.0 when the counter ends at the expected number, else 0.0; what the agent says does not matter."""

    name: ClassVar[str] = "counter"
    version: ClassVar[str] = "1"
    task_type = CounterTask
    example: ClassVar[Mapping[str, object]] = {
        "messages": [{"role": "user", "content": "Add 3 to the counter."}],
        "expected_count": 3,
    }
    world_type = Counter

    def begin(self, task: CounterTask) -> Counter:
        return Counter(count=task.initial_count)

    @tool
    async def increment_counter(self, world: Counter, count: int) -> dict[str, bool]:
        """Add to the counter."""
        world.count += count
        return {"success": True}

    @tool
    async def get_counter_value(self, world: Counter) -> dict[str, int]:
        """Read the counter."""
        return {"count": world.count}

    def reference_actions(self, task: CounterTask) -> list[ToolCall]:
        missing = task.expected_count - task.initial_count
        return [
            ToolCall(id="reference-0", name="increment_counter", arguments={"count": missing}),
            ToolCall(id="reference-1", name="get_counter_value"),
        ]

    def reference(self, task: CounterTask) -> Submission:
        return Submission(text=f"The counter stands at {task.expected_count}.")

    async def score(self, task: CounterTask, world: Counter, episode: Episode, services: Services) -> Verdict:
        diagnostics = {"count": world.count, "actions": len(episode.steps)}
        return Verdict(reward=1.0 if world.count == task.expected_count else 0.0, diagnostics=diagnostics)
