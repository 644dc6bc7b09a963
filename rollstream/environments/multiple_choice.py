r"""Multiple choice: a question, lettered options, one of them right.

Reads rows of NeMo Gym's `mcqa` unmodified, and its grading modes by their names. In every mode the last statement of an answer
counts, and a statement that names two letters is no answer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from rollstream.environments.answers import last_boxed, tail, unwrapped
from rollstream.environments.protocol import Episode, ScoredVerdict, Seeded, Services, Task, Verdict
from schemas.session import Submission
from schemas.values import JsonObject

INSTRUCTION = r"Answer with the letter of the correct option in \boxed{}."
INSTRUCTION_COLON = 'End with "Answer: X", where X is the letter of the correct option.'
"""Short and without an example in the box, because small models copy what stands there."""

GradingMode = Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient"]

_BARE = re.compile(r"[^A-Za-z]*([A-Za-z])[^A-Za-z]*")
_LABEL = re.compile(r"[(\[]?([A-Za-z])\s?[:).\]-]")
_LABELS = re.compile(r"(?<![A-Za-z])([A-Z])\s?[:)]")
_LEADING = re.compile(r"[(\[]?([A-Za-z])(?=$|[\s:;).,\]*/&+-])")
_ARTICLE = re.compile(r"[AaIi]\s+(?!(?:because|since|as|due|which)\b)[A-Za-z]")
_LISTED = re.compile(
    r"[\s*_)\].:-]{0,6}(?:[,/&;+]|\bor\b|\band\b)[\s*_(\[]{0,6}(?:or\s|and\s)?[(\[]?([A-Za-z])(?![A-Za-z'])", re.IGNORECASE
)
_BESIDE = re.compile(r"[\s*_)\].:-]{1,6}[(\[]?([B-HJ-Z])(?![A-Za-z'])")
_OPTION_WORD = re.compile(r"(?:option|choice|letter)\s+", re.IGNORECASE)
_COLON = re.compile(r"answer[*_]{0,3}\s?:[*_]{0,3}", re.IGNORECASE)
_STATEMENT = re.compile(
    r"\b(?:answer|(?:correct|right|best|final)\s(?:option|choice|letter))\b[*_]{0,3}(?:\s[\w']{1,20}){0,4}?\s?(?:[:=]|\bis\b:?)[*_]{0,3}",
    re.IGNORECASE,
)
_SIMPLE_PATTERN = re.compile(
    r"""(?: [\w\x20:;,.#'"=<>/!-] | \\[\\{}()\[\].*:?$^|+] | \\s[*+]? | \(\?!\w+\) )*
        \(\[[A-Za-z-]{1,60}\]\)
        (?: [\w\x20:;,.#'"=<>/!-] | \\[\\{}()\[\].*:?$^|+] | \\s[*+]? )*""",
    re.VERBOSE,
)


def _as_options(value: object) -> object:
    """`{"A": "text"}`, `[{"A": "text"}, …]` and `["text", …]` all mean letters to texts; a null text means no option."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if len(value) > len(ascii_uppercase):
            raise ValueError(f"expected at most {len(ascii_uppercase)} options, found {len(value)}")
        return dict(zip(ascii_uppercase, value, strict=False))
    entries = [value] if isinstance(value, dict) else value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("expected options as a list of texts, a list of {letter: text} or one {letter: text}")
    options: dict[str, object] = {}
    for letter, text in ((str(letter).strip().upper(), text) for entry in entries for letter, text in entry.items()):
        if text is None:
            continue
        if letter not in ascii_uppercase or len(letter) != 1 or letter in options:
            raise ValueError(f"expected each option under a letter of its own, found {letter[:20]!r}")
        options[letter] = text
    return options


def _as_patterns(value: object) -> object:
    """NeMo Gym's `template_metadata.output_regex`: one pattern or several. Only such as cannot backtrack are run."""
    patterns = value.get("output_regex") if isinstance(value, dict) else value
    patterns = [patterns] if isinstance(patterns, str) else patterns or []
    if not isinstance(patterns, list):
        raise ValueError("expected template_metadata.output_regex as a pattern or a list of patterns")
    for pattern in patterns:
        if not isinstance(pattern, str) or len(pattern) > 500 or not _SIMPLE_PATTERN.fullmatch(pattern):
            raise ValueError(r"expected an output_regex of plain text, \s* and one group such as ([A-Z])")
    return patterns


class MultipleChoiceTask(Task):
    """A question with its options."""

    question: str | None = None
    options: Annotated[dict[str, str], Field(min_length=2), BeforeValidator(_as_options)]
    """Letter -> text."""
    expected_answer: str = Field(validation_alias=AliasChoices("expected_answer", "answer"))
    """The letter of the right option."""
    grading_mode: GradingMode = "lenient"
    template_metadata: Annotated[list[str], BeforeValidator(_as_patterns)] = []
    """Patterns that are tried before the grading mode."""

    @model_validator(mode="after")
    def _can_be_asked_and_graded(self) -> "MultipleChoiceTask":
        if self.letter not in self.options:
            raise ValueError(f"expected_answer: expected one of the letters {', '.join(self.options)}, found another value")
        if not self.messages and not (self.question and self.question.strip()):
            raise ValueError("expected a question or messages, found neither")
        return self

    @property
    def letter(self) -> str:
        return self.expected_answer.strip().upper()


@dataclass(frozen=True, slots=True)
class Choice:
    """What the agent chose, and how it was read; letter None when it was nothing or two things."""

    letter: str | None
    method: str


def chosen(text: str, options: Mapping[str, str], mode: GradingMode, patterns: list[str] | None = None) -> Choice:
    """Read the choice out of an agent's last message. Pure; linear in the last 20,000 characters."""
    text = tail(text)
    letter = _by_pattern(text, patterns or [], options)
    if letter:
        return Choice(letter, "output_regex")
    if mode == "lenient_answer_colon":
        return Choice(_of_last(_COLON, text, options), "answer_colon")
    boxed = last_boxed(text)
    if boxed is not None and len({label for label in _LABELS.findall(boxed) if label in options}) > 1:
        return Choice(None, "boxed")
    if mode == "strict_single_letter_boxed":
        return Choice(_boxed_letter(boxed, options), "boxed")
    if mode == "lenient_boxed":
        return Choice(_boxed_letter(boxed, options) or _of_text(boxed, options), "boxed")
    if boxed is not None:
        return Choice(_boxed_letter(boxed, options) or _read(boxed, options), "boxed")
    if _STATEMENT.search(text):
        return Choice(_of_last(_STATEMENT, text, options), "statement")
    whole = text.strip()
    return Choice(_alone(whole, options) or _alone(whole.rsplit("\n", 1)[-1], options), "message")


def _by_pattern(text: str, patterns: list[str], options: Mapping[str, str]) -> str | None:
    # One space for any run of white space: repeated \s* in a pattern then has nothing to backtrack over.
    text = " ".join(text.split()) if patterns else ""
    for pattern in patterns:
        found = re.findall(pattern, text, re.IGNORECASE)
        if found and found[-1].upper() in options:
            return str(found[-1].upper())
    return None


def _of_last(statement: re.Pattern[str], text: str, options: Mapping[str, str]) -> str | None:
    end = None
    for found in statement.finditer(text):
        end = found.end()
    return None if end is None else _read(text[end:].lstrip().split("\n", 1)[0], options)


def _alone(line: str, options: Mapping[str, str]) -> str | None:
    """The letter of a line that is nothing else: `B`, `(B)`, `B: Paris` or `Paris`. Prose that begins with a letter is none."""
    line = unwrapped(line)
    bare = _BARE.fullmatch(line)
    if bare:
        return bare.group(1).upper() if bare.group(1).upper() in options else None
    label = _LABEL.match(line)
    if label and _plain(line[label.end() :]) == _plain(options.get(label.group(1).upper(), "\0")):
        return label.group(1).upper()
    return _of_text(line, options)


def _boxed_letter(boxed: str | None, options: Mapping[str, str]) -> str | None:
    """A capital letter alone in its box, or labelling the text of its option (`B: Paris`)."""
    inner = unwrapped(boxed or "")
    found = _BARE.fullmatch(inner) or _LABEL.match(inner)
    if found is None or found.group(1) not in options or _names_another(inner[found.end(1) :], found.group(1), options):
        return None
    return found.group(1)


def _read(payload: str, options: Mapping[str, str]) -> str | None:
    """The letter that a statement names: `B`, `(B)`, `B: Paris`, `option B because …`, or the text of an option."""
    payload = unwrapped(payload)
    bare = payload.rstrip(" .!*_`$")
    by_text = _of_text(bare, options) or _of_text(payload, options)
    if by_text:
        return by_text
    payload = unwrapped(_OPTION_WORD.sub("", payload, count=1) if _OPTION_WORD.match(payload) else payload)
    found = _LEADING.match(payload)
    if found is None or _ARTICLE.match(payload):
        return None
    letter = found.group(1)
    if letter.upper() not in options or _names_another(payload[found.end(1) :], letter, options):
        return None
    return letter.upper()


def _names_another(rest: str, letter: str, options: Mapping[str, str]) -> bool:
    """Whether what follows `letter` names a second option, as in `A or B` and `A, B`; its own text may hold any letter."""
    if _plain(rest.lstrip(" :).]-")) == _plain(options[letter.upper()]):
        return False
    second = _LISTED.match(rest) or _BESIDE.match(rest)
    if second is None or second.group(1).isupper() != letter.isupper():
        return False
    return second.group(1).upper() in options and second.group(1) != letter


def _of_text(text: str | None, options: Mapping[str, str]) -> str | None:
    """The only option whose text is `text`, case and spacing aside."""
    plain = _plain(unwrapped(text or ""))
    matching = [letter for letter, option in options.items() if plain and _plain(option) == plain]
    return matching[0] if len(matching) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


class MultipleChoiceEnvironment:
    """Single turn; reward 1.0 for the right letter, else 0.0."""

    name: ClassVar[str] = "multiple_choice"
    version: ClassVar[str] = "1"
    task_type = MultipleChoiceTask
    example: ClassVar[Mapping[str, object]] = {
        "question": "Which is a fish?",
        "options": ["Heron", "Trout", "Otter"],
        "expected_answer": "B",
    }
    public_fields: ClassVar[frozenset[str]] = frozenset({"question", "options", "grading_mode"})
    success_threshold: ClassVar[float] = 1.0

    def seed(self, task: MultipleChoiceTask) -> Seeded:
        if task.messages:
            return Seeded(messages=task.messages, tools=task.tools or [])
        lines = [f"{letter}: {text}" for letter, text in task.options.items()]
        closing = INSTRUCTION_COLON if task.grading_mode == "lenient_answer_colon" else INSTRUCTION
        content = "\n".join([task.question or "", "", *lines, "", closing])
        return Seeded(messages=[{"role": "user", "content": content}])

    def reference(self, task: MultipleChoiceTask) -> Submission:
        colon = task.grading_mode == "lenient_answer_colon"
        return Submission(text=f"Answer: {task.letter}" if colon else rf"\boxed{{{task.letter}}}")

    async def verify(self, task: MultipleChoiceTask, episode: Episode, services: Services) -> Verdict:
        choice = chosen(episode.submission.text, task.options, task.grading_mode, task.template_metadata)
        diagnostics: JsonObject = {"choice": choice.letter, "method": choice.method}
        return Verdict(reward=1.0 if choice.letter == task.letter else 0.0, diagnostics=diagnostics)

    def aggregate_metrics(self, verdicts: Iterable[ScoredVerdict]) -> Mapping[str, float]:
        """How often no single option could be read: then a low score tells more of the format than of the knowledge."""
        told = Counter(verdict.diagnostics["choice"] is None for verdict in verdicts if "choice" in verdict.diagnostics)
        return {"unreadable": told[True] / told.total()} if told else {}
