"""What was said, which facts it holds, and what a simulated user is told to say next. Pure.

Only what the agent itself says counts as told, and only what the user says can end a conversation: a marker in the agent's
words is taken out before a user sees it.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from rollstream.environments.protocol import World
from schemas.values import ChatMessage

GOAL, GIVE_UP = "[[GOAL]]", "[[GIVE UP]]"
"""With these a user ends the conversation; the agent does not see them."""
MAX_LOOKED_AT = 100_000
"""Characters of an utterance in which facts are looked for."""
_SPACE = re.compile(r"\s+")

Ending = Literal["goal", "give_up", "turn_limit"]


def plain(text: str) -> str:
    """Text in which case, white space and typographic variants make no difference."""
    same = text.casefold().translate({0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x00A0: " "})
    return _SPACE.sub(" ", same).strip()


def _not_empty(fact: str | list[str]) -> str | list[str]:
    ways = [fact] if isinstance(fact, str) else fact
    if not ways or not all(plain(way) for way in ways):
        raise ValueError("expected a fact as text, or as a list of ways to put it, found nothing")
    return fact


Fact = Annotated[str | list[str], AfterValidator(_not_empty)]
"""Something the agent must say: a phrase, or a list of phrases of which one will do."""


def says(text: str, fact: str | list[str]) -> bool:
    """Whether a text holds a fact, as whole words."""
    looked_at = plain(text[-MAX_LOOKED_AT:])
    ways = [fact] if isinstance(fact, str) else fact
    return any(_holds(looked_at, plain(way)) for way in ways)


def _holds(text: str, phrase: str) -> bool:
    at = text.find(phrase)
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(phrase) : at + len(phrase) + 1]
        starts = not (before.isalnum() and phrase[0].isalnum())
        ends = not (after.isalnum() and phrase[-1].isalnum())
        if starts and ends:
            return True
        at = text.find(phrase, at + 1)
    return False


class Said(World):
    """One utterance."""

    by: Literal["agent", "user"]
    text: str


class Talk(World):
    """A conversation under way, with what its user knows and wants."""

    persona: str
    goal: str
    scenario: str
    facts: list[Fact]
    forbidden: list[Fact]
    script: list[str] | None
    max_turns: int
    said: list[Said]
    told: list[int] = []
    """Places of the facts that the agent has told."""
    offended: list[int] = []
    """Places of what it must not say, and did."""
    turns: int = 0
    """Utterances of the agent."""
    ended: Ending | None = None


def heard(talk: Talk, text: str) -> tuple[Talk, list[int]]:
    """The conversation after the agent has spoken, and the places of the facts that are new."""
    new = [place for place, fact in enumerate(talk.facts) if place not in talk.told and says(text, fact)]
    offended = [place for place, fact in enumerate(talk.forbidden) if place in talk.offended or says(text, fact)]
    update = {
        "said": [*talk.said, Said(by="agent", text=text)],
        "told": sorted([*talk.told, *new]),
        "offended": offended,
        "turns": talk.turns + 1,
    }
    return talk.model_copy(update=update), new


def answered(talk: Talk, reply: str) -> tuple[Talk, str]:
    """The conversation after the user's reply, and what the agent sees of it."""
    last = max((GOAL, GIVE_UP), key=reply.rfind)
    ending: Ending | None = None
    if last in reply:
        ending = "goal" if last == GOAL else "give_up"
    shown = _unmarked(reply)
    if ending is None and talk.turns >= talk.max_turns:
        ending = "turn_limit"
    said = [*talk.said, Said(by="user", text=shown)] if shown else talk.said
    return talk.model_copy(update={"said": said, "ended": ending}), shown


def scripted_reply(talk: Talk) -> str:
    """What a scripted user says to the agent's last words: thanks when it has been told all, else its next line."""
    assert talk.script is not None, "only a scripted user has a script"
    if talk.facts and len(talk.told) == len(talk.facts):
        return f"Thank you, that is all I needed. {GOAL}"
    if talk.turns <= len(talk.script):
        return talk.script[talk.turns - 1]
    return f"I give up. {GIVE_UP}"


def user_prompt(talk: Talk) -> list[ChatMessage]:
    """What the model that plays the user is asked: its part, then the conversation as it sees it."""
    part = (
        "You play a person in a conversation. You are not an assistant, and you never offer help.\n"
        f"Who you are: {talk.persona}\n"
        f"The situation: {talk.scenario}\n"
        f"What you want (do not say it outright, and do not make up facts beyond it): {talk.goal}\n"
        "Say only what this person would say next, in one to three sentences. "
        f"When you have what you want, end with {GOAL}. When it is clear that you will not get it, end with {GIVE_UP}."
    )
    # What the other side says is the user message here: for this model, the agent is the user.
    turns: list[ChatMessage] = [
        {"role": "assistant" if one.by == "user" else "user", "content": _unmarked(one.text) or "(says nothing)"}
        for one in talk.said
    ]
    opening: list[ChatMessage] = [{"role": "user", "content": "(The conversation begins.)"}]
    return [{"role": "system", "content": part}, *opening, *turns]


def _unmarked(text: str) -> str:
    # Again and again: taking one out can put another together.
    while GOAL in text or GIVE_UP in text:
        text = text.replace(GOAL, "").replace(GIVE_UP, "")
    return text.strip()
