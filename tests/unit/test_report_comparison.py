"""Two runs task by task: what is paired, what flipped, and what is left out with its name."""

import json
import random
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rollstream.cli.report import report as report_command
from rollstream.errors import UsageError
from rollstream.store.report.attempts import GroupFacts
from rollstream.store.report.comparison import compare
from schemas.envelope import Event
from tests.events import Attempt, attempts, run_published, task_submitted
from tests.stores import publish_events

app = typer.Typer()
app.command("report")(report_command)
app.callback()(lambda: None)


def facts(**successes: tuple[int, int]) -> dict[str, GroupFacts]:
    """Task -> (succeeded, scored), two attempts each."""
    return {task: GroupFacts(task, 2, scored, succeeded, float(succeeded)) for task, (succeeded, scored) in successes.items()}


def test_a_difference_is_taken_within_pairs() -> None:
    # Tasks of very different difficulty, each a little better: there is noise between tasks, and hardly any within pairs.
    base = facts(a=(0, 2), b=(2, 2), c=(1, 2), d=(0, 2))
    other = facts(a=(1, 2), b=(2, 2), c=(2, 2), d=(1, 2))
    found = compare("math", base, other)
    rate = found.differences[0]
    assert (rate.metric, rate.base, rate.other, rate.difference.value) == ("pass@1", 3 / 8, 6 / 8, 3 / 8)
    assert rate.difference.standard_error == pytest.approx(0.125)
    assert found.paired == rate.difference.tasks == 4


def test_tasks_that_flipped_are_named_in_both_directions() -> None:
    found = compare(
        "math",
        facts(up=(0, 2), down=(2, 2), half=(1, 2), never=(0, 2), slips=(2, 2)),
        facts(up=(2, 2), down=(0, 2), half=(2, 2), never=(0, 2), slips=(1, 2)),
    )
    assert [flip.task for flip in found.gained] == ["up"]
    assert [flip.task for flip in found.lost] == ["down"]
    assert (found.both_solved, found.neither_solved) == (2, 1)


def test_what_cannot_be_paired_is_named_and_never_dropped_in_silence() -> None:
    found = compare("math", facts(a=(1, 2), b=(1, 2), gone=(1, 2)), facts(a=(1, 2), b=(0, 0), new=(1, 2)))
    assert (found.paired, found.only_base, found.only_other, found.unscored) == (1, ("gone",), ("new",), ("b",))


def test_about_95_of_100_intervals_of_a_difference_hold_the_truth() -> None:
    draw = random.Random(11)
    held, runs, effect = 0, 300, 0.1
    for _ in range(runs):
        difficulties = {f"t{n}": draw.uniform(0.0, 0.9) for n in range(20)}
        base, other = (
            {
                task: GroupFacts(task, 8, 8, sum(draw.random() < p + change for _ in range(8)), 0.0)
                for task, p in difficulties.items()
            }
            for change in (0.0, effect)
        )
        found = compare("math", base, other).differences[0].difference
        held += found.low is not None and found.high is not None and found.low <= effect <= found.high
    assert 0.91 <= held / runs <= 0.99


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    events: list[Event] = []
    for run, rewards in (
        ("one", {"a": (0.0, 0.0), "b": (1.0, 1.0), "old": (1.0, 1.0)}),
        ("two", {"a": (1.0, 1.0), "b": (1.0, 0.0)}),
    ):
        events.append(run_published(run, groups=len(rewards), attempts=2))
        for name, given in rewards.items():
            task = task_submitted(name, run=run, attempts=2)
            events.append(task)
            for attempt in attempts(task, *given):
                events += attempt.events()
    failing = task_submitted("c", run="two")
    events += [failing, Attempt(failing).failed()]
    events += [other := task_submitted("z", run="stranger"), *Attempt(other).events()]
    return publish_events(tmp_path_factory.mktemp("store"), *events)


def command(store: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments, "--data-dir", str(store)])


def test_the_command_prints_the_difference_with_what_is_left_out(store: Path) -> None:
    output = command(store, "one", "--compare", "two").output
    assert "run two against run one: differences are two minus one, task by task" in output
    assert "the runs also differ in dataset:" in output
    assert "math: 1 tasks are only in one and left out: sums/old" in output
    assert "math: 1 tasks are only in two and left out: sums/c" in output
    assert "+0.2500" in output
    assert "gained" in output
    assert "0 of 2" in output


def test_the_command_gives_the_comparison_as_json_and_markdown(store: Path) -> None:
    body = json.loads(command(store, "one", "--compare", "two", "--json").output)["comparison"]
    assert (body["base"], body["other"], body["environments"][0]["paired"]) == ("one", "two", 2)
    assert [flip["task"] for flip in body["environments"][0]["gained"]] == ["sums/a"]
    assert "| math | gained | sums/a | 0 of 2 | 2 of 2 |" in command(store, "one", "--compare", "two", "--markdown").output


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("stranger", "runs one and stranger have no task in common"),
        ("one", "expected another run to compare one with, found the same one"),
        ("nope", "no run 'nope' in the published store"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(store: Path, other: str, sentence: str) -> None:
    refused = command(store, "one", "--compare", other).exception
    assert isinstance(refused, UsageError)
    assert sentence in str(refused)
