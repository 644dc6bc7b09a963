"""The shipped environments that answer back pass their suite, and the suite finds what it is there to find."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.environments.conversation.environment import ConversationEnvironment
from rollstream.environments.counter import CounterEnvironment
from rollstream.environments.gymnasium.environment import GymnasiumEnvironment
from rollstream.environments.protocol import Environment, Episode, OpenServices, RoleModels, Services, StepServices, Verdict
from rollstream.environments.registry import ENVIRONMENTS, load
from rollstream.environments.self_play import SelfPlayEnvironment
from rollstream.environments.tools import tool
from rollstream.environments.weather_tools import WeatherToolsEnvironment
from rollstream.environments.workplace.environment import WorkplaceEnvironment
from rollstream.testing.playing import BrokenPromise, ScriptedRoles
from rollstream.testing.stepped import SteppedEnvironmentConformance

EXAMPLES = Path(__file__).parents[2] / "examples"


def example_rows(name: str, count: int) -> list[Mapping[str, object]]:
    rows = [json.loads(line) for line in (EXAMPLES / f"{name}.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("task_id", "environment")} for row in rows[:count]]


class TestGymnasium(SteppedEnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return GymnasiumEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return [*example_rows("gymnasium", 2), {"env_id": "FrozenLake-v1", "seed": 3}]


class TestSelfPlay(SteppedEnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return SelfPlayEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return [*example_rows("self_play", 4), {"opponent": "model"}, {"opponent": "model", "begins": "opponent"}]

    def models(self) -> RoleModels:
        return ScriptedRoles(lambda role, messages: "9 or 8")


class TestConversation(SteppedEnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return ConversationEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return [*example_rows("conversation", 3), *example_rows("conversation_models", 2)]

    def models(self) -> RoleModels:
        return ScriptedRoles(lambda role, messages: "Hm. SCORE: 3" if role == "judge" else "Go on.")


class TestWorkplace(SteppedEnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return WorkplaceEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return example_rows("workplace", 3)


class TestCounter(SteppedEnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return CounterEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return [
            {"messages": [{"role": "user", "content": "add 4"}], "initial_count": 3, "expected_count": 7},
            {"messages": [{"role": "user", "content": "take 5 away"}], "initial_count": 3, "expected_count": -2},
        ]


class HeldCounter(CounterEnvironment):
    """Acts through what `open` has left, and on nothing else."""

    async def open(self, world: Any, services: OpenServices) -> Any:
        services.live["open"] = True
        return world

    async def close(self, world: Any, services: OpenServices) -> None:
        assert services.live.pop("open")

    async def step(self, world: Any, action: Any, services: StepServices) -> Any:
        assert services.opened is not None
        assert services.opened.live["open"]
        return await super().step(world, action, services)


class TestHeldCounter(TestCounter):
    def environment(self) -> Environment[Any]:
        return HeldCounter()


class TestWeatherTools(SteppedEnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return WeatherToolsEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return [
            {"messages": [{"role": "user", "content": "Is it foggy in Lisbon?"}], "expected_cities": ["Lisbon"]},
            {
                "messages": [{"role": "user", "content": "Where is it warmer, Oslo or Rome?"}],
                "expected_cities": ["Oslo", "Rome"],
            },
        ]


def test_every_shipped_environment_that_answers_back_is_tested_here() -> None:
    suites = [value for value in globals().values() if isinstance(value, type) and value.__name__.startswith("Test")]
    # Worlds in boxes are in tests/sandboxes.
    tested = {suite().environment().name for suite in suites} | {"code_repair_tools"}
    assert tested == {name for name in ENVIRONMENTS if hasattr(load(name), "step")}


class BelievesTheAgent(CounterEnvironment):
    async def verify(self, task: Any, episode: Episode, services: Services) -> Verdict:
        claimed = f"stands at {task.expected_count}" in episode.submission.text
        return Verdict(reward=1.0) if claimed else await super().verify(task, episode, services)


class RemembersInItself(CounterEnvironment):
    def __init__(self) -> None:
        self.seen = 0

    @tool
    async def increment_counter(self, world: Any, count: int) -> dict[str, bool]:
        self.seen += 1
        world.count += count if self.seen > 1 else 0
        return {"success": True}


class RaisesAtStrangeTools(CounterEnvironment):
    async def step(self, world: Any, action: Any, services: Any) -> Any:
        if action.type == "tool_call":
            getattr(self, action.name)
        return await super().step(world, action, services)


class ChangesItsWorld(CounterEnvironment):
    async def step(self, world: Any, action: Any, services: Any) -> Any:
        world.count += 1
        return await super().step(world, action, services)


class CannotClose(HeldCounter):
    async def close(self, world: Any, services: OpenServices) -> None:
        raise OSError("it does not stop")


class RewardsTalk(CounterEnvironment):
    async def score(self, task: Any, world: Any, episode: Episode, services: Services) -> Verdict:
        return Verdict(reward=float(bool(episode.steps)))


@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        (BelievesTheAgent, "the_agents_word_is_worth_nothing_without_its_deeds"),
        (RemembersInItself, "a_fresh_instance_goes_on_where_another_stopped"),
        (RaisesAtStrangeTools, "what_an_agent_does_wrong_is_an_observation"),
        (ChangesItsWorld, "mistakes_on_the_way_do_not_spoil_the_world_for_json"),
        (CannotClose, "the_agents_word_is_worth_nothing_without_its_deeds"),
        (CannotClose, "hostile_actions_are_answered"),
        (RewardsTalk, "what_an_agent_does_wrong_is_an_observation"),
    ],
)
def test_the_suite_fails_an_environment_that_breaks_a_promise(broken: type[CounterEnvironment], finding: str) -> None:
    shared = broken()

    class Suite(TestCounter):
        def environment(self) -> Environment[Any]:
            return shared

    with pytest.raises((AssertionError, AttributeError, BrokenPromise)):
        getattr(Suite(), f"test_{finding}")()
