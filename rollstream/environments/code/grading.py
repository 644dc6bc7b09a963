"""From a log of tests to a grade, or to the sentence why it proves nothing. Pure.

A log that proves nothing is no zero: it is an invalid log, whose reward is null, and verification is tried again.

Source: SWE-bench's resolution rule (Jimenez et al., 2024, section 2) with the later harness's treatment of skipped tests.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollstream.environments.code.logs import LogParser, Status, Statuses, is_junk

EvalType = Literal["pass_and_fail", "fail_only"]

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code:"


class InvalidLog(Exception):
    """A log is no evidence of what the tests did; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """What the eval command did: its own output, and its own exit status."""

    __test__ = False

    output: str
    exit_code: int | None
    """Null if it is not known."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The tests of one list, by what became of them."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def rate(self) -> float:
        """1.0 for an empty list."""
        total = len(self.passed) + len(self.failed)
        return len(self.passed) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Grade:
    """What the tests say of a patch."""

    fail_to_pass: Tally
    pass_to_pass: Tally
    statuses: Mapping[str, Status]
    ignored: tuple[str, ...] = ()
    """Expected ids that are no tests."""
    unnamed: int = 0
    """Tests that passed, by the count of a runner that does not name them. Where ids are expected, they count for nothing."""

    @property
    def resolved(self) -> bool:
        proved = bool(self.fail_to_pass.passed) or self.unnamed > 0
        return proved and not self.fail_to_pass.failed and not self.pass_to_pass.failed


def mark(marker: str, word: str) -> str:
    """A marker that is one verification's own; SWE-bench's own without a word."""
    return f"{marker.removesuffix(':')} {word}{':' if marker.endswith(':') else ''}" if word else marker


def between_markers(log: str, word: str = "") -> TestRun:
    """The test run in the log of an eval script that marks where tests begin and end.

    What is printed before and after does not count. If markers are repeated, from the first to the last: whoever forges one can
    only add to what is read.

    Raises:
        InvalidLog: a marker is missing.
    """
    begin, end = log.find(mark(START, word)), log.rfind(mark(END, word))
    if begin < 0 or end < begin:
        raise InvalidLog(f"expected test output between {START!r} and {END!r}, found {'no end' if begin >= 0 else 'no start'}")
    # Only what stands behind the end was written after the tests; of several words, one that admits a failure counts.
    codes = [int(code) for code in re.compile(rf"{mark(EXIT_CODE, word)}\s*(-?\d{{1,9}})\b").findall(log, end)]
    return TestRun(log[begin + len(mark(START, word)) : end], next((code for code in codes if code), 0 if codes else None))


def read_run(run: TestRun, parser: LogParser) -> Statuses:
    """The status of every test that a run speaks of.

    Raises:
        InvalidLog: nothing says that tests ran, or what is said contradicts itself.
    """
    statuses = parser.statuses(run.output)
    if not statuses and not parser.ran.search(run.output):
        raise InvalidLog("expected evidence that tests ran, found none in their output")
    failures = sum(status in ("failed", "error") for status in statuses.values())
    if run.exit_code not in (None, 0) and not failures:
        raise InvalidLog(f"expected a failed test of a command that ended with {run.exit_code}, found none")
    most = parser.most_passed(run.output)
    passed = sum(status == "passed" for status in statuses.values())
    if most is not None and passed > most:
        raise InvalidLog(f"expected at most the {most} passed tests that the runner counts, found {passed}")
    return statuses


def grade(
    statuses: Statuses, fail_to_pass: Iterable[str], pass_to_pass: Iterable[str], *, eval_type: EvalType = "pass_and_fail"
) -> Grade:
    """Compare statuses with what is expected.

    An expected failure passes. A test that is absent fails, and so does a skipped one of FAIL_TO_PASS; one of PASS_TO_PASS that
    is skipped is no regression. With `fail_only`, for runners that tell of failures alone, only a test that failed fails.
    """
    wanted_f2p, wanted_p2p = list(dict.fromkeys(fail_to_pass)), list(dict.fromkeys(pass_to_pass))
    ignored = tuple(name for name in [*wanted_f2p, *wanted_p2p] if is_junk(name))
    return Grade(
        _tally(statuses, wanted_f2p, eval_type, skipped_passes=False),
        _tally(statuses, wanted_p2p, eval_type, skipped_passes=True),
        statuses,
        ignored,
    )


def grade_whole(statuses: Statuses, run: TestRun, parser: LogParser) -> Grade:
    """Where no tests are named: all that ran must pass, and one at least must have passed.

    Args:
        run: one that `read_run` has read, so it ended with 0 or speaks of a failure.
    """
    failed = tuple(name for name, status in statuses.items() if status in ("failed", "error"))
    passed = tuple(name for name, status in statuses.items() if status in ("passed", "xfail"))
    counted = parser.most_passed(run.output)
    if counted is None:
        counted = len(passed) or int(parser.ran.search(run.output) is not None)
    return Grade(Tally(passed, failed), Tally((), ()), statuses, unnamed=max(0, counted - len(passed)))


def _tally(statuses: Statuses, names: Iterable[str], eval_type: EvalType, *, skipped_passes: bool) -> Tally:
    passed: list[str] = []
    failed: list[str] = []
    for name in names:
        if not is_junk(name):
            status = status_of(name, statuses)
            (passed if _passes(status, eval_type, skipped_passes) else failed).append(name)
    return Tally(tuple(passed), tuple(failed))


def _passes(status: Status | None, eval_type: EvalType, skipped_passes: bool) -> bool:
    if eval_type == "fail_only":
        return status not in ("failed", "error")
    return status in ("passed", "xfail") or (status == "skipped" and skipped_passes)


def status_of(name: str, statuses: Statuses) -> Status | None:
    """The status of an expected test; None if it is absent.

    Published ids are cut at a space where a parameter has one (`test_x[a`): such a one stands for all that begin so, if they
    agree on whether they pass.
    """
    if name in statuses:
        return statuses[name]
    if name.count("[") <= name.count("]"):
        return None
    begun = [status for known, status in statuses.items() if known.startswith(name)]
    agree = len({status in ("passed", "xfail") for status in begun}) == 1
    return begun[0] if agree else None
