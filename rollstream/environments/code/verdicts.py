"""What becomes of a patch, as a verdict. Pure; everything that an agent had a hand in is bounded.

`resolved` is the reward. `mask_sample` says that a verdict is no evidence, and is never true of one that has a reward: what
could not be verified is a failure that is tried again, and no verdict.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollstream.environments.code.grading import Grade, Tally
from rollstream.environments.code.logs import BADNESS, Status
from rollstream.environments.code.patches import Fault, Step
from rollstream.environments.protocol import ScoredVerdict, Verdict

MAX_TESTS_TOLD = 100
MAX_ID = 300


@dataclass(frozen=True, slots=True)
class Applied:
    """How a patch got into the tree.

    Attributes:
        step: of the ladder; None if the tree had it already.
        undone: files of tests and their runner that it changed, and that are as they were.
    """

    step: Step | None
    undone: Sequence[str] = ()

    @property
    def how(self) -> str:
        return "already" if self.step is None else f"{self.step.tool}{'' if self.step.ending == 'as_is' else ' with lf'}"


def of_fault(fault: Fault, size: int) -> Verdict:
    """A patch that is none, or may not be applied. No box was started for it."""
    return _verdict(False, {"patch_exists": fault != "empty", "error_kind": fault, "patch_bytes": size})


def of_refusal(why: str, size: int, said: str) -> Verdict:
    """A patch that fits into no tree, or leaves none that tests can stand in.

    Args:
        said: by the last tool that was tried.
    """
    return _verdict(False, {"patch_exists": True, "error_kind": why, "patch_bytes": size, "tool_said": said[-2000:]})


def of_grade(grade: Grade, applied: Applied, size: int, exit_code: int | None, log: Mapping[str, object]) -> Verdict:
    """Tests ran, and say what they say.

    Args:
        log: where it is kept.
    """
    diagnostics: dict[str, object] = {
        "patch_exists": True,
        "error_kind": None,
        "patch_bytes": size,
        "applied": applied.how,
        "undone": _told(applied.undone),
        "fail_to_pass": _tally(grade.fail_to_pass),
        "pass_to_pass": _tally(grade.pass_to_pass),
        "tests": _tests(grade.statuses),
        "tests_seen": len(grade.statuses) + grade.unnamed,
        "ignored_ids": _told(grade.ignored),
        "exit_code": exit_code,
        **log,
    }
    rates = {"fail_to_pass": grade.fail_to_pass.rate, "pass_to_pass": grade.pass_to_pass.rate}
    return _verdict(grade.resolved, diagnostics, rates)


def aggregated(verdicts: Iterable[ScoredVerdict]) -> Mapping[str, float]:
    """Shares of attempts that handed in no patch, and of those whose patch could not be tested."""
    total = empty = unfit = 0
    for verdict in verdicts:
        total += 1
        empty += verdict.diagnostics.get("patch_exists") is False
        unfit += verdict.diagnostics.get("patch_exists") is True and verdict.diagnostics.get("error_kind") is not None
    return {"patch_missing": empty / total, "patch_unfit": unfit / total}


def _verdict(resolved: bool, diagnostics: dict[str, object], components: Mapping[str, float] | None = None) -> Verdict:
    told = {"resolved": resolved, "mask_sample": False, "hermetic": True, **diagnostics}
    return Verdict(1.0 if resolved else 0.0, components=components or {}, diagnostics=told)


def _tally(tally: Tally) -> dict[str, object]:
    return {"passed": len(tally.passed), "failed": len(tally.failed), "failed_ids": _told(tally.failed)}


def _tests(statuses: Mapping[str, Status]) -> dict[str, Status]:
    """Statuses, the worst first, of no more tests than a record should hold."""
    worst_first = sorted(statuses.items(), key=lambda item: -BADNESS[item[1]])
    return {name[:MAX_ID]: status for name, status in worst_first[:MAX_TESTS_TOLD]}


def _told(names: Sequence[str]) -> list[str]:
    return [name[:MAX_ID] for name in names[:MAX_TESTS_TOLD]]
