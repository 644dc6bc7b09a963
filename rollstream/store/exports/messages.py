"""Chat messages in the one shape that every row of an export has.

Readers of data sets take the type of a column from its first rows, so every message has the same keys, each of one type: text
is a text (never a list of parts), and arguments of a tool call are JSON in a text, as OpenAI has them. Keys that no message of
an export uses are left out of all: some chat templates take a key that is there and empty for a tool call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson
import pyarrow as pa

from schemas.values import ChatMessage, JsonObject

Message = dict[str, object]
"""`role` and `content`, and those of `OPTIONAL` that it has."""

_TOOL_CALL = pa.struct(
    {"id": pa.string(), "type": pa.string(), "function": pa.struct({"name": pa.string(), "arguments": pa.string()})}
)
OPTIONAL: dict[str, pa.DataType] = {
    "reasoning_content": pa.string(),
    "tool_calls": pa.list_(_TOOL_CALL),
    "tool_call_id": pa.string(),
    "name": pa.string(),
}


class NotText(ValueError):
    """A message holds an image, a sound or a file, which a text data set cannot."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A transcript and the tools that were offered."""

    messages: tuple[Message, ...]
    tools: str | None
    """OpenAI's list, as JSON in a text; null when there were none."""

    @classmethod
    def of(cls, messages: Iterable[ChatMessage], tools: Sequence[JsonObject]) -> "Conversation":
        """The conversation, if it is all text.

        Raises:
            NotText: it is not.
        """
        text = orjson.dumps(tools, option=orjson.OPT_SORT_KEYS).decode() if tools else None
        return cls(tuple(map(_message, messages)), text)

    @property
    def answered(self) -> bool:
        """Whether there is anything to learn from it."""
        return any(message["role"] == "assistant" for message in self.messages)


def keys_of(messages: Iterable[Message]) -> set[str]:
    """Which of `OPTIONAL` are used."""
    return {name for message in messages for name in message if name in OPTIONAL}


def messages_type(keys: set[str]) -> pa.DataType:
    """The type of a column of messages that use `keys`."""
    optional = {name: type_ for name, type_ in OPTIONAL.items() if name in keys}
    return pa.list_(pa.struct({"role": pa.string(), "content": pa.string()} | optional))


def filled(messages: Iterable[Message], keys: set[str]) -> list[Message]:
    """`messages`, each with all of `keys`, in one order."""
    names = ["role", "content", *(name for name in OPTIONAL if name in keys)]
    return [{name: message.get(name) for name in names} for message in messages]


def split_pair(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """How many messages two transcripts share before the first answer in which they differ.

    That is their longest shared beginning after which both go on with an answer of the agent: where a world or a tool said
    something else first, the pair begins at the answer before it, since only answers can be preferred.

    Returns:
        0 if they share nothing, or do not differ in an answer.
    """
    shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        shared += 1
    while shared and not (_answers(chosen, shared) and _answers(rejected, shared)):
        shared -= 1
    return shared if list(chosen[shared:]) != list(rejected[shared:]) else 0


def _answers(messages: Sequence[Message], index: int) -> bool:
    return index < len(messages) and messages[index]["role"] == "assistant"


def _message(message: ChatMessage) -> Message:
    raw: Mapping[str, object] = message
    made: Message = {"role": raw.get("role", "user"), "content": _text(raw.get("content"))}
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if isinstance(reasoning, str):
        made["reasoning_content"] = reasoning
    calls = raw.get("tool_calls")
    if isinstance(calls, list) and calls:
        made["tool_calls"] = [_tool_call(call) for call in calls if isinstance(call, dict)]
    for name in ("tool_call_id", "name"):
        if isinstance(value := raw.get(name), str):
            made[name] = value
    return made


def _text(content: object) -> str:
    """The text of a message. Without content, which stands beside tool calls, it is empty: most chat templates take no null."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise NotText
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise NotText
    return "".join(text for text in texts if isinstance(text, str))


def _tool_call(call: JsonObject) -> Message:
    name, arguments = called(call)
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def called(call: JsonObject) -> tuple[str, str]:
    """The name and the arguments (JSON in a text, or a custom tool's free text) of one of OpenAI's tool calls."""
    function = call.get("function") or call.get("custom")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", function.get("input", ""))
    return str(function.get("name", "")), arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
