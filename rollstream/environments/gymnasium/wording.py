"""Gymnasium's spaces in words: what the agent may do, what it sees, and what it meant. Pure.

An agent's text is looked at in a bounded piece from its end, where the action stands.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.values import clean

TAIL = 2_000
MAX_SHOWN = 4_000
"""Characters of an observation: an array of pixels is of no use as text."""

ActionValue = int | list[int] | str
"""An action as it stands in a world."""


@dataclass(frozen=True, slots=True)
class Legend:
    """What somebody who does not know a world must be told."""

    actions: tuple[str, ...] = ()
    note: str = ""


LEGENDS: Mapping[str, Legend] = {
    "FrozenLake": Legend(
        ("left", "down", "right", "up"),
        "S is the start, F is ice, H is a hole, G is the goal, and [ ] marks where you stand. Reach G.",
    ),
    "CliffWalking": Legend(
        ("up", "right", "down", "left"), "x is you, T is the goal, and C is a cliff that throws you back to the start. Reach T."
    ),
    "Taxi": Legend(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "[ ] marks the taxi, (blue ) where the passenger waits, (magenta ) where they want to go; | is a wall, : is none. "
        "Pick the passenger up and drop them off.",
    ),
    "Blackjack": Legend(
        ("stick", "hit"),
        "You see your sum, the dealer's card, and 1 if you hold a usable ace. Come closer to 21 than the dealer, not over.",
    ),
    "CartPole": Legend(
        ("left", "right"),
        "You see the cart's position and speed, and the pole's angle and angular speed. Keep the pole upright.",
    ),
}
_INTEGER = r"(?<![\w.])-?[0-9]{1,9}(?![\w.]*[0-9])"
_LIST = re.compile(r"\[\s*-?[0-9]{1,9}(?:\s*,\s*-?[0-9]{1,9}){0,63}\s*\]")
_COLOURS = {30: "black", 31: "red", 32: "green", 33: "yellow", 34: "blue", 35: "magenta", 36: "cyan", 37: "grey"}
_ANSI = re.compile(r"\x1b\[([0-9;]{0,20})m([^\x1b]{0,80})\x1b\[0m")
_OTHER_ANSI = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


class Unsupported(ValueError):
    """A space that an agent cannot act in with words."""


class Unreadable(ValueError):
    """No action can be found in what the agent said, or none that there is. The message is for the agent."""


@dataclass(frozen=True, slots=True)
class ActionWords:
    """The actions of one world in words.

    Attributes:
        kind: of space: `discrete`, `multi_discrete` or `text`.
        lowest: smallest action, of each place; of a text, the shortest.
        counts: number of actions, of each place; of a text, the longest.
        names: of the actions, in order; of a text, the characters that it may have.
    """

    kind: str
    lowest: tuple[int, ...]
    counts: tuple[int, ...]
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, space: Any, names: Sequence[str]) -> "ActionWords":
        """The words for an action space of Gymnasium.

        Raises:
            Unsupported: it is none that can be acted in with words, or has another number of actions than there are names.
        """
        kind = type(space).__name__
        if kind == "Text":
            return cls("text", (int(space.min_length),), (int(space.max_length),), ("".join(sorted(space.character_set)),))
        if kind == "MultiDiscrete" and space.nvec.ndim == 1:
            return cls("multi_discrete", tuple(int(one) for one in space.start), tuple(int(one) for one in space.nvec))
        if kind != "Discrete":
            raise Unsupported(f"expected actions of Discrete, MultiDiscrete (of one dimension) or Text, found {space}")
        if names and len(names) != int(space.n):
            raise Unsupported(f"expected {int(space.n)} names of actions, found {len(names)}")
        return cls("discrete", (int(space.start),), (int(space.n),), tuple(names))

    def legend(self) -> str:
        """What the agent may answer."""
        if self.kind == "text":
            return f"Your whole answer is your action: {self.lowest[0]} to {self.counts[0]} of the characters {self.names[0]}"
        if self.kind == "multi_discrete":
            ranges = ", ".join(f"{low} to {low + count - 1}" for low, count in zip(self.lowest, self.counts, strict=True))
            return f"An action is a list of {len(self.counts)} numbers, such as {list(self.lowest)}: {ranges}."
        low, count = self.lowest[0], self.counts[0]
        if not self.names:
            return f"An action is a number from {low} to {low + count - 1}. The last number in your answer counts."
        named = ", ".join(f"{low + place} = {name}" for place, name in enumerate(self.names))
        return f"Actions: {named}. Answer with one, by number or name; the last one in your answer counts."

    def read(self, text: str) -> ActionValue:
        """The action that an answer means.

        Raises:
            Unreadable: there is none in it.
        """
        if self.kind == "text":
            return self._text(text.strip())
        return self._list(text[-TAIL:]) if self.kind == "multi_discrete" else self._one(text[-TAIL:])

    def _text(self, text: str) -> str:
        if not self.lowest[0] <= len(text) <= self.counts[0] or not set(text) <= set(self.names[0]):
            raise Unreadable(f"expected another answer. {self.legend()}")
        return text

    def _one(self, text: str) -> int:
        low, count = self.lowest[0], self.counts[0]
        numbers = [(found.end(), int(found.group())) for found in re.finditer(_INTEGER, text)]
        named = [
            (found.end(), low + place)
            for place, name in enumerate(self.names)
            for found in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE)
        ]
        if not numbers and not named:
            raise Unreadable(f"expected an action, found none. {self.legend()}")
        _, value = max([*numbers, *named])
        if not low <= value < low + count:
            raise Unreadable(f"there is no action {value}. {self.legend()}")
        return value

    def _list(self, text: str) -> list[int]:
        found = None
        for found in _LIST.finditer(text):  # noqa: B007
            pass
        if found is None:
            raise Unreadable(f"expected an action, found none. {self.legend()}")
        values: list[int] = json.loads(found.group())
        fits = len(values) == len(self.counts) and all(
            low <= value < low + count for value, low, count in zip(values, self.lowest, self.counts, strict=True)
        )
        if not fits:
            raise Unreadable(f"there is no action {values}. {self.legend()}")
        return values


def plain(value: Any) -> Any:
    """A value of Gymnasium (numpy's among them) as JSON."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return clean(value)[0]
    return str(value)


def shown(observation: Any, drawing: Any) -> str:
    """What the agent sees: the world's own drawing, if it has one, and the observation."""
    value = plain(observation)
    told = value if isinstance(value, str) else json.dumps(_rounded(value))
    lines = [f"Observation: {told}"]
    if isinstance(drawing, str) and drawing.strip():
        lines.insert(0, without_colours(drawing).strip("\n"))
    text = "\n".join(lines)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}\n[cut: {len(text)} characters in all]"


def without_colours(drawing: str) -> str:
    """A terminal's colours as text: a coloured ground as `[S]`, a coloured letter as `(blue B)`."""

    def marked(match: re.Match[str]) -> str:
        codes = [int(code) for code in match.group(1).split(";") if code]
        if any(40 <= code <= 47 for code in codes):
            return f"[{match.group(2)}]"
        colour = next((_COLOURS[code] for code in codes if code in _COLOURS), None)
        return f"({colour} {match.group(2)})" if colour else match.group(2)

    return _OTHER_ANSI.sub("", _ANSI.sub(marked, drawing))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(item) for item in value] if isinstance(value, list) else value
