"""`rollstream env` and classes by path, as a user calls them."""

import json
from pathlib import Path

import pytest

from rollstream.environments.registry import ENVIRONMENTS
from tests.unit.test_cli import rollstream_command

ROOT = Path(__file__).parents[2]
ASKED = [{"role": "user", "content": "Count."}]
BROKEN = '''
from typing import ClassVar
from rollstream.environments.counter import CounterEnvironment
from rollstream.environments.protocol import Verdict
class Generous(CounterEnvironment):
    """Everybody wins."""
    name: ClassVar[str] = "generous"
    async def score(self, task, world, episode, services):
        return Verdict(reward=1.0)
class Strict(CounterEnvironment):
    """Nobody wins."""
    name: ClassVar[str] = "strict"
    async def score(self, task, world, episode, services):
        return Verdict(reward=0.5)
class Sloppy(CounterEnvironment):
    name: ClassVar[str] = "sloppy"
    async def step(self, world, action, services):
        world.count += 1
        return await super().step(world, action, services)
class Half:
    name = "half"
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_environments.py"
    path.write_text(BROKEN)
    return path


@pytest.fixture
def counting(tmp_path: Path) -> str:
    path = tmp_path / "counting.jsonl"
    path.write_text("".join(json.dumps({"task_id": f"to-{n}", "messages": ASKED, "expected_count": n}) + "\n" for n in (1, 2)))
    return str(path)


def test_the_list_has_every_environment_and_where_it_comes_from() -> None:
    found = json.loads(rollstream_command("env", "list", "--json").stdout)
    assert {one["name"] for one in found} >= set(ENVIRONMENTS)
    assert {one["from"] for one in found if one["name"] in ENVIRONMENTS} == {"shipped"}


def test_one_is_shown_with_its_fields_and_who_sees_them() -> None:
    shown = rollstream_command("env", "show", "math").stdout
    assert "question" in shown
    assert "verify" in shown
    unknown = rollstream_command("env", "show", "maths")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: expected one of the environments ")
    assert "did you mean math?" in unknown.stderr


@pytest.mark.parametrize("name", ["demo", "gymnasium", "self_play", "conversation", "workplace"])
def test_every_example_passes_its_check(name: str) -> None:
    done = rollstream_command("env", "check", str(ROOT / "examples" / f"{name}.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith(" good")


def test_tasks_that_take_models_are_said_not_to_be_solved_here() -> None:
    done = rollstream_command("env", "check", str(ROOT / "examples" / "conversation_models.jsonl"))
    assert (done.returncode, done.stdout) == (0, "2 tasks of conversation: 2 not solved\n")
    assert "note: 1 of 2 tasks were not solved here: each needs a model in the role user" in done.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Generous", "doing nothing scores 1.0, which counts as success"),
        ("Strict", "the reference solution scores 0.5, expected at least 1"),
        ("Sloppy", "environment sloppy changed the world that it was given; change a copy"),
    ],
)
def test_an_environment_that_scores_wrong_is_told_and_exits_with_one(
    own: Path, counting: str, name: str, sentence: str
) -> None:
    done = rollstream_command("env", "check", counting, "-e", f"{own}:{name}")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"line {line} (to-{line}): {sentence}" for line in (1, 2)]
    assert done.stdout == f"2 tasks of {name.lower()}: 2 score wrong\n"


def test_refused_rows_are_told_by_line_and_json_says_the_same(counting: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    good = json.dumps({"environment": "counter", "messages": ASKED, "expected_count": 1})
    bad.write_text(f'{{"environment": "counter"}}\nnot json\n{{"environment": "nowhere"}}\n{good}\n')
    done = rollstream_command("env", "check", str(bad), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [one["finding"] for one in found] == ["refused", "refused", "refused", "good"]
    assert [one["line"] for one in found] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("location", "sentence"),
    [
        ("absent.py:Thing", "expected a Python file at "),
        ("{own}:Nothing", "expected a class Nothing in "),
        ("{own}:Half", "it lacks version, task_type, public_fields, success_threshold, seed, reference, verify"),
        ("{own}", "expected path.py:Class, found "),
    ],
)
def test_a_class_that_cannot_be_had_is_one_sentence(own: Path, counting: str, location: str, sentence: str) -> None:
    for words in (["publish", counting, "-e"], ["run", counting, "-e"], ["up", "--environment"]):
        done = rollstream_command(*words, location.format(own=own), cwd=own.parent)
        assert done.returncode == 2, f"{words}: {done}"
        assert done.stderr.startswith("error: ")
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_harness_by_path_is_checked_before_anything_starts(own: Path, counting: str) -> None:
    done = rollstream_command("run", counting, "-e", "counter", "--harness", f"{own}:Half")
    assert done.returncode == 2
    assert "it lacks version, capabilities, open" in done.stderr
