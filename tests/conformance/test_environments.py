"""The shipped environments pass the suite that plug-ins inherit, and the suite finds what it is there to find."""

import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollstream.environments.counter import CounterEnvironment
from rollstream.environments.graders import GraderPool
from rollstream.environments.intake import read_task
from rollstream.environments.math import MathEnvironment, MathTask
from rollstream.environments.multiple_choice import MultipleChoiceEnvironment, MultipleChoiceTask
from rollstream.environments.protocol import Environment, Episode, ScoredVerdict, Seeded, Services, Verdict
from rollstream.environments.registry import ENVIRONMENTS, admit, load
from rollstream.environments.tools import tool
from rollstream.environments.weather_tools import WeatherToolsEnvironment
from rollstream.settings import Defaults
from rollstream.testing.environments import EnvironmentConformance
from schemas.session import Submission
from schemas.values import EpisodeLimits

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared/data"
AT = datetime(2026, 1, 1, tzinfo=UTC)

needs_shared_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder shared/data is not beside the repository")


def shared_rows(name: str, environment: str) -> list[Mapping[str, object]]:
    """Rows of a shared file, through the intake as a worker reads them."""
    lines = (SHARED / name).read_bytes().splitlines()
    return [read_task(line, {}, Defaults(environment=environment), EpisodeLimits(), AT).row for line in lines]


class TestMath(EnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return MathEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return [
            {"question": "A crate holds 12 jars. How many jars do 7 crates hold?", "answer": "12 * 7 = 84\n#### 84"},
            {"question": "What is a third of 1?", "expected_answer": r"\frac{1}{3}"},
            {"problem": "Factor x^2 - 1.", "solution": r"It is a difference of squares: \boxed{(x-1)(x+1)}"},
            {"messages": [{"role": "user", "content": "Which day follows Monday?"}], "answer": r"\text{Tuesday}"},
            {"question": "How much is left?", "answer": 1250.5},
        ]


class TestMultipleChoice(EnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return MultipleChoiceEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return [
            {"question": "Which is a fish?", "options": ["Heron", "Trout", "Otter"], "expected_answer": "B"},
            {
                "question": "Which is red?",
                "options": [{"A": "Ruby"}, {"B": "Jade"}],
                "answer": "a",
                "grading_mode": "lenient_boxed",
            },
            {
                "question": "Which is even?",
                "options": {"A": "3", "B": "5", "C": "8"},
                "expected_answer": "C",
                "grading_mode": "lenient_answer_colon",
            },
            {
                "messages": [{"role": "user", "content": "A: up, B: down. End with OPTION SELECTED: X."}],
                "options": [{"A": "up"}, {"B": "down"}],
                "expected_answer": "A",
                "grading_mode": "strict_single_letter_boxed",
                "template_metadata": {"output_regex": r"OPTION SELECTED:\s*([A-Za-z])", "template_id": "t"},
            },
        ]


@needs_shared_data
class TestCounterOnNemoGymRows(EnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return CounterEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return shared_rows("nemo_gym_rows/example_session_state_mgmt.jsonl", "counter")


@needs_shared_data
class TestWeatherToolsOnNemoGymRows(EnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return WeatherToolsEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return shared_rows("nemo_gym_rows/example_single_tool_call.jsonl", "weather_tools")


@needs_shared_data
class TestMathOnNemoGymRows(EnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return MathEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return shared_rows("nemo_gym_rows/math_with_judge.jsonl", "math")


@needs_shared_data
class TestMultipleChoiceOnNemoGymRows(EnvironmentConformance):
    def environment(self) -> Environment[Any]:
        return MultipleChoiceEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        return shared_rows("nemo_gym_rows/mcqa.jsonl", "multiple_choice")


@needs_shared_data
async def test_every_reference_of_gsm8k_scores_full_reward_without_a_grader() -> None:
    environment = MathEnvironment()
    rows = shared_rows("gsm8k_test.jsonl", "math")
    async with GraderPool(1, 5.0) as graders:
        for row in rows:
            task = MathTask.model_validate(row)
            for text in (environment.reference(task).text, str(row["answer"]), f"The answer is {task.reference}."):
                episode = Episode([], Submission(text=text), "completed")
                verdict = await environment.verify(task, episode, Services(graders))
                assert verdict.reward == 1.0, f"{text!r} scored {verdict}"
        assert graders.pids() == []
    assert len(rows) == 1319


def test_every_shipped_environment_is_tested_here() -> None:
    single_turn = {name for name in ENVIRONMENTS if not hasattr(load(name), "step")}
    # All others are in test_stepped_environments.py, which says so, and those that need a box in tests/sandboxes.
    assert single_turn == {MathEnvironment.name, MultipleChoiceEnvironment.name, "code_repair", "swe_bench"}


class LeaksItsLetter(MultipleChoiceEnvironment):
    def seed(self, task: MultipleChoiceTask) -> Seeded:
        seeded = super().seed(task)
        return Seeded([*seeded.messages, {"role": "user", "content": f"(Not {'B' if task.letter == 'A' else 'A'}.)"}])


class ForgetsItsReference(MultipleChoiceEnvironment):
    def reference(self, task: MultipleChoiceTask) -> Submission:
        return Submission(text="Nobody knows.")


class RewardsSilence(MultipleChoiceEnvironment):
    async def verify(self, task: MultipleChoiceTask, episode: Episode, services: Services) -> Verdict:
        return Verdict(reward=1.0)


class RewardsNotANumber(MultipleChoiceEnvironment):
    async def verify(self, task: MultipleChoiceTask, episode: Episode, services: Services) -> Verdict:
        return Verdict(reward=float("nan"))


class ChokesOnSurrogates(MultipleChoiceEnvironment):
    async def verify(self, task: MultipleChoiceTask, episode: Episode, services: Services) -> Verdict:
        return Verdict(reward=0.0, diagnostics={"read": episode.submission.text[-100:]})


class AssumesItsDiagnostics(MultipleChoiceEnvironment):
    def aggregate_metrics(self, verdicts: Iterable[ScoredVerdict]) -> Mapping[str, float]:
        return {"a": max((1.0 for verdict in verdicts if "choice" in verdict.diagnostics), default=float("nan"))}


class CountsItsSeeds(MultipleChoiceEnvironment):
    seeds = 0

    def seed(self, task: MultipleChoiceTask) -> Seeded:
        CountsItsSeeds.seeds += 1
        return Seeded([{"role": "user", "content": f"{task.question} ({self.seeds})"}])


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (LeaksItsLetter, "test_what_the_agent_sees_depends_on_public_fields_only"),
        (ForgetsItsReference, "test_the_reference_scores_full_reward"),
        (RewardsSilence, "test_an_empty_submission_is_scored_and_fails"),
        (RewardsNotANumber, "test_an_empty_submission_is_scored_and_fails"),
        (ChokesOnSurrogates, "test_hostile_submissions_are_scored_in_bounded_time"),
        (AssumesItsDiagnostics, "test_metrics_of_its_own_are_finite_numbers"),
        (CountsItsSeeds, "test_seeding_is_deterministic_and_changes_nothing"),
    ],
)
def test_the_suite_fails_an_environment_that_breaks_a_promise(broken: type[MultipleChoiceEnvironment], test: str) -> None:
    class Suite(TestMultipleChoice):
        def environment(self) -> Environment[Any]:
            return broken()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


class ChangesItsWorld(CounterEnvironment):
    async def step(self, world: Any, action: Any, services: Any) -> Any:
        world.count += 1
        return await super().step(world, action, services)


class RollsDice(CounterEnvironment):
    rolled = 0

    @tool
    async def increment_counter(self, world: Any, count: int) -> str:
        RollsDice.rolled += 1
        world.count += count + RollsDice.rolled
        return "done"


class ChokesOnArguments(CounterEnvironment):
    async def step(self, world: Any, action: Any, services: Any) -> Any:
        action.arguments["count"] + 1
        return await super().step(world, action, services)


@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        (ChangesItsWorld, "the_actions_of_the_reference_are_seen_and_leave_the_world_they_were_given_alone"),
        (RollsDice, "the_actions_of_the_reference_are_seen_and_leave_the_world_they_were_given_alone"),
        (ChokesOnArguments, "hostile_actions_are_answered"),
    ],
)
def test_the_suite_fails_a_world_that_breaks_a_promise(broken: type[CounterEnvironment], finding: str) -> None:
    class Suite(EnvironmentConformance):
        def environment(self) -> Environment[Any]:
            return broken()

        def rows(self) -> Sequence[Mapping[str, object]]:
            return [{"messages": [{"role": "user", "content": "add 4"}], "initial_count": 3, "expected_count": 7}]

    with pytest.raises((AssertionError, KeyError)):
        getattr(Suite(), f"test_{finding}")()


def documented_example(suite: str) -> str:
    """The source of an environment that docs/environments.md shows how to write, with its suite."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)
    (source,) = [block for block in blocks if f"class {suite}" in block]
    return str(source)


@pytest.mark.parametrize("name", ["TestAnagram", "TestPurse"])
def test_a_documented_example_passes_its_suite_as_it_stands(name: str) -> None:
    source = documented_example(name)
    module = types.ModuleType(f"{name.lower()}_example")
    exec(compile(source, "docs/environments.md", "exec"), module.__dict__)
    suite = getattr(module, name)()
    tests = [name for name in dir(suite) if name.startswith("test_")]
    for name in tests:
        getattr(suite, name)()
    assert len(tests) > 10


@pytest.mark.parametrize("name", ["TestAnagram", "TestPurse"])
def test_a_documented_example_is_forty_lines(name: str) -> None:
    written, _, _ = documented_example(name).partition(f"class {name}")
    begins = written.index("class ")
    assert len([line for line in written[begins:].splitlines() if line.strip()]) <= 40


def test_the_rows_in_the_documentation_are_admitted() -> None:
    text = (ROOT / "docs/environments.md").read_text()
    for environment in (load(name) for name in ENVIRONMENTS):
        blocks = re.findall(rf"<!-- rows of {environment.name} -->\n```json\n(.*?)```", text, re.DOTALL)
        rows = [json.loads(line) for block in blocks for line in block.splitlines()]
        assert rows
        for row in rows:
            submitted = read_task(json.dumps(row).encode(), {}, Defaults(environment=environment.name), EpisodeLimits(), AT)
            task = admit(environment, submitted.row)
            assert environment.reference(task) is not None
