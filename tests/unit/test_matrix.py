"""What runs together and what does not: the matrix claims it, and the checks of a publication agree."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream import harnesses
from rollstream.admission import Admission
from rollstream.backends import Backends
from rollstream.cli.own import given_by_path
from rollstream.environments import registry
from rollstream.environments.protocol import ShowsExample
from rollstream.errors import Refused
from rollstream.matrix import Cell, example_of, walk
from rollstream.sandboxes import registry as sandboxes
from rollstream.settings import SandboxSettings, Settings
from schemas.session import PLACEMENTS_WITH_A_BOX
from schemas.values import Composition
from tests.boxed import BoxedEnvironment
from tests.environments import load_anew
from tests.unit.test_cli import rollstream_command

SETTINGS = Settings(sandboxes=SandboxSettings(unsafe_local=True))
IN_A_BOX = f"{Path(__file__).parents[1]}/in_a_box.py:InABox"


@pytest.fixture(autouse=True)
def _own() -> Iterator[None]:
    registry.ENVIRONMENTS["boxed"] = BoxedEnvironment
    load_anew()
    given_by_path(Settings(), [], [IN_A_BOX])
    yield
    registry.ENVIRONMENTS.pop("boxed")
    harnesses.declare(Settings())
    load_anew()


def everything() -> list[Cell]:
    rows = {"boxed": {"word": "w"}}
    return list(walk(registry.names(), harnesses.names(), sandboxes.names(), Backends.of(SETTINGS), rows))


def test_every_shipped_environment_shows_a_task_that_it_accepts() -> None:
    for name in registry.ENVIRONMENTS:
        if name != "boxed":
            assert isinstance(registry.load(name), ShowsExample), name
            loaded = registry.load(name)
            registry.seed(loaded, registry.admit(loaded, example_of(loaded) or {}))


def test_every_combination_is_told_once_and_every_refusal_has_a_sentence() -> None:
    cells = everything()
    keys = [(cell.environment, cell.harness, cell.sandbox) for cell in cells]
    assert sorted(keys) == sorted(
        (environment, harness, sandbox)
        for environment in registry.names()
        for harness in harnesses.names()
        for sandbox in sandboxes.names()
    )
    assert {cell.runs for cell in cells} == {True, False}
    for cell in cells:
        assert bool(cell.why_not) is not cell.runs, cell
        assert (cell.placement is not None) is cell.runs, cell
        assert "\n" not in cell.why_not, cell


def test_a_publication_accepts_what_runs_and_refuses_the_rest_with_the_same_sentence() -> None:
    for cell in everything():
        admission = Admission.of(SETTINGS)
        models = dict.fromkeys(("policy", *cell.roles), "default")
        row = {"word": "w"} if cell.environment == "boxed" else example_of(registry.load(cell.environment)) or {}
        wanted = Composition(harness=cell.harness, models=models, sandbox=cell.sandbox)
        if cell.runs:
            assert admission.check(cell.environment, wanted, row).composition == wanted, cell
            environment = registry.load(cell.environment)
            harnesses.check_composition(wanted, environment, registry.admit(environment, row))
        else:
            with pytest.raises(Refused) as refused:
                admission.check(cell.environment, wanted, row)
            assert str(refused.value) == cell.why_not


def test_placements_and_backends_are_told_as_they_are() -> None:
    found = {(cell.environment, cell.harness, cell.sandbox): cell for cell in everything()}
    assert found["math", "chat", "local"].placement == "none"
    assert found["math", "in_a_box", "docker"].placement == "agent_sandboxed"
    assert found["boxed", "oracle", "bubblewrap"].placement == "agent_in_env"
    assert found["boxed", "oracle", "bubblewrap"].placement in PLACEMENTS_WITH_A_BOX
    assert "cannot enforce cpus" in found["boxed", "oracle", "local"].why_not
    assert "cannot enforce cpus" in found["math", "in_a_box", "local"].why_not
    assert found["code_repair_tools", "bash_agent", "docker"].placement == "env_sandboxed"
    assert "cannot enforce cpus" in found["code_repair_tools", "bash_agent", "local"].why_not
    assert found["math", "claude_code", "bubblewrap"].placement == "agent_sandboxed"
    assert "no image" in found["swe_bench", "oracle", "bubblewrap"].why_not
    assert "asks for tools" in found["counter", "in_a_box", "docker"].why_not


def test_an_environment_without_a_task_says_so() -> None:
    (cell,) = walk(["boxed"], ["noop"], ["docker"], Backends.of(SETTINGS), {})
    assert cell.why_not == "environment boxed shows no example task: give a file with one"


def test_the_command_tells_a_table_and_json_and_goes_by_a_file(tmp_path: Path) -> None:
    shown = rollstream_command("matrix", "-e", "math", "-e", "counter", "--harness", "tools").stdout
    assert shown.count("any") == 2
    assert "6 of 6 combinations run" in shown
    told = json.loads(
        rollstream_command("matrix", "-e", "counter", "--harness", "chat", "--sandbox", "docker", "--json").stdout
    )
    assert [(cell["runs"], cell["sandbox"]) for cell in told] == [(False, "docker")]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"environment": "conversation", "scenario": "s", "opening": "o", "goal": "g"}\n')
    by_file = json.loads(rollstream_command("matrix", str(tasks), "--harness", "chat", "--json").stdout)
    assert {(cell["environment"], tuple(cell["roles"])) for cell in by_file} == {("conversation", ("user",))}
    refused = rollstream_command("matrix", "-e", "maths")
    assert (refused.returncode, refused.stderr[:40]) == (2, "error: expected one of the environments ")
