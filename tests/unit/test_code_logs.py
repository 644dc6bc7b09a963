"""Logs of test runners: what each says, and that nothing printed can take back a failure."""

import pytest
from hypothesis import given, strategies as st

from rollstream.environments.code.logs import BADNESS, PARSERS, WORD, is_junk, parser_name

PYTEST = """\
============================= test session starts ==============================
tests/test_a.py::test_one PASSED                                         [ 25%]
tests/test_a.py::test_two[x y] FAILED                                    [ 50%]
\x1b[31mFAILED\x1b[0m tests/test_b.py::test_red[a - b] - AssertionError: assert 1 == 2 - 3
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_spaces[a b (c)]
XFAIL tests/test_a.py::test_known - bug 12
SKIPPED [3] tests/test_a.py:9: not on this machine
ERROR tests/test_c.py::test_set_up - RuntimeError: no [brackets
FAILED tests/test_a.py::test_two[x y] - assert [1] == [2]
PASSED [100%]
PASSED
not a status
=================== 2 failed, 2 passed, 3 skipped in 0.12s ====================
"""


@pytest.mark.parametrize("name", ["pytest", "pytest_v2", "parse_log_flask", "parse_log_sphinx"])
def test_pytest(name: str) -> None:
    assert PARSERS[parser_name(name) or ""].statuses(PYTEST) == {
        "tests/test_a.py::test_one": "passed",
        "tests/test_a.py::test_two[x y]": "failed",
        "tests/test_b.py::test_red[a - b]": "failed",
        "tests/test_a.py::test_spaces[a b (c)]": "passed",
        "tests/test_a.py::test_known": "xfail",
        "tests/test_c.py::test_set_up": "error",
    }


def test_pytest_with_options_that_are_paths() -> None:
    log = (
        "PASSED t.py::test_x[/tmp/of-me/0/data.txt]\nPASSED t.py::test_x[//a/b]\nPASSED t.py::test_x[/a/*]\nPASSED t.py::y[a/b]"
    )
    assert list(PARSERS["pytest_options"].statuses(log)) == [
        "t.py::test_x[/data.txt]", "t.py::test_x[//a/b]", "t.py::test_x[/a/*]", "t.py::y[a/b]",
    ]  # fmt: skip


def test_matplotlib_prints_members_of_an_enum() -> None:
    assert PARSERS["matplotlib"].statuses("PASSED t.py::x[MouseButton.LEFT]") == {"t.py::x[1]": "passed"}


DJANGO = """\
test_plain (a.tests.Plain) ... ok
test_two_spaces (a.tests.Plain) ...  OK
test_skipped (a.tests.Plain) ... skipped 'no database'
test_red (a.tests.Plain) ... FAIL
test_broken (a.tests.Plain) ... ERROR
test_known (a.tests.Plain) ... expected failure
A docstring that is the name of a test ... ok
test_noisy (a.tests.Plain) ... Testing against Django installed in '/testbed' silenced.
ok
Applying sites.0002_alter_domain_unique...test_no_migrations (a.tests.M) ... ok
======================================================================
FAIL: test_heading (a.tests.Plain)
----------------------------------------------------------------------
Ran 9 tests in 0.003s

FAILED (failures=1)
"""


def test_django() -> None:
    assert PARSERS["django"].statuses(DJANGO) == {
        "test_plain (a.tests.Plain)": "passed",
        "test_two_spaces (a.tests.Plain)": "passed",
        "test_skipped (a.tests.Plain)": "skipped",
        "test_red (a.tests.Plain)": "failed",
        "test_broken (a.tests.Plain)": "error",
        "test_known (a.tests.Plain)": "xfail",
        "A docstring that is the name of a test": "passed",
        "test_noisy (a.tests.Plain)": "passed",
        "test_no_migrations (a.tests.M)": "passed",
        "test_heading (a.tests.Plain)": "failed",
        "test_heading": "failed",
    }


def test_unittest_says_that_tests_ran_only_if_one_did() -> None:
    assert PARSERS["unittest"].ran.search(DJANGO)
    assert not PARSERS["unittest"].ran.search("Ran 0 tests in 0.000s\n\nOK")


def test_seaborn() -> None:
    log = "tests/a.py::x PASSED [ 10%]\nPASSED tests/a.py::y\nFAILED tests/a.py::x - boom\nPASSED [100%]\none"
    assert PARSERS["seaborn"].statuses(log) == {"tests/a.py::x": "failed", "tests/a.py::y": "passed"}


def test_sympy() -> None:
    log = "test_good ok\ntest_bad F\ntest_broken E\ntest_known f\n___ sympy/core/tests/test_x.py:test_bad ___\nother ok"
    assert PARSERS["sympy"].statuses(log) == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_broken": "error",
        "test_known": "xfail",
        "sympy/core/tests/test_x.py:test_bad": "failed",
    }


@pytest.mark.parametrize("junk", ["[100%]", "[ 50%]", "[3]", "[", "50%]", "[100"])
def test_pieces_of_progress_are_no_tests(junk: str) -> None:
    assert is_junk(junk)


@pytest.mark.parametrize("name", ["test_x[1]", "a.py::t", "[a]", "100"])
def test_tests_are_no_pieces_of_progress(name: str) -> None:
    assert not is_junk(name)


def test_parsers_are_found_by_either_name_or_by_repository() -> None:
    assert parser_name("parse_log_django") == "django"
    assert parser_name(None, "sympy/sympy") == "sympy"
    assert parser_name("", "somebody/else") == "pytest"
    assert parser_name("parse_log_cargo") is None


@given(st.sampled_from(sorted(PARSERS)), st.text(max_size=400))
def test_any_text_can_be_read(name: str, log: str) -> None:
    for status in PARSERS[name].statuses(log).values():
        assert status in BADNESS


LINES = st.lists(
    st.builds(lambda word, name: f"{word} t.py::{name}", st.sampled_from(sorted(WORD)), st.sampled_from(["a", "b", "c[x y]"])),
    max_size=12,
)


@given(LINES, LINES, st.sampled_from(["pytest", "pytest_options"]))
def test_lines_that_are_added_never_make_a_failed_test_pass(honest: list[str], forged: list[str], name: str) -> None:
    before = PARSERS[name].statuses("\n".join(honest))
    for log in ([*honest, *forged], [*forged, *honest]):
        after = PARSERS[name].statuses("\n".join(log))
        for test, status in before.items():
            assert BADNESS[after[test]] >= BADNESS[status]


@given(
    st.text(st.characters(codec="ascii", exclude_characters="[]", categories=["L", "N", "P", "Zs"]), min_size=1).map(str.strip)
)
def test_a_parameter_of_any_kind_stays_in_its_id(parameter: str) -> None:
    name = f"t.py::test_x[{parameter}]"
    assert PARSERS["pytest"].statuses(f"FAILED {name} - AssertionError: a - [b]") == {name: "failed"}
    assert PARSERS["pytest"].statuses(f"PASSED {name}") == {name: "passed"}
