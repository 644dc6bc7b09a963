"""The shipped environments pass the suite that plug-ins inherit, and the suite finds what it is there to find."""

import json
import re
import types
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollstream.environments.graders import GraderPool
from rollstream.environments.intake import read_task
from rollstream.environments.math import MathEnvironment, MathTask
from rollstream.environments.multiple_choice import MultipleChoiceEnvironment, MultipleChoiceTask
from rollstream.environments.protocol import Environment, Episode, Seeded, Services, Verdict
from rollstream.environments.registry import ENVIRONMENTS, admit, load
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
    assert {MathEnvironment.name: MathEnvironment, MultipleChoiceEnvironment.name: MultipleChoiceEnvironment} == ENVIRONMENTS


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
        (CountsItsSeeds, "test_seeding_is_deterministic_and_changes_nothing"),
    ],
)
def test_the_suite_fails_an_environment_that_breaks_a_promise(broken: type[MultipleChoiceEnvironment], test: str) -> None:
    class Suite(TestMultipleChoice):
        def environment(self) -> Environment[Any]:
            return broken()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)()


def documented_example() -> types.ModuleType:
    """The environment that docs/environments.md shows how to write, as a module."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "class TestAnagram" in block]
    module = types.ModuleType("anagram_example")
    exec(compile(source, "docs/environments.md", "exec"), module.__dict__)
    return module


def test_the_documented_example_passes_the_suite_as_it_stands() -> None:
    suite = documented_example().TestAnagram()
    tests = [name for name in dir(suite) if name.startswith("test_")]
    for name in tests:
        getattr(suite, name)()
    assert len(tests) > 10


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
