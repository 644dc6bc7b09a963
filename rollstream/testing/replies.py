"""What a scripted model server answers, and what it was asked: plain values.

A script is called once a *request*, not once a call: a client that retries is answered from the script again.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from schemas.values import ChatMessage, JsonObject, Usage

CREATED = 1_767_225_600
"""All answers were created at the same time, so that a scripted response is known to the byte."""

Api = Literal["chat", "responses", "messages", "count_tokens", "models"]
ENDPOINTS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/models": "models",
}


@dataclass(frozen=True)
class Request:
    """One request as it arrived. Header names are in lower case; `number` counts from 0."""

    number: int
    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def api(self) -> Api:
        return ENDPOINTS[self.path]

    @cached_property
    def body(self) -> JsonObject:
        body: JsonObject = json.loads(self.raw) if self.raw else {}
        return body

    @property
    def model(self) -> str:
        return str(self.body.get("model", "scripted"))

    @property
    def messages(self) -> list[ChatMessage]:
        """`messages` of a chat or messages request, or `input` of a responses request."""
        found = self.body.get("messages", self.body.get("input", []))
        return found if isinstance(found, list) else [{"role": "user", "content": str(found)}]

    @property
    def last_text(self) -> str:
        """Text of the last message, which is what most scripts decide by."""
        content = self.messages[-1].get("content") if self.messages else None
        if isinstance(content, list):
            return "".join(str(part.get("text", "")) for part in content)
        return content or ""

    @property
    def tool_results(self) -> int:
        """How many results of tools the prompt has: how far an agent has come."""
        found = sum(1 for message in self.messages if message.get("role") == "tool" or _is_output(message))
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                found += sum(1 for part in content if part.get("type") == "tool_result")
        return found

    @property
    def tools(self) -> frozenset[str]:
        """Names of the tools that are offered; `NAMESPACE.NAME` of those in a namespace."""
        offered = self.body.get("tools")
        names: set[str] = set()
        for tool in offered if isinstance(offered, list) else []:
            if tool.get("type") == "namespace":
                names |= {f"{tool['name']}.{inner.get('name')}" for inner in tool["tools"]}
            else:
                function = tool.get("function", tool)
                names.add(str(function.get("name") or function.get("type")))
        return frozenset(names)

    @property
    def retry_count(self) -> int:
        """How often the SDK says it has sent this call before."""
        return int(self.headers.get("x-stainless-retry-count", "0"))


def _is_output(item: Mapping[str, object]) -> bool:
    return str(item.get("type", "")).endswith("_call_output")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. `arguments` as text is sent as it is, so that it may be malformed."""

    name: str
    arguments: JsonObject | str = field(default_factory=dict)
    id: str = "call-1"
    namespace: str = ""
    """Of the Responses API, where tools are offered in one."""

    def arguments_text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


USAGE = Usage(prompt_tokens=10, completion_tokens=5)


@dataclass(frozen=True, slots=True)
class Text:
    """A good answer.

    Attributes:
        extra: more keys of the response; NaN and lone surrogates go out the way a careless server writes them.
    """

    text: str
    finish_reason: str = "stop"
    usage: Usage = USAGE
    extra: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """An answer that calls tools, with or without text."""

    calls: Sequence[Call]
    text: str | None = None
    usage: Usage = USAGE


@dataclass(frozen=True, slots=True)
class RawText:
    """A good answer whose text is exactly these bytes between the quotes, whether JSON allows them or not."""

    raw: bytes


@dataclass(frozen=True, slots=True)
class Raw:
    """Any body at all."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Status:
    """An error in OpenAI's shape."""

    status: int
    message: str = "scripted failure"
    code: str | None = None
    retry_after_s: float | None = 0.001
    """Of statuses that clients retry. The default keeps tests fast; null leaves the client to its own back-off."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A reply that takes a while."""

    reply: "Reply"
    delay_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """A reply that is given once the test sets `until`."""

    reply: "Reply"
    until: asyncio.Event


@dataclass(frozen=True, slots=True)
class Hang:
    """Nothing, until the server is closed."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The connection is closed before the first byte, or in the middle of the body."""

    midway: bool = False


Reply = Text | ToolCalls | RawText | Raw | Status | Slow | Held | Hang | Dropped
Script = Callable[[Request], Reply]

EMPTY_CHOICES = Raw(b'{"object": "chat.completion", "model": "scripted", "choices": [], "output": []}')
NOT_JSON = Raw(b"<html><body>502 Bad Gateway</body></html>", content_type="text/html")
LONE_SURROGATE = RawText(rb"half a pair: \ud800.")
INVALID_UTF8 = RawText(b"caf\xe9")
NAN = Text("42", extra={"score": float("nan")})
CONTEXT_OVERFLOW = Status(
    400, "This model's maximum context length is 128 tokens, but 4096 were requested.", code="context_length_exceeded"
)


def tool_call(name: str, **arguments: object) -> ToolCalls:
    """An answer that calls one tool."""
    return ToolCalls([Call(name, arguments)])


def big_text(size_bytes: int = 5_000_000) -> Text:
    """A good answer of that many bytes of ASCII."""
    return Text("x" * size_bytes)


def always(reply: Reply | str) -> Script:
    """The same reply to everything."""
    given = Text(reply) if isinstance(reply, str) else reply
    return lambda _: given


def in_turn(*replies: Reply | str) -> Script:
    """One reply after the other, by the order in which requests arrive; the last one repeats."""
    given = [Text(reply) if isinstance(reply, str) else reply for reply in replies]
    return lambda request: given[min(request.number, len(given) - 1)]
