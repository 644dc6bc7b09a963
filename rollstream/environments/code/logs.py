"""What test runners print, as a status for each test. Pure, and total: any text gives some statuses, perhaps none.

A test that is told of twice has the worse of its statuses: what an agent's code prints can add a pass, but never take back
a failure.

Source: the log parsers of the SWE-bench harness (version 5), whose test ids the published instances use.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "xfail", "skipped", "failed", "error"]
Statuses = dict[str, Status]

WORD: dict[str, Status] = {
    "PASSED": "passed",
    "XFAIL": "xfail",
    "SKIPPED": "skipped",
    "FAILED": "failed",
    "ERROR": "error",
}
"""How pytest says it."""
BADNESS: dict[Status, int] = {"passed": 0, "xfail": 0, "skipped": 1, "failed": 2, "error": 2}

MAX_LINE = 2000

_COLOUR = re.compile(r"\x1b\[\d*(?:;\d+)*m")
_CONTROL = {code: None for code in range(32) if code not in (9, 10)}
_JUNK = re.compile(r"\[\s*\d*%?\]?|\d*%\]")
"""Ids that are none: `[100%]` of a progress line that was wrapped, `[3]` of a summary of skipped tests, and their pieces."""
_PYTEST_RAN = re.compile(r"(?m)^.{0,200}?\b\d{1,9} (?:passed|failed|errors?|skipped|xfailed|xpassed)\b.{0,200} in [\d.]+")
_PYTEST_PASSED = re.compile(r"\b(\d+) passed\b")
_UNITTEST_RAN = re.compile(r"(?m)^Ran ([1-9]\d*) tests? in [\d.]+")
_SYMPY_RAN = re.compile(r"(?m)^=+ tests finished: .*\d+ (?:passed|failed)|^=+ test process starts")


@dataclass(frozen=True, slots=True)
class LogParser:
    """How one runner's output is read.

    Attributes:
        ran: finds the runner's own word that tests ran; without any, a log is no evidence.
        most_passed: how many tests passed by the runner's own count, or None if it does not say.
    """

    parse: Callable[[str], Iterator[tuple[str, Status]]]
    ran: re.Pattern[str]
    most_passed: Callable[[str], int | None] = lambda log: None

    def statuses(self, log: str) -> Statuses:
        """Every test that the log speaks of."""
        found: Statuses = {}
        for name, status in self.parse(log):
            if name not in found or BADNESS[status] >= BADNESS[found[name]]:
                found[name] = status
        return found


def shortened(log: str) -> str:
    """A log whose long lines have lost their middle: no runner writes such, and patterns take their time over them."""
    lines = log.split("\n")
    half = MAX_LINE // 2
    return "\n".join(line if len(line) <= MAX_LINE else f"{line[:half]}…{line[-half:]}" for line in lines)


def is_junk(name: str) -> bool:
    """Whether an id is a piece of a progress line, which no test can be called."""
    return bool(_JUNK.fullmatch(name.strip()))


def _lines(log: str) -> Iterator[str]:
    for line in log.split("\n"):
        yield _COLOUR.sub("", line).translate(_CONTROL)


def _without_progress(line: str) -> str:
    """A line without the `[ 50%]` at its end."""
    line = line.rstrip()
    before, bracket, within = line.rpartition("[")
    return before.rstrip() if bracket and within.endswith("%]") and within[:-2].strip().isdecimal() else line


def _without_message(text: str) -> str:
    """An id without the ` - message` behind it: a dash between brackets belongs to the id."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth <= 0 and text.startswith(" - ", position):
            return text[:position]
    # Brackets that never close are the message's, not the id's.
    return text.split(" - ", 1)[0] if depth > 0 else text


def _pytest(log: str) -> Iterator[tuple[str, Status]]:
    """Short summaries (`PASSED id`, `FAILED id - message`) and lines of `-v` (`id PASSED [ 50%]`)."""
    for line in _lines(log):
        first, _, rest = line.partition(" ")
        if first in WORD:
            name = _without_message(rest.strip()) if first in ("FAILED", "ERROR", "XFAIL") else rest.strip()
            status = WORD[first]
        else:
            name, _, last = _without_progress(line).rpartition(" ")
            if last not in WORD or "::" not in name:
                continue
            status = WORD[last]
        # `SKIPPED [1] file.py:3: reason` counts tests and names none.
        if name and not is_junk(name) and not (status == "skipped" and name.startswith("[")):
            yield name.strip(), status


def _pytest_options(log: str) -> Iterator[tuple[str, Status]]:
    """As `_pytest`, with a parameter that is an absolute path cut to its last part: paths differ between machines."""
    for name, status in _pytest(log):
        main, bracket, option = name.partition("[")
        option = option.removesuffix("]")
        if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
            name = f"{main}[/{option.rsplit('/', 1)[-1]}]"
        yield name, status


def _matplotlib(log: str) -> Iterator[tuple[str, Status]]:
    """As `_pytest`, with members of an enum as older versions print them."""
    yield from _pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def _seaborn(log: str) -> Iterator[tuple[str, Status]]:
    """`FAILED id`, `PASSED id` and `id PASSED …`; ids hold no spaces."""
    for line in _lines(log):
        words = line.split()
        if len(words) < 2:
            continue
        if words[0] in ("FAILED", "PASSED") and not is_junk(words[1]):
            yield words[1], WORD[words[0]]
        elif words[1] in ("FAILED", "PASSED") and not is_junk(words[0]):
            yield words[0], WORD[words[1]]


_UNITTEST_ENDS: tuple[tuple[re.Pattern[str], Status], ...] = (
    (re.compile(r"\.\.\.\s+(?:ok|OK)$"), "passed"),
    (re.compile(r"\.\.\.\s+skipped\b.*$"), "skipped"),
    (re.compile(r"\.\.\.\s+FAIL$"), "failed"),
    (re.compile(r"\.\.\.\s+ERROR$"), "error"),
    (re.compile(r"\.\.\.\s+expected failure$"), "xfail"),
    (re.compile(r"\.\.\.\s+unexpected success$"), "failed"),
)
_HEADINGS: dict[str, Status] = {"FAIL:": "failed", "ERROR:": "error"}
_ENDINGS: dict[str, Status] = {"ok": "passed", "OK": "passed", "FAIL": "failed", "ERROR": "error"}


def _unittest(log: str) -> Iterator[tuple[str, Status]]:
    """`name ... ok` of `unittest -v`, also when the test printed something between the two; and the headings of failures.

    A heading `FAIL: test_x (module.Class)` is told under both names that lists use: whole, and its first word.
    """
    waiting = ""
    for raw in _lines(log):
        line = raw.strip()
        if (heading := line.split(" ", 1)[0]) in _HEADINGS and " " in line:
            name = line.split(" ", 1)[1].strip()
            yield name, _HEADINGS[heading]
            yield name.split()[0], _HEADINGS[heading]
            continue
        if ended := next(
            ((line[: m.start()].rstrip(), status) for end, status in _UNITTEST_ENDS if (m := end.search(line))), None
        ):
            yield ended
            waiting = ""
        elif " ... " in line or line.endswith(" ..."):
            waiting = line.split(" ...")[0]
        elif waiting and line in _ENDINGS:
            yield waiting, _ENDINGS[line]
            waiting = ""


_SITES = "Applying sites.0002_alter_domain_unique..."


def _django(log: str) -> Iterator[tuple[str, Status]]:
    """As `_unittest`, and what Django's own runner prints in between."""
    for name, status in _unittest(log):
        # A migration is told of on the line of the test that needs it.
        yield (name.split("...", 1)[-1].strip() if name.startswith(_SITES) else name), status
    if "--version is equivalent to version" in log:
        yield "--version is equivalent to version", "passed"


def _sympy(log: str) -> Iterator[tuple[str, Status]]:
    """`test_x ok`, `test_x F`, `test_x E`, and the headings `___ module.py:test_x ___` of failures."""
    ends: dict[str, Status] = {"ok": "passed", "F": "failed", "E": "error", "f": "xfail", "s": "skipped"}
    for line in _lines(log):
        words = line.split()
        if len(words) >= 2 and words[0].startswith("test_") and words[-1] in ends:
            yield words[0], ends[words[-1]]
        elif heading := re.fullmatch(r"_+ (\S+\.py:\S+) _+", line.strip()):
            yield heading[1], "failed"


def _pytest_count(log: str) -> int | None:
    """Sum of `N passed` over the closing lines of all runs in a log."""
    closing = [match.group() for match in _PYTEST_RAN.finditer("\n".join(_lines(log)))]
    if not closing:
        return None
    return sum(int(count) for line in closing for count in _PYTEST_PASSED.findall(line))


PARSERS: dict[str, LogParser] = {
    "pytest": LogParser(_pytest, _PYTEST_RAN, _pytest_count),
    "pytest_v2": LogParser(_pytest, _PYTEST_RAN, _pytest_count),
    "pytest_options": LogParser(_pytest_options, _PYTEST_RAN, _pytest_count),
    "matplotlib": LogParser(_matplotlib, _PYTEST_RAN, _pytest_count),
    "seaborn": LogParser(_seaborn, _PYTEST_RAN),
    "unittest": LogParser(_unittest, _UNITTEST_RAN),
    "django": LogParser(_django, _UNITTEST_RAN),
    "sympy": LogParser(_sympy, _SYMPY_RAN),
}
OF_REPOSITORY: dict[str, str] = {
    "astropy/astropy": "pytest_v2",
    "django/django": "django",
    "matplotlib/matplotlib": "matplotlib",
    "mwaskom/seaborn": "seaborn",
    "psf/requests": "pytest_options",
    "pydicom/pydicom": "pytest_options",
    "pylint-dev/pylint": "pytest_options",
    "scikit-learn/scikit-learn": "pytest_v2",
    "sphinx-doc/sphinx": "pytest_v2",
    "sympy/sympy": "sympy",
}
"""For instances that name no parser; any other repository has `pytest`."""
ALIASES: dict[str, str] = {
    **{f"parse_log_{name}": name for name in PARSERS},
    **{f"parse_log_{repository.rpartition('/')[2]}": name for repository, name in OF_REPOSITORY.items()},
    "parse_log_scikit": "pytest_v2",
    **{f"parse_log_{name}": "pytest" for name in ("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray")},
}
"""SWE-bench's names of the same."""


def parser_name(name: str | None, repository: str | None = None) -> str | None:
    """Our name of a parser that a row names, in our words or SWE-bench's; by its repository if it names none."""
    if not name:
        return OF_REPOSITORY.get(repository or "", "pytest")
    return name if name in PARSERS else ALIASES.get(name)
