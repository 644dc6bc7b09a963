"""Requests and responses of the two OpenAI APIs, to and from the canonical chat message. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from schemas import values
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
        # Bytes that are not UTF-8 are still an answer: keep them, escaped.
        body, changed = _parse(raw.decode("utf-8", "backslashreplace").encode()), True
    except ValueError as error:
        raise Malformed(f"expected JSON, found {raw[:80]!r} ({error})") from None
    if not isinstance(body, dict):
        raise Malformed(f"expected a JSON object, found a JSON {type(body).__name__}")
    if len(raw) > max_text_bytes:
        body, changed = _cut(body, max_text_bytes), True
    return body, changed


def _parse(raw: bytes) -> Any:
    try:
        return values.parse_json(raw)[0]
    except ValueError as error:
        raise Malformed(f"expected JSON, found {raw[:80]!r} ({error})") from None


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
        raise Malformed(f"expected choices[0].message, found {message!r}")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise Malformed(f"expected text in choices[0].message.content, found {type(content).__name__}")
    canonical = cast("ChatMessage", {**_without_nulls(message), "role": "assistant", "content": content})
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
    if message["role"] == "tool":
        output = message.get("content") or ""
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": output}]
    items: list[JsonObject] = []
    if message.get("content") is not None:
        items.append({"role": message["role"], "content": message["content"]})
    for call in message.get("tool_calls") or []:
        function = call.get("function")
        if isinstance(function, dict):
            items.append({"type": "function_call", "call_id": call.get("id"), **function})
    return items


def _flat_tool(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    return {"type": "function", **function} if isinstance(function, dict) else tool


def responses_answer(body: Mapping[str, Any]) -> Answer:
    """Read a Responses API response.

    Raises:
        Malformed: there is no output.
    """
    output = body.get("output")
    if not isinstance(output, list) or not output:
        raise Malformed(f"expected output[], found {_found(body, 'output')}")
    texts: list[str] = []
    calls: list[JsonObject] = []
    for item in (item for item in output if isinstance(item, dict)):
        if item.get("type") == "message":
            parts = item.get("content") or []
            texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        elif item.get("type") == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
    message: ChatMessage = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if calls:
        message["tool_calls"] = calls
    details = body.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    finish = {"max_output_tokens": "length", None: "tool_calls" if calls else "stop"}.get(reason, reason)
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


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _count(holder: object, key: str) -> int:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _found(body: Mapping[str, Any], key: str) -> str:
    return repr(body[key])[:120] if key in body else f"only {', '.join(list(body)[:8]) or 'an empty object'}"
