"""Requests and responses of the two OpenAI APIs, to and from the canonical chat message. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from schemas import values
from schemas.events import describe
from schemas.values import ChatMessage, JsonObject, Sampling, Usage, truncate_text


class Malformed(ValueError):
    """A response is not what its API promises. The message says what was expected and found."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was read from a response."""

    message: ChatMessage
    finish_reason: str | None
    usage: Usage
    model: str | None


def parse_json(raw: bytes, max_text_bytes: int) -> tuple[JsonObject, bool]:
    """A response body as JSON that the log can carry, and whether anything had to be escaped or cut.

    Raises:
        Malformed: it is not a JSON object.
    """
    try:
        body, changed = values.parse_json(raw)
    except UnicodeDecodeError:
        body, changed = _parse_bytes(raw), True
    except ValueError as error:
        raise _not_json(raw, error) from None
    if not isinstance(body, dict):
        raise Malformed(f"expected a JSON object, found a JSON {type(body).__name__}")
    if len(raw) > max_text_bytes:
        body, changed = _cut(body, max_text_bytes), True
    return body, changed


_NOT_UTF8 = re.compile("[\udc80-\udcff]")


def _parse_bytes(raw: bytes) -> Any:
    """Bytes that are not UTF-8 are still an answer: each becomes the four characters `\\xNN`, as JSON spells them."""
    text = raw.decode("utf-8", "surrogateescape")
    spelled = _NOT_UTF8.sub(lambda match: f"\\\\x{ord(match.group()) - 0xDC00:02x}", text)
    try:
        return values.parse_json(spelled.encode())[0]
    except ValueError as error:
        raise _not_json(raw, error) from None


def _not_json(raw: bytes, error: ValueError) -> Malformed:
    return Malformed(f"expected JSON, found {raw[:80]!r} ({error})")


def _cut(value: Any, max_bytes: int) -> Any:
    if isinstance(value, str):
        return truncate_text(value, max_bytes)
    if isinstance(value, list):
        return [_cut(item, max_bytes) for item in value]
    if isinstance(value, dict):
        return {key: _cut(item, max_bytes) for key, item in value.items()}
    return value


def chat_request(model: str, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], sampling: Sampling) -> JsonObject:
    body: JsonObject = {"model": model, "messages": messages}
    if tools:
        body["tools"] = tools
    body.update(sampling.model_dump(exclude_none=True))
    return body


def chat_answer(body: Mapping[str, Any]) -> Answer:
    """Read a Chat Completions response.

    Raises:
        Malformed: there is no choice with a message.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Malformed(f"expected choices[0], found {_found(body, 'choices')}")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise Malformed(f"expected choices[0].message, found {str(message)[:120]!r}")
    canonical = _canonical({**_without_nulls(message), "role": "assistant", "content": message.get("content")})
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Answer(
        message=canonical,
        finish_reason=_text(choices[0].get("finish_reason")),
        usage=Usage(
            prompt_tokens=_count(usage, "prompt_tokens"),
            completion_tokens=_count(usage, "completion_tokens"),
            cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens"),
            reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
        ),
        model=_text(body.get("model")),
    )


def responses_request(
    model: str, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], sampling: Sampling
) -> JsonObject:
    body: JsonObject = {"model": model, "input": [item for message in messages for item in _items(message)]}
    if tools:
        body["tools"] = [_flat_tool(tool) for tool in tools]
    options = sampling.model_dump(exclude_none=True, exclude={"seed", "stop"})
    if "max_tokens" in options:
        options["max_output_tokens"] = options.pop("max_tokens")
    body.update(options)
    return body


def _items(message: ChatMessage) -> list[JsonObject]:
    content = message.get("content")
    if message["role"] == "tool":
        output = "" if content is None else _parts(content, "input_text")
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": output}]
    items: list[JsonObject] = []
    if content is not None:
        text_type = "output_text" if message["role"] == "assistant" else "input_text"
        items.append({"role": message["role"], "content": _parts(content, text_type)})
    for call in message.get("tool_calls") or []:
        function = call.get("function")
        if isinstance(function, dict):
            items.append({"type": "function_call", "call_id": call.get("id"), **function})
    return items


def _parts(content: str | list[JsonObject], text_type: str) -> str | list[JsonObject]:
    """Chat content in the Responses API's own part types; parts that both spell alike pass as they are."""
    if isinstance(content, str):
        return content
    parts: list[JsonObject] = []
    for part in content:
        image = part.get("image_url")
        if part.get("type") == "text":
            parts.append({**part, "type": text_type})
        elif isinstance(image, dict):
            parts.append({"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail", "auto")})
        else:
            parts.append(part)
    return parts


def _flat_tool(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    return {"type": "function", **function} if isinstance(function, dict) else tool


def responses_answer(body: Mapping[str, Any]) -> Answer:
    """Read a Responses API response.

    Raises:
        Malformed: there is no output, and no word on why it is incomplete.
    """
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    output = body.get("output")
    if not isinstance(output, list) or not (output or reason):
        raise Malformed(f"expected output[], found {_found(body, 'output')}")
    message = _message_of(output)
    finish = "tool_calls" if "tool_calls" in message else "stop"
    if reason is not None:
        finish = "length" if reason == "max_output_tokens" else str(reason)
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Answer(
        message=message,
        finish_reason=finish,
        usage=Usage(
            prompt_tokens=_count(usage, "input_tokens"),
            completion_tokens=_count(usage, "output_tokens"),
            cached_tokens=_count(usage.get("input_tokens_details"), "cached_tokens"),
            reasoning_tokens=_count(usage.get("output_tokens_details"), "reasoning_tokens"),
        ),
        model=_text(body.get("model")),
    )


def _message_of(output: Sequence[object]) -> ChatMessage:
    """All items of a response as one chat message."""
    texts: list[str] = []
    refusals: list[str] = []
    calls: list[JsonObject] = []
    for item in (item for item in output if isinstance(item, dict)):
        if item.get("type") == "message":
            content = item.get("content")
            parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
            texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
            refusals += [part["refusal"] for part in parts if isinstance(part.get("refusal"), str)]
        elif item.get("type") == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if calls:
        message["tool_calls"] = calls
    if refusals:
        message["refusal"] = "".join(refusals)
    return _canonical(message)


_CHAT_MESSAGE: TypeAdapter[ChatMessage] = TypeAdapter(ChatMessage)


def _canonical(message: Mapping[str, Any]) -> ChatMessage:
    """The message, if it is one that an event can hold."""
    try:
        return _CHAT_MESSAGE.validate_python(message)
    except ValidationError as error:
        raise Malformed(f"expected an assistant message, found {describe(error)}") from None


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _count(holder: object, key: str) -> int:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _found(body: Mapping[str, Any], key: str) -> str:
    """What stands in place of `key`: often a server's error under a status that says all is well."""
    if body.get("error"):
        return f"the error {str(body['error'])[:300]}"
    return repr(body[key])[:120] if key in body else f"only {', '.join(list(body)[:8])[:120] or 'an empty object'}"
