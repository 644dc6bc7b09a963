"""The examples that come with the project: every row is admitted, and its own reference scores full reward."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rollstream.environments import registry
from rollstream.environments.graders import GraderPool
from rollstream.environments.intake import normalise_row
from rollstream.environments.protocol import Episode, Services
from rollstream.settings import Defaults

DEMO = Path(__file__).parents[2] / "examples" / "demo.jsonl"
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
