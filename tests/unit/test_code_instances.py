"""SWE-bench instances: admitted as they are published, or refused with what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from rollstream.environments.code.instances import PUBLIC_FIELDS, SweBenchTask, image_of

TEST_PATCH = "--- a/tests/test_x.py\n+++ b/tests/test_x.py\n@@ -1 +1 @@\n-a\n+b\n"
ROW: dict[str, Any] = {
    "instance_id": "astropy__astropy-12907",
    "repo": "astropy/astropy",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "patch": "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "Modeling's `separability_matrix` does not compute separability correctly",
    "hints_text": "look at _cstack",
    "created_at": "2022-03-03T15:14:54Z",
    "version": "4.3",
    "FAIL_TO_PASS": '["tests/test_x.py::test_a[1 2]", "tests/test_x.py::test_b"]',
    "PASS_TO_PASS": '["tests/test_x.py::test_c"]',
    "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
    "difficulty": "15 min - 1 hour",
}


def admitted(**changes: Any) -> SweBenchTask:
    return SweBenchTask.model_validate({**ROW, **changes})


def test_a_published_row_is_admitted_unmodified() -> None:
    task = admitted()
    assert task.fail_to_pass == ("tests/test_x.py::test_a[1 2]", "tests/test_x.py::test_b")
    assert task.pass_to_pass == ("tests/test_x.py::test_c",)
    assert task.parser == "pytest_v2"
    assert task.image_name() == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"


def test_lists_and_newer_fields_are_admitted_too() -> None:
    task = admitted(FAIL_TO_PASS=["a"], PASS_TO_PASS=[], image="mine:1", log_parser="parse_log_django", eval_type="fail_only")
    assert (task.fail_to_pass, task.pass_to_pass, task.image_name(), task.parser) == (("a",), (), "mine:1", "django")


def test_it_survives_its_ticket() -> None:
    task = admitted()
    assert SweBenchTask.model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS names no test"),
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS names no test"),
        ({"FAIL_TO_PASS": '["[100%]"]'}, "FAIL_TO_PASS names no test"),
        ({"FAIL_TO_PASS": "test_a, test_b"}, "JSON text"),
        ({"FAIL_TO_PASS": [1]}, "list of test ids"),
        ({"log_parser": "parse_log_cobol"}, "log_parser is none of"),
        ({"test_patch": "edit the tests"}, "test_patch is no diff"),
        ({"test_patch": TEST_PATCH.replace("tests/", "../")}, "test_patch is no diff"),
        ({"base_commit": "HEAD; rm -rf /"}, "base_commit"),
        ({"instance_id": "a/../b"}, "instance_id"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"eval_type": "by_vibes"}, "eval_type"),
    ],
)
def test_what_cannot_be_graded_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words.replace("[", r"\[")):
        admitted(**changes)


def test_what_grades_is_private() -> None:
    grading = {"patch", "test_patch", "hints_text", "FAIL_TO_PASS", "PASS_TO_PASS", "eval_script", "log_parser"}
    assert not PUBLIC_FIELDS & grading


def test_an_image_template_of_ones_own_is_filled_in() -> None:
    assert image_of("Org__Repo-1", "registry/{id}:x") == "registry/org_1776_repo-1:x"
    assert image_of("Org__Repo-1", "registry/{instance_id}") == "registry/Org__Repo-1"
    with pytest.raises(ValueError, match="image template"):
        image_of("x", "registry/{name}")


@given(
    st.lists(st.text(min_size=1), min_size=1).filter(lambda names: any("[" not in name and "%" not in name for name in names))
)
def test_a_list_and_its_json_are_the_same(names: list[str]) -> None:
    assert admitted(FAIL_TO_PASS=names).fail_to_pass == admitted(FAIL_TO_PASS=json.dumps(names)).fail_to_pass == tuple(names)
