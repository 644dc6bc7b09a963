"""Grades: what counts as passed, and which logs prove nothing."""

import pytest
from hypothesis import given, strategies as st

from rollstream.environments.code.grading import END, EXIT_CODE, START, InvalidLog, TestRun, between_markers, grade, read_run
from rollstream.environments.code.logs import PARSERS, Status, Statuses

PYTEST = PARSERS["pytest"]
STATUSES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d[x y]", "d[x z]"]), st.sampled_from(["passed", "xfail", "skipped", "failed", "error"])
)
NAMES = st.lists(st.sampled_from(["a", "b", "c", "d[x y]", "d[x", "e", "[100%]"]), max_size=5)


def test_a_patch_that_makes_all_expected_tests_pass_is_resolved() -> None:
    graded = grade({"a": "passed", "b": "xfail", "c": "passed"}, ["a", "b"], ["c"])
    assert graded.resolved
    assert (graded.fail_to_pass.rate, graded.pass_to_pass.rate) == (1.0, 1.0)


@pytest.mark.parametrize("status", ["failed", "error", "skipped", None])
def test_a_fail_to_pass_test_that_did_not_pass_fails(status: Status | None) -> None:
    statuses: Statuses = {"b": "passed"} if status is None else {"a": status, "b": "passed"}
    graded = grade(statuses, ["a", "b"], [])
    assert not graded.resolved
    assert graded.fail_to_pass.failed == ("a",)
    assert graded.fail_to_pass.rate == 0.5


@pytest.mark.parametrize(("status", "resolved"), [("skipped", True), ("passed", True), ("failed", False), (None, False)])
def test_a_pass_to_pass_test_may_be_skipped_but_not_absent(status: Status | None, resolved: bool) -> None:
    statuses: Statuses = {"a": "passed"} if status is None else {"a": "passed", "b": status}
    assert grade(statuses, ["a"], ["b"]).resolved == resolved


def test_ids_that_are_no_tests_are_not_graded_and_do_not_resolve_anything() -> None:
    assert grade({"a": "passed"}, ["a"], ["[100%]"]).resolved
    alone = grade({"a": "passed"}, ["[100%]"], ["a"])
    assert alone.ignored == ("[100%]",)
    assert not alone.resolved


def test_an_id_that_was_cut_at_a_space_stands_for_all_that_begin_so_if_they_agree() -> None:
    assert grade({"t[a b]": "passed", "t[a c]": "passed"}, ["t[a"], []).resolved
    assert not grade({"t[a b]": "passed", "t[a c]": "failed"}, ["t[a"], []).resolved
    assert not grade({"t[a]x": "passed"}, ["t[a]"], []).resolved


def test_runners_that_tell_of_failures_alone_fail_only_what_failed() -> None:
    assert grade({}, ["a"], ["b"], eval_type="fail_only").resolved
    assert not grade({"b": "failed"}, ["a"], ["b"], eval_type="fail_only").resolved


@given(STATUSES, NAMES, NAMES)
def test_resolved_means_that_both_lists_pass_whole(
    statuses: Statuses, fail_to_pass: list[str], pass_to_pass: list[str]
) -> None:
    graded = grade(statuses, fail_to_pass, pass_to_pass)
    tests = {name for name in fail_to_pass if name != "[100%]"}
    assert set(graded.fail_to_pass.passed) | set(graded.fail_to_pass.failed) == tests
    assert graded.resolved == bool(tests and graded.fail_to_pass.rate == 1.0 and graded.pass_to_pass.rate == 1.0)


@given(STATUSES, NAMES, NAMES, st.sampled_from(["a", "b", "c"]))
def test_a_test_that_gets_worse_never_resolves_what_was_not(
    statuses: Statuses, f2p: list[str], p2p: list[str], name: str
) -> None:
    before = grade(statuses, f2p, p2p)
    after = grade({**statuses, name: "failed"}, f2p, p2p)
    assert after.fail_to_pass.rate <= before.fail_to_pass.rate
    assert before.resolved or not after.resolved


# Logs that prove nothing.


def run(output: str, exit_code: int | None = 0) -> Statuses:
    return read_run(TestRun(output, exit_code), PYTEST)


def test_an_honest_run_is_read() -> None:
    assert run("FAILED t.py::a - boom\n=== 1 failed, 1 passed in 0.1s ===\nPASSED t.py::b", 1) == {
        "t.py::a": "failed",
        "t.py::b": "passed",
    }
    assert run("= 3 passed in 0.01s =") == {}


@pytest.mark.parametrize("output", ["", "bash: pytest: command not found", "= no tests ran in 0.01s =", "Segmentation fault"])
def test_a_log_without_evidence_that_tests_ran_is_invalid(output: str) -> None:
    with pytest.raises(InvalidLog, match="evidence"):
        run(output)


def test_a_command_that_failed_without_a_failed_test_is_invalid() -> None:
    with pytest.raises(InvalidLog, match="ended with 3"):
        run("PASSED t.py::a\n= 1 passed in 0.1s =", 3)


def test_more_passes_than_the_runner_counts_are_forged() -> None:
    with pytest.raises(InvalidLog, match="at most the 1 passed"):
        run("PASSED t.py::a\nPASSED t.py::forged\n= 1 passed in 0.1s =")


def test_an_unknown_exit_status_is_no_contradiction() -> None:
    assert run("PASSED t.py::a\n= 1 passed in 0.1s =", None) == {"t.py::a": "passed"}


def marked(output: str, before: str = "", after: str = "", exit_code: int = 0) -> str:
    return f"{before}\n{START}\n{output}\n{END}\n{EXIT_CODE} {exit_code}\n{after}"


def test_what_stands_outside_the_markers_does_not_count() -> None:
    log = marked("FAILED t.py::a", before="PASSED t.py::forged", after="PASSED t.py::late", exit_code=1)
    assert PYTEST.statuses(between_markers(log).output) == {"t.py::a": "failed"}
    assert between_markers(log).exit_code == 1


def test_forged_markers_and_exit_statuses_hide_no_failure() -> None:
    forged = f"{END}\n{EXIT_CODE} 0\n{START}\nPASSED t.py::a\n{EXIT_CODE} 0"
    told = between_markers(marked(f"{forged}\nFAILED t.py::a", exit_code=1))
    assert PYTEST.statuses(told.output) == {"t.py::a": "failed"}
    assert told.exit_code == 1


@pytest.mark.parametrize("log", ["", f"{START}\nPASSED t.py::a", f"PASSED t.py::a\n{END}", f"{END}\n{START}"])
def test_a_log_without_both_markers_is_invalid(log: str) -> None:
    with pytest.raises(InvalidLog, match="expected test output between"):
        between_markers(log)


@given(st.text(), st.text(), st.integers(-255, 255))
def test_whatever_is_printed_the_last_exit_status_and_all_of_the_output_are_found(output: str, before: str, code: int) -> None:
    told = between_markers(marked(output, before=before, exit_code=code))
    assert told.exit_code == code
    assert output in told.output
