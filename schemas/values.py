"""Value types that several events share, and the cleaning of text and numbers that JSON cannot carry.

What cannot be carried is escaped, never dropped: a lone surrogate becomes the six characters `\\udXXX`, a NaN, an
infinity or an integer outside 64 bits becomes its text. `clean` says whether it had to do so.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from typing_extensions import TypedDict


class Value(BaseModel):
    """Base of every schema: frozen; unknown fields of newer writers are ignored; NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, serialize_by_alias=True, validate_by_name=True)


Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
"""An id or a name: 1 to 512 characters."""
Reward = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite JSON number. A bool, a string, NaN or an infinity is refused."""
JsonObject = dict[str, object]
"""JSON that we carry and never interpret."""


class ChatMessage(TypedDict, total=False):
    """One OpenAI chat message. Provider-specific fields are kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[JsonObject] | None
    tool_calls: list[JsonObject]
    tool_call_id: str
    name: str


def text_of(message: ChatMessage) -> str:
    """The text of a message, whether it is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))  # type: ignore[misc]
    return content or ""


def tool_names(tools: Sequence[JsonObject]) -> frozenset[str]:
    """The names of OpenAI function tools."""
    functions = [tool.get("function") for tool in tools]
    return frozenset(str(function.get("name")) for function in functions if isinstance(function, dict))


class TaskRef(Value):
    """Which task: everything about it that is public and fits in a line."""

    id: Name
    dataset: Name = "adhoc"
    split: str | None = None
    index: int | None = None
    """Row number in its file, from 0."""
    epoch: int = 0


class GroupRef(Value):
    """The k rollouts dispatched together for one task, and which of them this is."""

    id: Name
    size: Annotated[int, Field(ge=1)]
    index: Annotated[int, Field(ge=0)]


class Sampling(Value):
    """What is sent to the model server with every call; null leaves the server's default."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: list[str] | None = None


class Composition(Value):
    """What runs together: harness x models by role x sampling x sandbox backend (environment and task stand beside it)."""

    harness: Name = "chat"
    models: dict[str, str] = {"policy": "default"}
    """Role -> name of a model in the settings, or an id that the `default` endpoint serves."""
    sampling: Sampling = Sampling()
    sandbox: Name | None = None
    """Name of the backend that runs the sandboxes; null where none is asked for."""


class EpisodeLimits(Value):
    """Limits that travel with a session. The agent's own are outcomes; the episode's is a retryable failure."""

    episode_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """From seed to verdict, without queueing and clean-up."""
    agent_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    max_steps: Annotated[int, Field(ge=1)] = 100
    max_model_tokens: Annotated[int, Field(ge=1)] | None = None
    max_output_bytes: Annotated[int, Field(ge=1)] = 1_000_000


class Usage(Value):
    """Token counts as the provider reported them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64 = range(-(2**63), 2**63)


def clean_text(text: str) -> str:
    """`text` with every lone surrogate spelled out as `\\udXXX`; the same object when there is none."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def clean(value: Any) -> tuple[Any, bool]:
    """Make any parsed JSON value fit for the log.

    Returns:
        The value (itself when nothing had to change) and whether anything was escaped.
    """
    if isinstance(value, str):
        text = clean_text(value)
        return text, text is not value
    if isinstance(value, bool) or value is None:
        return value, False
    if isinstance(value, float):
        return (value, False) if math.isfinite(value) else (str(value), True)
    if isinstance(value, int):
        return (value, False) if value in _INT64 else (str(value), True)
    if isinstance(value, dict):
        items = [(clean(key), clean(item)) for key, item in value.items()]
        if not any(k[1] or v[1] for k, v in items):
            return value, False
        return {k[0]: v[0] for k, v in items}, True
    if isinstance(value, list):
        cleaned = [clean(item) for item in value]
        return ([item for item, _ in cleaned], True) if any(escaped for _, escaped in cleaned) else (value, False)
    return value, False


_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def parse_json(raw: bytes) -> tuple[Any, bool]:
    """Any JSON text, made fit for the log, and whether anything was escaped.

    orjson reads what is strict; what it refuses (lone surrogates, NaN) or would round (integers beyond 64 bits) is read by
    the standard library and cleaned.

    Raises:
        ValueError: not JSON at all, or nested too deeply.
        UnicodeDecodeError: (a ValueError) bytes that are not UTF-8, with their position.
    """
    if not _LONG_NUMBER.search(raw):
        try:
            return _shallow(raw, orjson.loads(raw)), False
        except orjson.JSONDecodeError:
            pass
    try:
        return clean(_shallow(raw, json.loads(raw.decode("utf-8"))))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


MAX_DEPTH = 100
"""Of JSON that we carry. The decoders of the log stop at 200, and what we carry stands inside an event."""
_TOO_DEEP = f"nested more than {MAX_DEPTH} deep"


def _shallow(raw: bytes, value: Any) -> Any:
    """`value`, parsed from `raw`, if it is not nested too deeply."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return value
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def truncate_text(text: str, max_bytes: int) -> str:
    """`text` cut to about `max_bytes` of UTF-8, with a marker that gives the original size; unchanged if it fits."""
    if len(text) * 4 <= max_bytes:
        return text
    raw = text.encode()
    if len(raw) <= max_bytes:
        return text
    kept = raw[:max_bytes].decode(errors="ignore")
    return f"{kept}\n[truncated by rollstream: {len(raw)} bytes in all, {len(kept.encode())} kept]"
