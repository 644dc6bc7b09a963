r"""Mathematics with one final answer: GSM8K, MATH and NeMo Gym's `math_with_judge` rows, unmodified.

Two answers are compared as plain numbers where both are, else by math-verify in a process that can be killed. An answer that
keeps the grader busy past its deadline scores 0.0: it is the agent's own text, and the same text would always do so.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from rollstream.environments.answers import last_boxed, tail, unwrapped
from rollstream.environments.numerals import numeral, tidy
from rollstream.environments.protocol import Episode, GraderTimeout, ScoredVerdict, Seeded, Services, Task, Verdict
from rollstream.environments.symbolic import symbolically_equal
from schemas.session import Submission
from schemas.values import JsonObject, clean_text

INSTRUCTION = r"Put your final answer in \boxed{}."
MAX_REFERENCE = 2_000
MAX_WORDS = 8
"""Of a reference that is no number: `Tuesday` and `no real solution` are answers, a paragraph of working is not."""
MAX_FORMULA = 2_000
"""Longest answer that is compared: a final answer is a line, not a document."""

_STATEMENT = re.compile(r"\banswer\b[*_]{0,3}(?:\s[\w']{1,20}){0,4}?\s?(?:[:=]|\bis\b:?)[*_]{0,3}", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]?([^\n]{1,2000})")
_FORMULA = re.compile(r"(?<![\\$])\$([^$\n]{1,500})\$(?!\d)|\\\(([^\n]{1,500}?)\\\)|\\\[([^\n]{1,500}?)\\\]")
_NUMBER = re.compile(r"(?<![\w.])-?[$€£]?-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:/\d+(?![\d.]))?\s?%?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_ASSIGNED = re.compile(r"\\?[A-Za-z](?:_\{?\w{1,10}\}?)?(?:\([A-Za-z0-9]\))?\s?(?:=|\\approx|≈)\s?([^=,;<>]+)")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_LOOSE_SPACE = re.compile(r"(?<!\w) | (?!\w)")
_NO_ANSWER = frozenset({"nan", "inf", "-inf", "none", "null", "n/a", "unknown"})


@dataclass(frozen=True, slots=True)
class Found:
    """The final answer in an agent's message, and where it stood."""

    answer: str
    method: str


def final_answer(text: str) -> Found | None:
    r"""The last `\boxed{}`, else what follows the last "answer is" or `####`, else the last number or formula."""
    text = tail(text)
    if boxed := last_boxed(text):
        return Found(boxed, "boxed")
    statement, hashes = _last(_STATEMENT, text), _last(_HASHES, text)
    if hashes and hashes.group(1).strip() and (statement is None or hashes.start() > statement.start()):
        return Found(hashes.group(1).strip(), "hashes")
    if statement and (answer := _of_sentence(text[statement.end() :].lstrip(" \t\n*_").split("\n", 1)[0])):
        return Found(answer, "statement")
    number, formula = _last_number(text), _last(_FORMULA, text)
    if formula and (number is None or formula.end() >= number.end()):
        return Found(next(group for group in formula.groups() if group is not None).strip(), "last_formula")
    return Found(number.group().strip(), "last_number") if number else None


def compare(reference: str, answer: str) -> bool | None:
    """Whether two answers are equal, where that is certain without algebra; None where it is not."""
    reference, answer = _right_side(tidy(reference)), _right_side(tidy(answer))
    expected, found = numeral(reference), numeral(answer)
    if expected and found:
        return found.matches(expected)
    return True if _compact(reference) == _compact(answer) else None


def _of_sentence(line: str) -> str:
    """The answer in what follows "the answer is"."""
    end = _SENTENCE_END.search(line)
    sentence = (line[: end.start()] if end else line).strip(" *_")
    if numeral(sentence):
        return sentence
    if formula := _FORMULA.search(line):
        return next(group for group in formula.groups() if group is not None).strip()
    number = _last_number(sentence)
    return number.group().strip() if number and len(_WORD.findall(sentence)) > 2 else sentence


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def _last_number(text: str) -> re.Match[str] | None:
    return _last(_NUMBER, text)


def _compact(formula: str) -> str:
    """Without the spaces that mean nothing; one between two words or numbers does (`1 1/2` is not `11/2`)."""
    return _LOOSE_SPACE.sub("", formula)


def _right_side(formula: str) -> str:
    """`5` of `x = 5`."""
    assigned = _ASSIGNED.fullmatch(formula)
    return assigned.group(1).strip() if assigned else formula


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _reference_in(text: str) -> str:
    r"""The final answer in an answer field: GSM8K puts it after `####`, MATH into `\boxed{}`, most rows write nothing else."""
    return (last_boxed(text) or text.rsplit("####", 1)[-1]).strip()


class MathTask(Task):
    """A problem and its answer."""

    question: str | None = Field(default=None, validation_alias=AliasChoices("question", "problem"))
    answer: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        default=None, validation_alias=AliasChoices("expected_answer", "answer")
    )
    r"""The reference, alone, after the last `####`, or in the last `\boxed{}`."""
    solution: str | None = None
    r"""Worked out; read only where there is no answer, and only with `####` or `\boxed{}` in it."""

    @model_validator(mode="after")
    def _can_be_asked_and_graded(self) -> "MathTask":
        if not self.messages and not (self.question and self.question.strip()):
            raise ValueError("expected a question or messages, found neither")
        reference = self.reference
        if not reference or reference.casefold() in _NO_ANSWER:
            raise ValueError("expected answer to hold a number or an expression, found none")
        if len(reference) > MAX_REFERENCE or (numeral(reference) is None and len(_WORD.findall(tidy(reference))) > MAX_WORDS):
            raise ValueError("expected answer as a number or an expression (after ####, if there is working), found prose")
        if last_boxed(rf"\boxed{{{reference}}}") != reference or not re.search(r"\w|\\[a-z]", reference):
            raise ValueError("expected answer as a number or an expression with balanced braces, found something else")
        return self

    @property
    def reference(self) -> str:
        if self.answer is not None:
            return _reference_in(self.answer)
        solution = self.solution or ""
        return _reference_in(solution) if "####" in solution or last_boxed(solution) else ""


class MathEnvironment:
    """Single turn; reward 1.0 for an answer equal to the reference, else 0.0."""

    name: ClassVar[str] = "math"
    version: ClassVar[str] = "1"
    task_type = MathTask
    example: ClassVar[Mapping[str, object]] = {
        "question": "A crate holds 12 jars. How many jars do 7 crates hold?",
        "answer": "84",
    }
    public_fields: ClassVar[frozenset[str]] = frozenset({"question", "problem"})
    success_threshold: ClassVar[float] = 1.0

    def seed(self, task: MathTask) -> Seeded:
        if task.messages:
            return Seeded(messages=task.messages, tools=task.tools or [])
        return Seeded(messages=[{"role": "user", "content": f"{task.question}\n\n{INSTRUCTION}"}])

    def reference(self, task: MathTask) -> Submission:
        return Submission(text=rf"\boxed{{{task.reference}}}")

    async def verify(self, task: MathTask, episode: Episode, services: Services) -> Verdict:
        found = final_answer(episode.submission.text)
        if found is None:
            return Verdict(reward=0.0, diagnostics={"answer": None, "method": "none"})
        diagnostics: JsonObject = {"answer": clean_text(found.answer[:200]), "method": found.method}
        if len(found.answer) > MAX_FORMULA:
            return Verdict(reward=0.0, diagnostics=diagnostics | {"compared": "too_long"})
        equal = compare(task.reference, found.answer)
        if equal is not None:
            return Verdict(reward=float(equal), diagnostics=diagnostics | {"compared": "directly"})
        try:
            equal = await services.graders.run(symbolically_equal, unwrapped(task.reference), unwrapped(found.answer))
        except GraderTimeout:
            return Verdict(reward=0.0, diagnostics=diagnostics | {"grader": "timeout"})
        return Verdict(reward=float(equal), diagnostics=diagnostics | {"compared": "symbolically"})

    def aggregate_metrics(self, verdicts: Iterable[ScoredVerdict]) -> Mapping[str, float]:
        """How often no final answer was found: then a low score tells more of the format than of the mathematics."""
        told = Counter(verdict.diagnostics["answer"] is None for verdict in verdicts if "answer" in verdict.diagnostics)
        return {"unreadable": told[True] / told.total()} if told else {}
