"""Finding environments by name, and the door every row passes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.environments.math import MathTask
from rollstream.environments.multiple_choice import MultipleChoiceEnvironment
from rollstream.environments.registry import admit, declare, load, names, public_view
from rollstream.errors import Refused, UsageError
from rollstream.plugins import ENVIRONMENT_ENTRY_POINTS
from rollstream.settings import Settings


class Riddles(MultipleChoiceEnvironment):
    name = "riddles"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with three plug-ins: one that works, one that cannot be imported, one under another name than its own."""
    metadata = tmp_path / "plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    lines = [
        f"[{ENVIRONMENT_ENTRY_POINTS}]",
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
    with pytest.raises(Refused, match=r"expected environment misnamed .* found one called riddles"):
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


def declared(**environments: str) -> Settings:
    return Settings.model_validate({"plugins": {"environments": environments}})


@pytest.fixture
def _forgotten() -> Iterator[None]:
    yield
    declare(Settings())


@pytest.mark.usefixtures("_forgotten")
def test_a_declared_environment_is_loaded_from_its_file_and_forgotten_with_its_declaration(tmp_path: Path) -> None:
    file = tmp_path / "declared_riddles.py"
    file.write_text(
        "from rollstream.environments.multiple_choice import MultipleChoiceEnvironment\n"
        "class Declared(MultipleChoiceEnvironment):\n    name = 'declared'\n"
    )
    declare(declared(declared=f"{file}:Declared"))
    assert load("declared").name == "declared"
    assert load("declared") is load("declared")
    assert "declared" in names()
    declare(Settings())
    with pytest.raises(Refused, match="found 'declared'"):
        load("declared")


@pytest.mark.usefixtures("_forgotten")
def test_a_declared_name_is_free_and_its_class_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="environment math needs another name: rollstream ships one called math"):
        declare(declared(math="riddles.py:Riddles"))
    declare(declared(absent=f"{tmp_path}/absent.py:Thing"))
    with pytest.raises(Refused, match=r"environment absent cannot be loaded .* expected a Python file at .* found none"):
        load("absent")


@pytest.mark.usefixtures("_forgotten")
def test_a_path_that_a_record_names_is_never_loaded(tmp_path: Path) -> None:
    file = tmp_path / "evil.py"
    file.write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil:\n    name = 'evil'\n")
    with pytest.raises(Refused, match="expected one of the environments"):
        load(f"{file}:Evil")
    assert not (tmp_path / "ran").exists()
