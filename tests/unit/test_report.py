"""The report of a run worked out by hand, and how it is told."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rollstream.cli.report import report as report_command
from rollstream.errors import StoreUnavailable, UsageError
from rollstream.store.reader import open_snapshot
from rollstream.store.report import Failure, PassAt, Report, Seconds, read_report
from schemas.envelope import Event
from schemas.episode import EpisodeTiming
from tests.events import Attempt, attempts, run_published, task_submitted
from tests.stores import publish_events

app = typer.Typer()
app.command("report")(report_command)
app.callback()(lambda: None)


def hand_computed() -> list[Event]:
    """Run-1 promises three groups of three.

    Of group a, two attempts are scored (1 and 0) and one failed; of group b, one is scored (0.5, cut off) and two are out;
    group c was not even seen. A later run is there too.
    """
    a, b = task_submitted("a", attempts=3), task_submitted("b", attempts=3)
    events: list[Event] = [run_published(groups=3, attempts=3), a, b]
    one, two = attempts(a, 1.0, 0.0)
    slow = Attempt(a, index=1, reward=0.0, timing=EpisodeTiming(queued_s=3.0, agent_s=4.0, model_s=2.5), verify_s=1.5)
    assert two.session == slow.session
    cut = Attempt(b, reward=0.5, stop_reason="max_steps")
    for attempt in (one, slow, cut):
        events += attempt.events()
    lost = Attempt(a, index=2)
    events += [lost.ready(), lost.stepped(), lost.failed()]
    later = run_published("run-2")
    return [*events, later.model_copy(update={"occurred_at": later.occurred_at + timedelta(hours=1)})]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_events(tmp_path_factory.mktemp("store"), *hand_computed())


@pytest.fixture(scope="module")
def report(store: Path) -> Report:
    with open_snapshot(store) as connection:
        return read_report(connection, "run-1")


def command(store: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(store)])


def test_attempted_is_what_was_promised(report: Report) -> None:
    (math,) = report.environments
    assert (math.tasks, math.attempted, math.ended, math.unfinished) == (3, 9, 4, 5)
    assert not report.complete


def test_terminal_attempts_are_counted_by_status(report: Report) -> None:
    (math,) = report.environments
    assert (math.completed, math.truncated, math.errored, math.cancelled) == (2, 1, 1, 0)


def test_the_mean_reward_is_over_scored_attempts_alone(report: Report) -> None:
    (math,) = report.environments
    assert (math.scored, math.succeeded, math.mean_reward) == (3, 1, 0.5)
    assert math.coverage == pytest.approx(3 / 9)


def test_pass_at_k_is_over_the_tasks_that_have_k_scored_attempts(report: Report) -> None:
    # Task a: 1 of 2; task b: 0 of 1.
    (math,) = report.environments
    assert math.pass_at == (PassAt(1, 0.25, 2), PassAt(2, 1.0, 1), PassAt(3, None, 0))


def test_failures_are_counted_by_kind_with_an_example(report: Report) -> None:
    (math,) = report.environments
    assert math.failures == (Failure("agent", "model_unavailable", 1, "the model server answered 503"),)


def test_tokens_include_the_calls_of_failed_attempts(report: Report) -> None:
    (math,) = report.environments
    assert (math.model_calls, math.prompt_tokens, math.completion_tokens) == (4, 40, 20)


def test_time_is_of_scored_attempts(report: Report) -> None:
    # Three values each: 1, 1, 3 queued; the 95th percentile lies nine tenths of the way from the second to the third.
    (math,) = report.environments
    assert math.time == (
        Seconds("queued", 1.0, pytest.approx(2.8)),
        Seconds("agent", 2.0, pytest.approx(3.8)),
        Seconds("model", 1.5, pytest.approx(2.4)),
        Seconds("verification", 0.5, pytest.approx(1.4)),
    )


def test_wall_time_is_from_the_first_task_to_the_last_attempt_ended(report: Report) -> None:
    assert report.wall_s == 6.0


def test_without_a_name_the_latest_run_is_reported(store: Path) -> None:
    with open_snapshot(store) as connection:
        found = read_report(connection)
    assert (found.run, found.attempted, found.ended, found.wall_s) == ("run-2", 1, 0, None)


def test_a_run_that_was_never_published_is_reported_from_its_tasks(tmp_path: Path) -> None:
    publish_events(tmp_path, *hand_computed()[1:-1])
    with open_snapshot(tmp_path) as connection:
        found = read_report(connection)
    assert (found.run, found.attempted, found.ended, found.dataset) == ("run-1", 6, 4, None)


@pytest.mark.parametrize(("asked", "offered"), [("run1", "close to it: run-1"), ("xyz", "the latest: run-2, run-1")])
def test_an_unknown_run_offers_others(store: Path, asked: str, offered: str) -> None:
    with (
        open_snapshot(store) as connection,
        pytest.raises(UsageError, match=f"no run '{asked}' in the published store; {offered}"),
    ):
        read_report(connection, asked)


def test_a_store_without_runs_says_so(tmp_path: Path) -> None:
    publish_events(tmp_path)
    with open_snapshot(tmp_path) as connection, pytest.raises(UsageError, match="has no run yet"):
        read_report(connection)


def test_the_command_prints_tables(store: Path) -> None:
    result = command(store, "report", "run-1")
    assert result.exit_code == 0
    assert "run run-1, dataset sums, harness chat, model small" in result.output
    assert "4 of 9 attempts ended in 6.00 s" in result.output
    for cell in ("3 (33%)", "0.5000", "0.2500 (2 of 3 tasks)", "1.0000 (1 of 3 tasks)", "model_unavailable", "1.00 s / 2.80 s"):
        assert cell in result.output


def test_the_command_gives_json(store: Path) -> None:
    body = json.loads(command(store, "report", "run-1", "--json").output)
    assert (body["run"], body["attempted"], body["ended"], body["complete"]) == ("run-1", 9, 4, False)
    assert body["environments"][0]["coverage"] == pytest.approx(1 / 3)
    assert body["environments"][0]["pass_at"][0] == {"k": 1, "estimate": 0.25, "tasks": 2}


def test_the_command_gives_markdown(store: Path) -> None:
    output = command(store, "report", "run-1", "--markdown").output
    assert output.startswith("## run run-1, ")
    assert "| math | agent | model_unavailable | 1 | the model server answered 503 |" in output


def test_the_command_fails_without_a_store_and_without_the_run(store: Path, tmp_path: Path) -> None:
    assert isinstance(command(tmp_path, "report").exception, StoreUnavailable)
    assert isinstance(command(store, "report", "nope").exception, UsageError)
