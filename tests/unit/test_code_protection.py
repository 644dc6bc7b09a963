"""Which changes of an agent are undone before tests run."""

import pytest

from rollstream.environments.code.protection import TESTS, is_protected, protected, shadows

TOPS = ("lib", "setup.py", "packaging", "test")


@pytest.mark.parametrize(
    "path", ["tests/test_a.py", "lib/conftest.py", "lib/tests/data.json", "lib/test_x.py", "x_test.py", "pytest.ini", "json.py"]
)
def test_tests_and_what_runs_them_are_protected(path: str) -> None:
    assert is_protected(path, TESTS, TOPS)


@pytest.mark.parametrize("path", ["lib/a.py", "lib/testing.py", "lib/json.py", "contest.py", "setup.cfg", "README"])
def test_the_rest_is_the_agents(path: str) -> None:
    assert not is_protected(path, TESTS, TOPS)


@pytest.mark.parametrize(
    ("path", "does"),
    [
        ("pytest.py", True), ("_pytest/x.py", True), ("json/x.py", True), ("sitecustomize.py", True), ("os.so", True),
        ("test/x.py", False), ("lib/json.py", False), ("json.txt", False), ("random", False), ("", False),
    ],
)  # fmt: skip
def test_new_modules_of_pythons_own_names_shadow_them(path: str, does: bool) -> None:
    assert shadows(path, TOPS) is does


def test_what_the_repository_has_already_is_its_own() -> None:
    assert protected(["packaging/version.py", "types.py"], (), ("packaging", "types.py")) == ()


def test_a_path_counts_with_and_without_its_first_directory() -> None:
    assert protected(["whatever/conftest.py", "x/pytest.py"], TESTS, TOPS) == (
        "whatever/conftest.py",
        "conftest.py",
        "pytest.py",
    )
