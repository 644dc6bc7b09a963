"""`sql` and `show`, as people type them."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rollstream.cli.report import report
from rollstream.cli.show import show
from rollstream.cli.sql import MAX_ROWS, sql
from rollstream.errors import StoreUnavailable, UsageError
from schemas.identities import event_id
from schemas.step import AgentStepped
from tests.events import Attempt, attempts, task_submitted
from tests.stores import publish_events

app = typer.Typer()
for function in (sql, report, show):
    app.command()(function)


def scene() -> list[Attempt]:
    """Three scored attempts of one group."""
    return list(attempts(task_submitted(attempts=4), 0.5, 1.0, 0.0))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = task_submitted(attempts=4)
    events = [event for attempt in scene() for event in attempt.events()]
    lost = Attempt(task, index=3)
    return publish_events(tmp_path_factory.mktemp("store"), task, *events, lost.ready(), lost.stepped(), lost.failed())


def command(store: Path, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments, "--data-dir", str(store)], input=stdin)


def test_sql_prints_a_table(store: Path) -> None:
    result = command(store, "sql", "SELECT environment, count(*) AS n, avg(reward) AS mean FROM rollouts GROUP BY 1")
    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines() if "math" in line] == [["math", "4", "0.5"]]


def test_sql_reads_standard_input(store: Path) -> None:
    assert "42" in command(store, "sql", "-", stdin="SELECT 42").output


def test_a_long_cell_is_shortened_visibly_and_json_has_it_all(store: Path) -> None:
    query = "SELECT repeat('x', 100) || 'end' AS text"
    table = command(store, "sql", query).output
    assert "x" * 59 + "…" in table
    assert "end" not in table
    assert json.loads(command(store, "sql", query, "--format", "json").output) == [{"text": "x" * 100 + "end"}]


def test_many_columns_are_all_printed(store: Path) -> None:
    names = [f"column_{number}" for number in range(60)]
    output = command(store, "sql", "SELECT " + ", ".join(f"'value_{name}' AS {name}" for name in names)).output
    assert all(f"value_{name}" in output for name in names)


def test_many_rows_are_cut_with_a_word(store: Path) -> None:
    output = command(store, "sql", f"SELECT i AS n FROM range({MAX_ROWS + 1}) t(i)").output
    assert f"the first {MAX_ROWS} rows; --format json gives all of them" in output
    assert f"the first {MAX_ROWS}" not in command(store, "sql", f"SELECT i FROM range({MAX_ROWS}) t(i)").output


def test_null_and_control_characters_are_visible(store: Path) -> None:
    output = command(store, "sql", "SELECT NULL AS a, chr(27) || '[2J' AS b").output
    assert "NULL" in output
    assert "\\x1b[2J" in output


@pytest.mark.parametrize("name", ["sql", "report", "show"])
def test_help_has_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert f"Example: rollstream {name}" in result.output


def test_failures_are_typed(store: Path, tmp_path: Path) -> None:
    assert isinstance(command(tmp_path, "sql", "SELECT 1").exception, StoreUnavailable)
    assert isinstance(command(store, "sql", "SELEC 1").exception, UsageError)
    assert isinstance(command(tmp_path, "show").exception, StoreUnavailable)


def test_show_prints_one_trajectory_by_the_beginning_of_its_id(store: Path) -> None:
    attempt = scene()[1]
    result = command(store, "show", attempt.rollout[:8])
    assert result.exit_code == 0
    for text in (
        attempt.rollout,
        attempt.session,
        "reward 1, success",
        "math / task-1, attempt 2 of 4",
        "1 call, 10 + 5 tokens",
    ):
        assert text in result.output
    assert result.output.index("user\n1 + 1 = ?") < result.output.index("assistant\nIt is 2.")


@pytest.mark.parametrize(("option", "reward"), [("--worst", "reward 0, no success"), ("--best", "reward 1, success")])
def test_show_chooses_by_reward(store: Path, option: str, reward: str) -> None:
    output = command(store, "show", "--run", "run-1", option).output
    assert reward in output
    assert output.count("── rollout") == 1


def test_show_prints_as_many_as_asked(store: Path) -> None:
    output = command(store, "show", "--worst", "-n", "3").output
    assert [output.index(text) for text in ("reward 0,", "reward 0.5,", "reward 1,")] == sorted(
        output.index(text) for text in ("reward 0,", "reward 0.5,", "reward 1,")
    )


def test_show_failed_has_the_error_and_what_was_recorded_until_then(store: Path) -> None:
    output = command(store, "show", "--failed").output
    for text in ("errored", "not scored", "what was recorded until it failed", "It is 2.", "the model server answered 503"):
        assert text in output


def test_show_follows_a_failed_session_over_whoever_took_it_over(tmp_path: Path) -> None:
    lost = Attempt()
    first = lost.stepped()

    def step(name: str, index: int, fence: int, said: str, previous: str | None) -> AgentStepped:
        execution = first.execution.model_copy(update={"id": f"execution-{fence}", "fence": fence})
        told = {"event_id": event_id(name), "index": index, "execution": execution, "previous": previous}
        return first.model_copy(update={**told, "message": {"role": "assistant", "content": said}})

    kept = step("kept", 0, 1, "begun by the first", None)
    zombie = step("zombie", 1, 1, "said by a zombie", kept.event_id)
    taken = step("taken", 1, 2, "gone on by the second", kept.event_id)
    publish_events(tmp_path, lost.ready(), kept, taken, zombie, lost.failed())
    output = command(tmp_path, "show", "--failed").output
    assert output.index("begun by the first") < output.index("gone on by the second")
    assert "zombie" not in output


def test_show_prints_tool_calls_parts_and_control_characters(tmp_path: Path) -> None:
    scored = Attempt().scored()
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "\x1b[31mred"},
    ]
    publish_events(tmp_path, scored.model_copy(update={"messages": messages}))
    output = command(tmp_path, "show").output
    for text in ("look\n[image_url]", '→ bash({"command": "ls"})', "\\x1b[31mred"):
        assert text in output


def test_show_cuts_long_messages_with_a_word_and_full_does_not(tmp_path: Path) -> None:
    publish_events(tmp_path, Attempt(answer="x" * 5_000 + "end").scored())
    assert "(1,003 more characters; --full shows them)" in command(tmp_path, "show").output
    assert "end" in command(tmp_path, "show", "--full").output


def test_show_says_what_it_could_not_find(store: Path) -> None:
    assert "begins with 'zz'" in str(command(store, "show", "zz").exception)
    assert "expected a rollout id" in str(command(store, "show", "--best", "--worst").exception)
    assert "no run 'nope'" in str(command(store, "show", "--run", "nope").exception)


def test_show_asks_for_more_of_an_id_that_is_not_enough(tmp_path: Path) -> None:
    attempt = Attempt()
    twins = [attempt.scored().model_copy(update={"event_id": name, "rollout": name}) for name in ("abc-1", "abc-2")]
    publish_events(tmp_path, *twins)
    assert "begins with 'abc': abc-1, abc-2" in str(command(tmp_path, "show", "abc").exception)
