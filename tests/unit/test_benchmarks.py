"""Benchmark files: a malformed one is told in one line, and a run that is another experiment with every difference."""

import json
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rollstream.benchmarks import Benchmark, Metric, NotThisBenchmark, read_benchmark
from rollstream.cli.publish import Options, read_plan, request_of
from rollstream.cli.report import report as report_command
from rollstream.errors import UsageError
from rollstream.settings import ModelSettings, Settings
from schemas.envelope import Event
from schemas.run import RunPublished
from schemas.values import Composition, EpisodeLimits, Sampling
from tests.events import Attempt, attempts, run_published, task_submitted
from tests.stores import publish_events

app = typer.Typer()
app.command("report")(report_command)
app.callback()(lambda: None)

SETTINGS = Settings(models={"small": ModelSettings()})
TASKS = '{"question": "1 + 1 = ?", "answer": "2"}\n{"question": "2 + 2 = ?", "answer": "4"}\n'
SHA = "5" * 64
FILE = f"""
name = "sums-2"
k = 2
metric = "pass@2"
verified = true

[dataset]
path = "sums.jsonl"
sha256 = "{SHA}"
split = "test"

[environments]
math = "1"

[limits]
max_steps = 3

[sampling]
temperature = 0.5

[[baselines]]
name = "a large model"
value = 0.9
source = "a paper"

[[baselines]]
name = "chance"
value = 0.1
source = "arithmetic"
"""


def write(folder: Path, text: str = FILE) -> Path:
    (folder / "sums.jsonl").write_text(TASKS)
    path = folder / "benchmark.toml"
    path.write_text(text)
    return path


@pytest.fixture
def benchmark(tmp_path: Path) -> Benchmark:
    return read_benchmark(write(tmp_path))


def matching(**changes: object) -> RunPublished:
    """A manifest that is this benchmark, but for `changes`."""
    run = run_published(groups=2, attempts=2)
    fitting = {
        "dataset": run.dataset.model_copy(update={"sha256": SHA}),
        "versions": {"rollstream": "0", "math": "1"},
        "composition": Composition(models={"policy": "small"}, sampling=Sampling(temperature=0.5, max_tokens=9)),
        "limits": EpisodeLimits(max_steps=3),
    }
    return run.model_copy(update=fitting | changes)


# The file.


def test_a_benchmark_file_says_what_a_run_must_be(benchmark: Benchmark, tmp_path: Path) -> None:
    assert (benchmark.name, benchmark.k, benchmark.harness, benchmark.verified) == ("sums-2", 2, "chat", True)
    assert benchmark.dataset.path == tmp_path / "sums.jsonl"
    assert [baseline.value for baseline in benchmark.baselines] == [0.9, 0.1]


@pytest.mark.parametrize(
    ("metric", "measured"),
    [
        ("pass@2", Metric("pass@", 2)),
        ("pass^1", Metric("pass^", 1)),
        ("mean_reward", Metric("mean_reward")),
        ("success_rate", Metric("success_rate")),
    ],
)
def test_a_metric_is_read_from_its_name(tmp_path: Path, metric: str, measured: Metric) -> None:
    assert read_benchmark(write(tmp_path, FILE.replace("pass@2", metric))).measured == measured


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("k = 2", "k = 1", "pass@2 needs at least 2 attempts at each task, and k is 1"),
        ("pass@2", "accuracy", "expected mean_reward, success_rate, pass@K or pass^K, found 'accuracy'"),
        ("pass@2", "pass@0", "found 'pass@0'"),
        ("k = 2", "k = 0", "k: Input should be greater than or equal to 1"),
        (SHA, "abc", "dataset.sha256: String should match pattern"),
        ('name = "sums-2"', 'nmae = "sums-2"', "name: Field required"),
        ("max_steps = 3", "max_step = 3", "limits.max_step: Extra inputs are not permitted"),
        ("temperature = 0.5", "heat = 0.5", "sampling.heat: Extra inputs are not permitted"),
        ('math = "1"', "", "environments: Dictionary should have at least 1 item"),
        ('source = "a paper"', "", "baselines.0.source: Field required"),
        ("value = 0.9", "value = nan", "baselines.0.value: Input should be a finite number"),
        ("sums.jsonl", "gone.jsonl", "expected the task file of the benchmark at"),
        ("k = 2", "k = = 2", "expected a benchmark in TOML"),
    ],
)
def test_a_malformed_file_is_told_in_one_line(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = write(tmp_path, FILE.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_benchmark(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nope\.toml cannot be read: No such file"):
        read_benchmark(tmp_path / "nope.toml")


# Holding a run against it.


def test_what_is_not_named_may_be_anything(benchmark: Benchmark) -> None:
    free = {"prompts_sha256": "9" * 64, "benchmark": "another", "groups": 7}
    assert list(benchmark.differences(matching(**free))) == []


def test_every_difference_is_named_with_what_was_expected_and_found(benchmark: Benchmark) -> None:
    strict = benchmark.model_copy(update={"prompts_sha256": "7" * 64})
    other = matching(
        dataset=matching().dataset.model_copy(update={"sha256": "6" * 64}),
        attempts=1,
        versions={"math": "2"},
        composition=Composition(harness="oracle", models={"policy": "small"}),
        limits=EpisodeLimits(),
    )
    assert list(strict.differences(other)) == [
        f"dataset.sha256: expected {SHA}, found {'6' * 64}",
        f"prompts_sha256: expected {'7' * 64}, found none",
        "harness: expected chat, found oracle",
        "k: expected 2, found 1",
        "environments.math: expected 1, found 2",
        "limits.max_steps: expected 3, found 100",
        "sampling.temperature: expected 0.5, found none",
    ]
    assert list(benchmark.differences(matching(environments={"math": 1, "logic": 1}))) == [
        "environments: expected math, found logic, math"
    ]


def test_what_happened_must_match_too(benchmark: Benchmark) -> None:
    fits = benchmark.differences_of_results(frozenset({"test"}), {"math": frozenset({"1"})})
    assert list(fits) == []
    found = benchmark.differences_of_results(frozenset({"test", None}), {"math": frozenset({"1", "2"})})
    assert list(found) == [
        "dataset.split: expected test, found none, test",
        "environments.math: expected verdicts of version 1, found some of 2: regrade the run",
    ]


# Publishing one.


def options(path: Path | None, **given: object) -> Options:
    return Options(**{field.name: None for field in fields(Options)} | {"benchmark": path, "model": "small"} | given)  # type: ignore[arg-type]


def fitting_file(tmp_path: Path) -> Path:
    """The benchmark file with the sha256 that its task file has."""
    path = write(tmp_path)
    with pytest.raises(NotThisBenchmark) as caught:
        read_plan(request_of(options(path), SETTINGS), SETTINGS)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"what would be published of {tmp_path / 'sums.jsonl'} is not the benchmark sums-2:"
    (line,) = lines[1:]
    assert line.startswith(f"  dataset.sha256: expected {SHA}, found ")
    path.write_text(FILE.replace(SHA, line.rpartition(" ")[2]))
    return path


def test_a_benchmark_is_published_as_it_says(tmp_path: Path) -> None:
    path = fitting_file(tmp_path)
    request = request_of(options(path, sampling=["max_tokens=64"]), SETTINGS)
    assert request.run.startswith("sums-2-")
    manifest = read_plan(request, SETTINGS).manifest
    assert (manifest.benchmark, manifest.attempts, manifest.limits.max_steps) == ("sums-2", 2, 3)
    assert manifest.composition.sampling == Sampling(temperature=0.5, max_tokens=64)
    assert manifest.prompts_sha256 is not None
    assert list(read_benchmark(path).differences(manifest)) == []


def test_a_task_file_that_changed_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    path = fitting_file(tmp_path)
    (tmp_path / "sums.jsonl").write_text(TASKS.replace("2 + 2", "2 + 3"))
    with pytest.raises(NotThisBenchmark, match=r"dataset\.sha256: expected [0-9a-f]{64}, found [0-9a-f]{64}"):
        read_plan(request_of(options(path), SETTINGS), SETTINGS)


def test_a_question_that_is_put_in_other_words_is_another_prompt(tmp_path: Path) -> None:
    def prompts(text: str) -> str | None:
        (tmp_path / "sums.jsonl").write_text(text)
        request = request_of(options(None, file=tmp_path / "sums.jsonl", environment="math"), SETTINGS)
        return read_plan(request, SETTINGS).manifest.prompts_sha256

    assert prompts(TASKS) == prompts(TASKS.replace('"4"', '"5"'))
    assert prompts(TASKS) != prompts(TASKS.replace("2 + 2 = ?", "What is 2 + 2?"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"attempts": 8}, "says what attempts is: leave it out"),
        ({"file": Path("other.jsonl")}, "says what file is"),
        ({"max_steps": 9}, "says what max-steps is"),
        ({"sampling": ["temperature=1"]}, "says what sampling temperature is"),
    ],
)
def test_an_option_that_would_make_it_another_experiment_is_refused(
    tmp_path: Path, given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        request_of(options(write(tmp_path), **given), SETTINGS)


def test_without_a_task_file_and_a_benchmark_both_are_named() -> None:
    with pytest.raises(UsageError, match="expected a task file, or --benchmark and a benchmark file"):
        request_of(options(None), SETTINGS)


# Reporting one.


def store(folder: Path, manifest: RunPublished, *rewards: tuple[float, ...]) -> Path:
    events: list[Event] = [manifest]
    for number, given in enumerate(rewards):
        task = task_submitted(f"t{number}", attempts=2)
        events.append(task)
        for attempt in attempts(task, *given):
            events += attempt.events()
    return publish_events(folder / "data", *events)


def command(store: Path, benchmark: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", "--benchmark", str(benchmark), *arguments, "--data-dir", str(store)])


def test_a_run_of_the_benchmark_stands_among_the_baselines(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = store(tmp_path, matching(), (1.0, 0.0), (0.0, 0.0))
    output = command(data, path).output
    assert "matches the benchmark sums-2" in output
    assert "benchmark sums-2 (verified), pass@2" in output
    order = [output.index(name) for name in ("a large model", "run run-1 ", "chance")]
    assert order == sorted(order)
    body = json.loads(command(data, path, "--json").output)["held_against"]
    assert (body["name"], body["metric"], body["result"]["estimate"]["value"], body["whole"]) == ("sums-2", "pass@2", 0.5, True)
    assert [baseline["source"] for baseline in body["baselines"]] == ["a paper", "arithmetic"]


def test_a_run_that_is_not_the_benchmark_is_refused_with_every_difference(tmp_path: Path) -> None:
    data = store(tmp_path, matching(attempts=4, limits=EpisodeLimits()), (1.0, 0.0))
    refused = command(data, write(tmp_path)).exception
    assert isinstance(refused, UsageError)
    assert str(refused) == (
        "run run-1 is not the benchmark sums-2:\n  k: expected 2, found 4\n  limits.max_steps: expected 3, found 100"
    )


def test_verdicts_of_another_version_are_refused_although_the_manifest_fits(tmp_path: Path) -> None:
    task = task_submitted("a", attempts=2)
    again = Attempt(task).scored(revision=1)
    again = again.model_copy(update={"versions": again.versions.model_copy(update={"environment": "2"})})
    data = publish_events(tmp_path / "data", matching(), task, *Attempt(task).events(), again)
    assert "environments.math: expected verdicts of version 1, found some of 2" in str(command(data, write(tmp_path)).exception)


def test_a_run_without_a_manifest_is_refused(tmp_path: Path) -> None:
    data = publish_events(tmp_path / "data", task := task_submitted(), *Attempt(task).events())
    assert "manifest: expected one, found none" in str(command(data, write(tmp_path)).exception)


def test_a_result_over_some_of_the_attempts_says_so(tmp_path: Path) -> None:
    data = store(tmp_path, matching(), (1.0, 1.0), (0.0,))
    path = write(tmp_path)
    assert "but only 3 of 4 attempts were scored: the number is over those alone" in command(data, path).output
    assert "3 of 4 attempts were scored: the others count as 0" in command(data, path, "--count-missing-as-zero").output


def test_a_baseline_is_only_called_lower_or_higher_where_the_interval_says_so(tmp_path: Path) -> None:
    rewards = [(1.0, 1.0)] * 10 + [(0.0, 0.0)] * 2
    output = command(store(tmp_path, matching(groups=12, environments={"math": 12}), *rewards), write(tmp_path)).output
    (chance,) = [line for line in output.splitlines() if "chance" in line]
    (large,) = [line for line in output.splitlines() if "a large model" in line]
    assert "above" in chance
    assert "no clear difference" in large


def test_the_time_of_a_run_is_no_part_of_a_benchmark(benchmark: Benchmark) -> None:
    later = matching()
    assert not list(benchmark.differences(later.model_copy(update={"occurred_at": later.occurred_at + timedelta(days=9)})))
