"""The report of a run worked out by hand, and how it is told."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rollstream.cli.report import metrics_of_environment, report as report_command
from rollstream.environments import registry
from rollstream.environments.math import MathEnvironment
from rollstream.environments.protocol import ScoredVerdict
from rollstream.errors import StoreUnavailable, UsageError
from rollstream.store.reader import open_snapshot
from rollstream.store.report import Report, read_report
from rollstream.store.report.prices import Price, usage_of
from rollstream.store.report.report import Failure, Revision, Seconds, Slice, StepReward
from schemas.envelope import Event
from schemas.episode import EpisodeTiming
from schemas.rollout import StepReward as RewardOfStep
from tests.environments import load_anew
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
    slow = Attempt(
        a, index=1, reward=0.0, timing=EpisodeTiming(queued_s=3.0, agent_s=4.0, environment_s=1.0, model_s=2.5), verify_s=1.5
    )
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


@pytest.fixture(scope="module")
def math(report: Report) -> Slice:
    (part,) = report.slices
    assert part.labels == ("math",)
    return part


def test_attempted_is_what_was_promised(report: Report, math: Slice) -> None:
    assert (math.tasks, math.attempted, math.ended, math.unfinished) == (3, 9, 4, 5)
    assert not report.complete


def test_terminal_attempts_are_counted_by_status(math: Slice) -> None:
    assert (math.completed, math.truncated, math.errored, math.cancelled) == (2, 1, 1, 0)


def test_the_mean_reward_is_over_scored_attempts_alone(math: Slice) -> None:
    assert (math.scored, math.succeeded, math.mean_reward.value, math.success_rate.value) == (3, 1, 0.5, 1 / 3)
    assert math.coverage == pytest.approx(3 / 9)


def test_the_standard_error_is_over_tasks(math: Slice) -> None:
    # pass@1 of the two tasks is 0.5 and 0.
    average = math.pass_at[0].estimate
    assert (average.value, average.standard_error, average.tasks) == (0.25, pytest.approx(0.25), 2)
    assert (average.low, average.high) == (0.0, 1.0)


def test_pass_at_k_is_over_the_tasks_that_have_k_scored_attempts(math: Slice) -> None:
    # Task a: 1 of 2; task b: 0 of 1.
    assert [(each.k, each.estimate.value, each.groups) for each in math.pass_at] == [(1, 0.25, 2), (2, 1.0, 1), (3, None, 0)]
    assert [(each.k, each.estimate.value, each.groups) for each in math.pass_hat] == [(2, 0.0, 1), (3, None, 0)]


def test_failures_are_counted_by_kind_with_an_example(math: Slice) -> None:
    assert math.failures == (Failure("agent", "model_unavailable", 1, "the model server answered 503"),)


def test_tokens_include_the_calls_that_environments_made(tmp_path: Path) -> None:
    attempt = Attempt()
    called = [attempt.environment_called(0), attempt.environment_called(1), attempt.environment_called(2, "judge")]
    store = publish_events(tmp_path, run_published(), attempt.task, *attempt.events(), *called)
    with open_snapshot(store) as connection:
        (part,) = read_report(connection, "run-1").slices
    assert [(one.role, one.calls, one.prompt_tokens) for one in part.usage] == [
        ("judge", 1, 10),
        ("policy", 1, 10),
        ("user", 2, 20),
    ]
    assert (part.steps_mean, part.steps_most) == (1.0, 1)


def test_tokens_include_the_calls_of_failed_attempts(math: Slice) -> None:
    (usage,) = math.usage
    assert (usage.role, usage.model, usage.calls) == ("policy", "small", 4)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cost) == (40, 20, None)
    assert (math.steps_mean, math.steps_most) == (1.0, 1)


def test_time_is_of_scored_attempts_and_its_parts_do_not_overlap(math: Slice) -> None:
    # Three values each: 1, 1, 3 queued; the 95th percentile lies nine tenths of the way from the second to the third.
    assert math.time == (
        Seconds("queued", 1.0, pytest.approx(2.8), 5.0),
        Seconds("agent", 0.25, pytest.approx(0.475), 1.0),
        Seconds("environment", 0.25, pytest.approx(0.925), 1.5),
        Seconds("model", 1.5, pytest.approx(2.4), 5.5),
        Seconds("verification", 0.5, pytest.approx(1.4), 2.5),
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


def test_attempts_without_a_reward_count_as_zero_only_when_asked(store: Path) -> None:
    with open_snapshot(store) as connection:
        (math,) = read_report(connection, "run-1", missing_as_zero=True).slices
    assert (math.mean_reward.value, math.success_rate.value) == (pytest.approx(1.5 / 9), pytest.approx(1 / 9))
    assert [each.groups for each in math.pass_at] == [3, 3, 3]
    assert (math.scored, math.attempted) == (3, 9)


def test_parts_are_told_apart_by_whatever_is_asked_for(tmp_path: Path) -> None:
    one, other = (task_submitted("a", attempts=2, environment=name) for name in ("math", "multiple_choice"))
    events: list[Event] = [run_published(groups=1, attempts=2), one, other]
    for task, versions in ((one, ("v1", "v2")), (other, ("v2", None))):
        for attempt, version in zip(attempts(task, 1.0, 0.0), versions, strict=True):
            stepped = attempt.stepped()
            stepped = stepped.model_copy(update={"call": stepped.call.model_copy(update={"policy_version": version})})
            events += [attempt.ready(), stepped, attempt.completed(), attempt.verdict(), attempt.scored()]
    publish_events(tmp_path, *events)
    with open_snapshot(tmp_path) as connection:
        by_version = read_report(connection, by=("policy_version", "environment")).slices
        by_model = read_report(connection, by=("model",)).slices
    assert [(part.labels, part.scored, part.mean_reward.value) for part in by_version] == [
        (("v1", "math"), 1, 1.0),
        (("v2", "math"), 1, 0.0),
        (("v2", "multiple_choice"), 1, 1.0),
        ((None, "multiple_choice"), 1, 0.0),
    ]
    assert [(part.labels, part.scored) for part in by_model] == [(("small",), 4)]


def test_several_groups_of_one_task_are_one_cluster(tmp_path: Path) -> None:
    events: list[Event] = []
    for name, epoch, reward in (("a", 0, 1.0), ("a", 1, 0.0), ("b", 0, 1.0)):
        task = task_submitted(name, epoch=epoch)
        events += [task, *Attempt(task, reward=reward).events()]
    publish_events(tmp_path, *events)
    with open_snapshot(tmp_path) as connection:
        (part,) = read_report(connection).slices
    assert (part.tasks, part.groups, part.pass_at[0].groups, part.pass_at[0].estimate.tasks) == (2, 3, 3, 2)
    assert part.pass_at[0].estimate.value == pytest.approx(2 / 3)


def test_rewards_are_told_by_step(tmp_path: Path) -> None:
    task = task_submitted("a", attempts=2)
    events: list[Event] = [task]
    for attempt, rewards in zip(attempts(task, 1.0, 1.0), ((0.0, 1.0), (0.5, None)), strict=True):
        steps = [RewardOfStep(index=index, reward=reward) for index, reward in enumerate(rewards)]
        events += [attempt.ready(), attempt.scored().model_copy(update={"steps": steps})]
    publish_events(tmp_path, *events)
    with open_snapshot(tmp_path) as connection:
        (part,) = read_report(connection).slices
    assert part.step_rewards == (StepReward(0, 0.25, 2), StepReward(1, 1.0, 1))


def test_the_report_says_which_revision_counts(tmp_path: Path) -> None:
    task = task_submitted("a", attempts=2)
    first, second = attempts(task, 0.0, 0.0)
    again = Attempt(task, index=0, reward=1.0).scored(revision=1)
    again = again.model_copy(update={"versions": again.versions.model_copy(update={"environment": "2"})})
    publish_events(tmp_path, task, *first.events(), *second.events(), again)
    with open_snapshot(tmp_path) as connection:
        found = read_report(connection)
    assert found.slices[0].mean_reward.value == 0.5
    assert found.revisions == (Revision("math", "1", 0, 1), Revision("math", "2", 1, 1))
    told = command(tmp_path, "report").output
    assert "verdicts of math that count: revision 0 (version 1) of 1 attempts, revision 1 (version 2) of 1 attempts" in told


# Prices.


def test_cost_is_of_fresh_cached_and_completion_tokens(store: Path) -> None:
    price = Price(input=1.0, output=10.0, cached=0.1)
    assert price.cost(prompt_tokens=1_000_000, completion_tokens=100_000, cached_tokens=600_000) == pytest.approx(
        0.4 + 0.06 + 1.0
    )
    with open_snapshot(store) as connection:
        found = read_report(connection, "run-1", prices={"small": price})
    assert found.slices[0].cost == pytest.approx((40 * 1 + 20 * 10) / 1e6)
    assert found.prices == {"small": price}


def test_a_model_is_priced_by_its_name_in_the_settings_or_by_the_id_of_its_server() -> None:
    def row(role: str, policy: str, served: str) -> dict[str, object]:
        return {"role": role, "policy": policy, "served": served, "calls": 1, "prompt_tokens": 10**6,
                "completion_tokens": 0, "cached_tokens": 0, "cost_usd": None, "costs_told": 0}  # fmt: skip

    rows = [
        row("policy", "small", "s-1b"),
        row("policy", "small", "s-2b"),
        row("user", "small", "u-7b"),
        row("judge", "small", "j"),
    ]
    found = usage_of(rows, {"user": "talker"}, {"small": Price(1, 1, 1), "u-7b": Price(2, 2, 2)})
    assert [(usage.role, usage.model, usage.calls, usage.cost) for usage in found] == [
        ("policy", "small", 2, 2.0),
        ("user", "talker", 1, 2.0),
        ("judge", "j", 1, None),
    ]


def test_prices_come_from_the_settings_and_are_told(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "rollstream.toml"
    config.write_text("[models.small]\nprice_per_million_input = 100.0\nprice_per_million_output = 400.0\n")
    monkeypatch.setenv("ROLLSTREAM_CONFIG", str(config))
    result = command(store, "report", "run-1")
    assert "prices of a million tokens, from the settings: small 100 in, 400 out, 100 cached" in result.output
    assert "0.0120" in result.output


def told(data_dir: Path, *costs: float | None) -> Path:
    """A store of as many attempts at a task as there are costs, each of one call that says its own."""
    task = task_submitted("a", attempts=len(costs))
    tried = [Attempt(task, index=index, cost_usd=cost) for index, cost in enumerate(costs)]
    return publish_events(data_dir, task, *(event for attempt in tried for event in attempt.events()))


def usage_in(store: Path, prices: Mapping[str, Price] | None = None) -> tuple[float | None, float | None, int]:
    """Cost, told cost and how many told, of the only model; both costs are those of the whole part as well."""
    with open_snapshot(store) as connection:
        (part,) = read_report(connection, prices=prices).slices
    (usage,) = part.usage
    assert (part.cost, part.cost_usd) == (usage.cost, usage.cost_usd)
    return usage.cost, usage.cost_usd, usage.costs_told


def cell_of_cost(store: Path) -> str | None:
    """The cost of the only model, as Markdown has it; None where there is no such column."""
    lines = [[cell.strip() for cell in line.split("|")] for line in command(store, "report", "--markdown").output.splitlines()]
    names, _, cells = next(lines[place : place + 3] for place, line in enumerate(lines) if "prompt tokens" in line)
    return dict(zip(names, cells, strict=True)).get("cost")


def test_a_model_without_a_price_costs_what_its_calls_said(tmp_path: Path) -> None:
    store = told(tmp_path, 0.1, 0.2)
    assert usage_in(store) == (None, 0.3, 2)
    assert cell_of_cost(store) == "0.3000 USD"
    output = " ".join(command(store, "report").output.split())
    assert "costs in USD are those that calls said themselves, of models without a price in the settings" in output
    assert "0.3000 USD" in output
    assert "at least" not in output


def test_what_only_some_calls_said_is_the_least_that_was_paid(tmp_path: Path) -> None:
    store = told(tmp_path, None, 0.2, None)
    assert usage_in(store) == (None, 0.2, 1)
    assert cell_of_cost(store) == "at least 0.2000 USD"
    assert "at least, where some calls said none" in " ".join(command(store, "report").output.split())


def test_a_price_goes_before_what_calls_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = told(tmp_path / "store", 0.1, None)
    assert usage_in(store, {"small": Price(100.0, 400.0, 100.0)}) == (pytest.approx(0.006), None, 1)
    config = tmp_path / "rollstream.toml"
    config.write_text("[models.small]\nprice_per_million_input = 100.0\nprice_per_million_output = 400.0\n")
    monkeypatch.setenv("ROLLSTREAM_CONFIG", str(config))
    assert cell_of_cost(store) == "0.0060"
    assert "USD" not in command(store, "report").output


def test_where_nobody_knows_a_cost_there_is_none(tmp_path: Path) -> None:
    store = told(tmp_path, None)
    assert usage_in(store) == (None, None, 0)
    assert cell_of_cost(store) is None


def test_costs_by_price_and_costs_that_were_told_are_not_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(cost_usd=0.5)
    judged = attempt.environment_called(role="judge")
    judged = judged.model_copy(update={"call": judged.call.model_copy(update={"model": "judge-7b"})})
    publish_events(tmp_path / "store", attempt.task, *attempt.events(), judged)
    config = tmp_path / "rollstream.toml"
    config.write_text("[models.small]\nprice_per_million_input = 100.0\nprice_per_million_output = 400.0\n")
    monkeypatch.setenv("ROLLSTREAM_CONFIG", str(config))
    (part,) = json.loads(command(tmp_path / "store", "report", "--json").output)["slices"]
    assert (part["cost"], part["cost_usd"]) == (pytest.approx(0.003), 0.5)
    assert [(each["model"], each["cost"], each["cost_usd"], each["costs_told"]) for each in part["usage"]] == [
        ("judge-7b", None, 0.5, 1),
        ("small", pytest.approx(0.003), None, 1),
    ]


def test_a_model_of_which_only_one_server_has_a_price_costs_what_its_calls_said() -> None:
    def row(served: str, cost: float) -> dict[str, object]:
        return {"role": "policy", "policy": "small", "served": served, "calls": 1, "prompt_tokens": 1,
                "completion_tokens": 0, "cached_tokens": 0, "cost_usd": cost, "costs_told": 1}  # fmt: skip

    (found,) = usage_of([row("s-1b", 0.25), row("s-2b", 0.5)], {}, {"s-1b": Price(1, 1, 1)})
    assert (found.cost, found.cost_usd, found.costs_told, found.calls) == (None, 0.75, 2, 2)


# Metrics of an environment.


class Talkative(MathEnvironment):
    """`math`, with metrics that a test chooses."""

    name = "math"
    metrics: Mapping[str, float] = {}
    seen: Sequence[ScoredVerdict] = ()

    def aggregate_metrics(self, verdicts: Iterable[ScoredVerdict]) -> Mapping[str, float]:
        Talkative.seen = list(verdicts)
        if not self.metrics:
            raise RuntimeError("a bug in a metric")
        return self.metrics


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Talkative]]:
    monkeypatch.setitem(registry.ENVIRONMENTS, "math", Talkative)
    load_anew()
    Talkative.metrics = {}
    yield Talkative
    load_anew()


def test_an_environment_adds_metrics_over_its_verdicts(tmp_path: Path, talkative: type[Talkative]) -> None:
    task = task_submitted("a", attempts=2)
    one, two = Attempt(task, reward=1.0, components={"format": 0.5}), Attempt(task, index=1, reward=0.0)
    verdict = one.verdict().model_copy(update={"diagnostics": {"answer": "4"}})
    scored = one.scored().model_copy(update={"verdict": verdict.event_id})
    publish_events(tmp_path, task, one.ready(), one.completed(), verdict, scored, *two.events())
    talkative.metrics = {"format": 0.25, "nonsense": float("nan")}
    result = command(tmp_path, "report")
    assert [(each.task, each.index, each.reward, each.success) for each in talkative.seen] == [
        ("a", 0, 1.0, True),
        ("a", 1, 0.0, False),
    ]
    assert (talkative.seen[0].components, talkative.seen[0].diagnostics) == ({"format": 0.5}, {"answer": "4"})
    assert "format (of the environment)" in result.output
    assert "expected a finite number as nonsense" in result.output
    assert result.exit_code == 0


def test_a_metric_that_fails_is_told_and_costs_no_other_number(store: Path, talkative: type[Talkative]) -> None:
    result = command(store, "report", "run-1")
    assert "aggregate_metrics of environment math raised RuntimeError: a bug in a metric" in result.output
    assert "mean reward" in result.output


def test_an_environment_that_is_not_installed_adds_nothing() -> None:
    verdict = ScoredVerdict("a", 0, 1.0, True, {}, {})
    assert metrics_of_environment("gone", [verdict]) == {}


@pytest.mark.parametrize(("name", "key"), [("math", "answer"), ("multiple_choice", "choice")])
def test_shipped_environments_tell_how_many_answers_could_not_be_read(name: str, key: str) -> None:
    diagnostics: list[dict[str, object]] = [{key: "4"}, {key: None}, {key: "5"}, {key: "6"}, {}]
    verdicts = [ScoredVerdict("a", index, 0.0, False, {}, each) for index, each in enumerate(diagnostics)]
    assert metrics_of_environment(name, verdicts) == {"unreadable": 0.25}
    assert metrics_of_environment(name, verdicts[-1:]) == {}


# The command.


def test_the_command_prints_tables(store: Path) -> None:
    result = command(store, "report", "run-1")
    assert result.exit_code == 0
    assert "run run-1, dataset sums, harness chat, model small" in result.output
    assert "4 of 9 attempts ended in 6.00 s" in result.output
    for cell in (
        "3 (33%)",
        "0.5000",
        "pass@1 [avg-of-3]",
        "2 of 3 tasks",
        "1 of 3 tasks",
        "model_unavailable",
        "2.80 s",
        "32%",
    ):
        assert cell in result.output
    assert "missing" not in result.output


def test_what_counts_missing_as_zero_says_so_beside_every_number(store: Path) -> None:
    output = command(store, "report", "run-1", "--count-missing-as-zero").output
    assert "--count-missing-as-zero: 6 of 9 attempts have no reward and count as 0 below" in output
    for metric in ("mean reward", "success rate", "pass@1 [avg-of-3]", "pass@2", "pass^2"):
        assert f"{metric} (missing = 0)" in output
    body = json.loads(command(store, "report", "run-1", "--count-missing-as-zero", "--json").output)
    assert body["missing_as_zero"] is True


def test_the_command_gives_json(store: Path) -> None:
    body = json.loads(command(store, "report", "run-1", "--json").output)
    assert (body["run"], body["attempted"], body["ended"], body["complete"]) == ("run-1", 9, 4, False)
    part = body["slices"][0]
    assert (part["labels"], part["coverage"]) == ({"environment": "math"}, pytest.approx(1 / 3))
    assert (part["pass_at"][0]["k"], part["pass_at"][0]["estimate"]["value"], part["pass_at"][0]["groups"]) == (1, 0.25, 2)


def test_the_command_gives_markdown(store: Path) -> None:
    output = command(store, "report", "run-1", "--markdown").output
    assert output.startswith("## run run-1, ")
    assert "| math | agent | model_unavailable | 1 | the model server answered 503 |" in output


@pytest.mark.parametrize("by", ["colour", "", "model,model", "environment,colour"])
def test_what_cannot_be_told_apart_is_refused_with_what_can(store: Path, by: str) -> None:
    refused = command(store, "report", "run-1", "--by", by).exception
    assert isinstance(refused, UsageError)
    assert "--by expects some of environment, dataset, split, harness, model" in str(refused)


def test_the_command_fails_without_a_store_and_without_the_run(store: Path, tmp_path: Path) -> None:
    assert isinstance(command(tmp_path, "report").exception, StoreUnavailable)
    assert isinstance(command(store, "report", "nope").exception, UsageError)
