"""The examples that come with the project: every row is admitted, and its own reference scores full reward."""

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollstream.benchmarks import read_benchmark
from rollstream.environments import registry
from rollstream.environments.graders import GraderPool
from rollstream.environments.intake import normalise_row
from rollstream.environments.protocol import Episode, Services
from rollstream.publishing import RunRequest, plan_run
from rollstream.settings import Defaults, Settings
from rollstream.testing.playing import play, play_oracle
from schemas.values import Composition, EpisodeLimits, Sampling

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "demo.jsonl"
STEPPED = [
    (name, json.loads(line))
    for name in ("gymnasium", "conversation", "self_play", "workplace")
    for line in (EXAMPLES / f"{name}.jsonl").read_text().splitlines()
]
ROWS = [json.loads(line) for line in DEMO.read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[row["task_id"] for row in ROWS])
async def test_every_demo_task_is_admitted_and_its_reference_scores_full_reward(row: dict[str, object]) -> None:
    task = normalise_row(row, environment=None, fields={}, defaults=Defaults())
    environment = registry.load(task.environment)
    admitted = registry.admit(environment, task.row)
    reference = environment.reference(admitted)
    assert reference is not None
    async with GraderPool(1, 10) as graders:
        episode = Episode(environment.seed(admitted).messages, reference, "completed")
        verdict = await environment.verify(admitted, episode, Services(graders))
    assert verdict.reward == 1.0


def test_the_demo_has_forty_tasks_and_both_environments() -> None:
    assert len(ROWS) >= 40
    assert min(Counter(row["environment"] for row in ROWS).values()) >= 20
    assert len({row["task_id"] for row in ROWS}) == len(ROWS)


def test_the_example_benchmark_is_what_it_says() -> None:
    benchmark = read_benchmark(DEMO.with_name("benchmark.toml"))
    request = RunRequest(
        path=benchmark.dataset.path,
        run="r",
        composition=Composition(sampling=benchmark.sampling_over(Sampling())),
        limits=benchmark.limits_over(EpisodeLimits()),
        attempts=benchmark.k,
        dataset=benchmark.dataset.name,
    )
    plan = plan_run(request, Settings(), datetime.now(UTC))
    assert list(benchmark.differences(plan.manifest)) == []
    assert benchmark.baselines


@pytest.mark.parametrize(("name", "row"), STEPPED, ids=[row["task_id"] for _, row in STEPPED])
async def test_every_task_that_answers_back_is_solved_by_its_reference_and_not_by_doing_nothing(
    name: str, row: dict[str, object]
) -> None:
    task = normalise_row(row, environment=None, fields={}, defaults=Defaults())
    environment = registry.load(task.environment)
    assert environment.name == name
    admitted = registry.admit(environment, task.row)
    solved = await play_oracle(environment, admitted)
    assert solved is not None
    assert (solved.verdict.reward, (await play(environment, admitted)).verdict.reward) == (1.0, 0.0)


def test_tasks_whose_user_is_a_model_say_which_roles_they_need() -> None:
    rows = [json.loads(line) for line in (EXAMPLES / "conversation_models.jsonl").read_text().splitlines()]
    environment = registry.load("conversation")
    roles = [environment.seed(registry.admit(environment, row)).roles for row in rows]
    assert roles == [{"user"}, {"user", "judge"}]


def test_the_office_has_at_least_eight_tasks() -> None:
    assert len([row for name, row in STEPPED if name == "workplace"]) >= 8
