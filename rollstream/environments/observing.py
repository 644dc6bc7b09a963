"""From what an environment's `step` returns to what may stand in the log: cut to size, escaped, finite. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from rollstream.environments.protocol import StepResult
from rollstream.errors import EnvironmentFailure, Stage
from schemas.action import ToolCall, Utterance
from schemas.events import describe
from schemas.values import ChatMessage, JsonObject, clean, truncate_text

MAX_INFO_BYTES = 64 * 1024
_MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


@dataclass(frozen=True, slots=True)
class Seen:
    """What the agent sees of a step; `escaped` when it is not word for word what the environment said."""

    messages: list[ChatMessage]
    escaped: bool


def seen_of(environment: str, action: ToolCall | Utterance, result: StepResult, max_bytes: int) -> Seen:
    """The observation of a step as chat messages.

    Raises:
        EnvironmentFailure: it is neither text nor chat messages.
    """
    observation = result.observation
    if isinstance(observation, bytes):
        text = observation.decode("utf-8", "backslashreplace")
        return _seen([_said(action, text)], max_bytes, escaped=text.encode() != observation)
    if isinstance(observation, str):
        nothing = not observation and not isinstance(action, ToolCall)
        return _seen([] if nothing else [_said(action, observation)], max_bytes)
    try:
        messages = _MESSAGES.validate_python(list(observation))
    except (ValidationError, TypeError) as error:
        found = describe(error) if isinstance(error, ValidationError) else f"a {type(observation).__name__}"
        message = f"environment {environment}: expected text or chat messages as observation, found {found}"
        raise EnvironmentFailure(message, stage="agent", kind="bad_observation") from None
    return _seen(messages, max_bytes)


def _said(action: ToolCall | Utterance, text: str) -> ChatMessage:
    if isinstance(action, ToolCall):
        return {"role": "tool", "tool_call_id": action.id, "content": text}
    return {"role": "user", "content": text}


def _seen(messages: list[ChatMessage], max_bytes: int, *, escaped: bool = False) -> Seen:
    cleaned, changed = clean(messages)
    shown = _cut(cleaned, max_bytes)
    return Seen(shown, escaped or changed or shown != cleaned)


def _cut(value: Any, max_bytes: int) -> Any:
    """JSON with every text in it cut to size."""
    if isinstance(value, str):
        return truncate_text(value, max_bytes)
    if isinstance(value, dict):
        return {name: _cut(item, max_bytes) for name, item in value.items()}
    if isinstance(value, list):
        return [_cut(item, max_bytes) for item in value]
    return value


def finite(environment: str, name: str, value: object, stage: Stage) -> float | None:
    """A reward as the log takes it; anything else is the environment's failure, not the agent's.

    Raises:
        EnvironmentFailure: it is no finite number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvironmentFailure(
            f"environment {environment}: expected a finite number as {name}, found {value!r:.80}",
            stage=stage,
            kind="bad_reward",
        )
    return float(value)


def finite_components(environment: str, components: Mapping[str, object], stage: Stage) -> dict[str, float]:
    """Components of a reward, those without a value left out.

    Raises:
        EnvironmentFailure: one is no finite number.
    """
    numbers = {name: finite(environment, name, value, stage) for name, value in components.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def info_of(environment: str, info: Mapping[str, object]) -> JsonObject:
    """Diagnostics of a step as the log takes them; replaced by their size when they are long.

    Raises:
        EnvironmentFailure: they are no JSON.
    """
    cleaned, _ = clean(dict(info))
    try:
        size = len(orjson.dumps(cleaned))
    except TypeError as error:
        message = f"environment {environment}: expected JSON values in the info of a step, found {error}"
        raise EnvironmentFailure(message, stage="agent", kind="bad_info") from None
    found: JsonObject = cleaned if size <= MAX_INFO_BYTES else {"omitted_bytes": size}
    return found
