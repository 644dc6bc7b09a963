"""Finding environments by name, and the door every row passes."""

from pathlib import Path

import pytest

from rollstream.environments.math import MathTask
from rollstream.environments.multiple_choice import MultipleChoiceEnvironment
from rollstream.environments.registry import ENTRY_POINTS, admit, load, names, public_view
from rollstream.errors import Refused


class Riddles(MultipleChoiceEnvironment):
    name = "riddles"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with three plug-ins: one that works, one that cannot be imported, one under another name than its own."""
    metadata = tmp_path / "plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    lines = [
        f"[{ENTRY_POINTS}]",
        f"riddles = {__name__}:Riddles",
        "broken = no_such_module:Thing",
        f"misnamed = {__name__}:Riddles",
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))


def test_shipped_environments_are_found_by_name() -> None:
    assert {"math", "multiple_choice"} <= set(names())
    assert load("math").name == "math"
    assert load("math") is load("math")


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(Refused, match=r"math, multiple_choice.*found 'maths'; did you mean math\?") as refused:
        load("maths")
    assert (refused.value.stage, refused.value.kind, refused.value.retryable) == ("admission", "unknown_environment", False)


@pytest.mark.usefixtures("installed")
def test_installed_environments_are_found_by_their_entry_point() -> None:
    assert "riddles" in names()
    assert isinstance(load("riddles"), Riddles)


@pytest.mark.usefixtures("installed")
def test_a_plug_in_that_cannot_be_loaded_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="ModuleNotFoundError"):
        load("broken")
    with pytest.raises(Refused, match=r"called misnamed .* found one called riddles"):
        load("misnamed")


def test_a_row_becomes_a_task_of_its_environment() -> None:
    task = admit(load("math"), {"question": "2 + 2?", "answer": 4, "difficulty": "low"})
    assert isinstance(task, MathTask)
    assert task.reference == "4"


def test_a_row_that_does_not_fit_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        Refused, match="expected a task of environment multiple_choice, found options: Field required"
    ) as refused:
        admit(load("multiple_choice"), {"question": "Which?", "answer": "A"})
    assert (refused.value.stage, refused.value.kind) == ("admission", "invalid_task")


def test_only_declared_fields_are_public() -> None:
    row = {"question": "2 + 2?", "answer": 4, "messages": [], "hint": "even", "expected_answer": "4"}
    assert public_view(load("math"), row) == {"question": "2 + 2?", "messages": []}
