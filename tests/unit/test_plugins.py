"""Classes of a user's own, by path: what is loaded, and the sentence for everything that cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollstream import harnesses
from rollstream.errors import Refused, UsageError
from rollstream.plugins import ENVIRONMENT_ATTRIBUTES, HARNESS_ATTRIBUTES, absolute, is_path, load_class, named_by_path
from rollstream.settings import Settings, load_settings
from services.agent_worker.harnesses import registry

PATIENT = """
from typing import ClassVar
from services.agent_worker.harnesses.chat import ChatHarness
class Patient(ChatHarness):
    name: ClassVar[str] = "patient"
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_name_is_no_path() -> None:
    assert [is_path(text) for text in ("math", "my_env", "a.py:B", "a/b.py:C", "a.py")] == [False, False, True, True, True]


@pytest.mark.parametrize("location", ["a.py", "a.py:", "a:B", "a.txt:B", ":B", "a.py:not a name"])
def test_another_form_is_refused(location: str) -> None:
    with pytest.raises(UsageError, match=r"expected path\.py:Class, found"):
        absolute(location)


def test_a_missing_file_or_class_or_method_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a Python file at .*nothing_here\.py, found none"):
        load_class(f"{tmp_path}/nothing_here.py:Thing", ())
    path = written(tmp_path, "half_an_environment.py", "class Half:\n    name = 'half'\n    version = '1'\n")
    with pytest.raises(UsageError, match=r"expected a class Whole in .*half_an_environment\.py, found Half"):
        load_class(f"{path}:Whole", ())
    with pytest.raises(UsageError, match=r"it lacks task_type, public_fields, success_threshold, seed, reference, verify"):
        load_class(f"{path}:Half", ENVIRONMENT_ATTRIBUTES)
    assert load_class(f"{path}:Half", ("name", "version")).name == "half"


def test_a_file_that_raises_or_shares_its_name_with_another_module_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "raises_at_import.py", "1 / 0\n")
    with pytest.raises(UsageError, match="cannot be imported: ZeroDivisionError"):
        load_class(f"{path}:Thing", ())
    path = written(tmp_path, "json.py", "class Thing: pass\n")
    with pytest.raises(UsageError, match=r"json\.py cannot be imported: that name is taken by .*; rename the file"):
        load_class(f"{path}:Thing", ())
    path = written(tmp_path, "not-a-module.py", "class Thing: pass\n")
    with pytest.raises(UsageError, match=r"its name is no module's name; rename the file"):
        load_class(f"{path}:Thing", ())


def test_a_class_without_a_name_cannot_be_given_by_path(tmp_path: Path) -> None:
    path = written(tmp_path, "nameless_plugin.py", "class Nameless: pass\n")
    with pytest.raises(UsageError, match="expected a class attribute `name` as text"):
        named_by_path(f"{path}:Nameless", ())


def test_a_declared_harness_is_known_to_the_worker_and_to_whoever_composes_a_run(tmp_path: Path) -> None:
    path = written(tmp_path, "patient_harness.py", PATIENT)
    assert named_by_path(f"{path}:Patient", HARNESS_ATTRIBUTES) == ("patient", f"{path}:Patient")
    settings = Settings.model_validate({"plugins": {"harnesses": {"patient": f"{path}:Patient"}}})
    try:
        registry.declare(settings)
        harnesses.declare(settings)
        assert registry.load("patient").name == "patient"
        assert harnesses.capabilities("patient").interactions == registry.load("patient").capabilities.interactions
        assert "patient" in harnesses.names()
    finally:
        registry.declare(Settings())
        harnesses.declare(Settings())
    with pytest.raises(Refused, match="found 'patient'"):
        harnesses.capabilities("patient")
    with pytest.raises(Refused, match="found 'patient'") as refused:
        registry.load("patient")
    assert refused.value.stage == "agent"


def test_what_one_process_declares_reaches_another_through_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_PLUGINS__ENVIRONMENTS", '{"mine": "/x/mine.py:Mine"}')
    assert load_settings().plugins.environments == {"mine": "/x/mine.py:Mine"}


def test_a_file_imports_its_neighbours_and_graders_find_it(tmp_path: Path) -> None:
    written(tmp_path, "my_neighbour.py", "WORD = 'hello'\n")
    path = written(tmp_path, "uses_a_neighbour.py", "import my_neighbour\nclass Thing:\n    word = my_neighbour.WORD\n")
    code = (
        "import pickle, sys, rollstream.plugins as p\n"
        f"thing = p.load_class({str(path) + ':Thing'!r}, ('word',))\n"
        "print(thing.word, thing.__module__, pickle.loads(pickle.dumps(thing)) is thing)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hello", "uses_a_neighbour", "True"]
