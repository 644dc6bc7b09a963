"""Grading data that stands in a prompt: found where the grading data is, published as a flag without its text.

A text counts if it says something by itself: at least `MIN_WORDS` words and `MIN_CHARACTERS` characters, or `MIN_UNBROKEN`
characters of any kind; an answer like `4`, `B` or `Paris` never does. Case and white space are not compared. What the agent
said itself is no prompt. Of an environment that is not installed here, nobody knows which fields grade: nothing is flagged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from rollstream.environments.registry import ALWAYS_PUBLIC, load
from rollstream.errors import Refused
from rollstream.store.columns import MAX_VALUE_BYTES
from schemas.values import JsonObject

MIN_WORDS = 4
MIN_CHARACTERS = 20
MIN_UNBROKEN = 40
MAX_TEXTS = 64
"""Of one task: bounds what a task of a thousand test cases costs."""
_MAX_CHARACTERS = MAX_VALUE_BYTES // 4

PublicFields = Callable[[str], frozenset[str] | None]


@dataclass(frozen=True, slots=True)
class GradingText:
    """One text of a task's grading data, in the form in which it is compared."""

    field: str
    text: str
    in_task: bool
    """Whether the task's own public fields have it: then every prompt has it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an agent was shown in a session."""

    run: str | None
    group: str
    rollout: str
    session: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Grading data of a field was shown to an agent."""

    run: str | None
    group: str
    rollout: str
    session: str
    field: str
    in_task: bool


@cache
def public_fields(environment: str) -> frozenset[str] | None:
    """Fields of a row that are no grading data; None if the environment is not installed here."""
    try:
        return load(environment).public_fields | ALWAYS_PUBLIC
    except Refused:
        return None


def grading_texts(task: JsonObject, public_of: PublicFields = public_fields) -> list[GradingText]:
    """What of a TaskSubmitted must not stand in a prompt."""
    row, environment = task.get("row"), task.get("environment")
    if not isinstance(row, dict) or not isinstance(environment, str):
        return []
    public = public_of(environment)
    if public is None:
        return []
    private = [(name, text) for name, value in row.items() if name not in public for text in _strings(value) if counts(text)]
    if not private:
        return []
    shown = " ".join(comparable(text) for name, value in row.items() if name in public for text in _strings(value))
    made = ((name, comparable(text)[:_MAX_CHARACTERS]) for name, text in private[:MAX_TEXTS])
    return [GradingText(name, text, text in shown) for name, text in dict.fromkeys(made)]


def prompt_text(event: JsonObject) -> str:
    """What a SessionReady or an AgentStepped shows the agent for the first time."""
    messages = event.get("messages") if event.get("kind") == "SessionReady" else event.get("new_messages")
    if not messages or not isinstance(messages, list):
        return ""
    heard = (one for one in messages if isinstance(one, dict) and one.get("role") != "assistant")
    return "\n".join(text for one in heard for text in _strings(one.get("content")))


def findings(prompts: Iterable[Prompt], texts: dict[str, list[GradingText]]) -> list[Finding]:
    """Which of `texts`, by group, stand in the prompts of that group."""
    found: dict[tuple[str, str], Finding] = {}
    for prompt in prompts:
        wanted = texts.get(prompt.group)
        if not wanted:
            continue
        shown = comparable(prompt.text)
        for one in wanted:
            if one.text in shown:
                finding = Finding(prompt.run, prompt.group, prompt.rollout, prompt.session, one.field, one.in_task)
                found.setdefault((prompt.session, one.field), finding)
    return list(found.values())


def counts(text: str) -> bool:
    """Whether a text says something by itself."""
    words = text.split()
    length = sum(map(len, words)) + len(words) - 1
    return length >= MIN_UNBROKEN or (len(words) >= MIN_WORDS and length >= MIN_CHARACTERS)


def comparable(text: str) -> str:
    """A text without what is not compared."""
    return " ".join(text.casefold().split())


def _strings(value: object) -> Iterator[str]:
    """Every text in a JSON value, names of fields left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _of_all(list(value.values()))
    elif isinstance(value, list):
        yield from _of_all(value)


def _of_all(values: Sequence[object]) -> Iterator[str]:
    for value in values:
        yield from _strings(value)
