"""Scripts that run tests, with real shells: the log between markers, and the status with which the tests ended."""

import subprocess
import time

import pytest

from rollstream.environments.code.commands import directives, test_command
from rollstream.environments.code.evaluation import Evaluation
from rollstream.environments.code.grading import END, EXIT_CODE, START, InvalidLog, TestRun, mark
from rollstream.environments.code.logs import PARSERS, shortened

test_command.__test__ = False  # type: ignore[attr-defined]
WORD = "5f1c7e0a9d"
SCRIPT = """#!/bin/bash
set -uxo pipefail
cat <<'EOF'
a test patch
EOF
: '>>>>> Start Test Output'
echo "PASSED t.py::a"; ( exit 3 )
: '>>>>> End Test Output'
git checkout nothing here
"""


def run(evaluation: Evaluation) -> TestRun:
    argv = [evaluation.shell, "-c", evaluation.script(WORD)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return evaluation.read(done.stdout, done.returncode, WORD)


def test_what_is_said_between_the_markers_counts_on_both_streams() -> None:
    found = run(Evaluation("echo to stdout; echo to stderr >&2; exit_with() { return 4; }; exit_with", 1, "echo before"))
    assert found.output.split() == ["to", "stdout", "to", "stderr"]
    assert found.exit_code == 4


def test_a_script_of_swe_bench_tells_the_status_of_its_test_command() -> None:
    found = run(Evaluation(SCRIPT, 1, shell="bash", is_script=True))
    assert "PASSED t.py::a" in found.output
    assert "a test patch" not in found.output
    assert found.exit_code == 3


@pytest.mark.parametrize(
    "forged",
    [
        "echo '>>>>> End Test Output'; echo '>>>>> Test Exit Code: 0'; exit 1",
        "echo '>>>>> End Test Output'; kill -9 $$",
        "exec true",
    ],
)
def test_what_ends_the_shell_is_no_evidence(forged: str) -> None:
    with pytest.raises(InvalidLog):
        run(Evaluation(f"echo PASSED t.py::a; {forged}", 1))


def test_knowing_the_word_does_not_help_against_the_status_of_the_shell() -> None:
    told = f"printf '>>>>> End Test Output {WORD}\\n>>>>> Test Exit Code {WORD}: 0\\n'; exit 7"
    with pytest.raises(InvalidLog, match="expected tests that ended as their shell did, with 7, found 0"):
        run(Evaluation(told, 1))


def test_tests_are_named_as_the_repository_runs_them() -> None:
    paths = ["tests/admin/test_x.py", "tests/admin/models.py", "docs/x.txt", "it's.py"]
    assert directives("django/django", paths) == ["admin.test_x"]
    assert test_command("psf/requests", "2.0", paths[:1]) == "pytest -rA 'tests/admin/test_x.py'"
    assert test_command("x/y", "", paths[3:]) == "pytest -rA 'it'\\''s.py'"
    assert test_command("django/django", "1.9", []) == "./tests/runtests.py --verbosity 2"
    assert test_command("astropy/astropy", "1.3", []).endswith("--tb=no")


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("line", [" ", "[", "1 passed in ", "PASSED ", "... ", "=", "9", "::"])
def test_a_line_without_an_end_is_read_in_bounded_time(parser: str, line: str) -> None:
    said = line * (1_000_000 // len(line))
    log = f"{mark(START, WORD)}\n{said}\n1 passed in 0.1s\n{mark(END, WORD)}\n{mark(EXIT_CODE, WORD)} 0\n"
    started = time.monotonic()
    found = Evaluation("true", 1).read(log, 0, WORD)
    PARSERS[parser].statuses(found.output)
    PARSERS[parser].ran.search(found.output)
    PARSERS[parser].most_passed(found.output)
    assert time.monotonic() - started < 5


def test_what_stands_at_both_ends_of_a_long_line_is_kept() -> None:
    cut = shortened("PASSED t.py::a" + "x" * 100_000 + "t.py::b PASSED\nnext")
    assert cut.startswith("PASSED t.py::a")
    assert cut.endswith("t.py::b PASSED\nnext")
    assert len(cut) < 2_100
