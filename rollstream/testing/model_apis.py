"""Scripted replies in the shapes of the APIs that servers speak (Chat Completions, Responses, Messages), whole and streamed."""

import json
from collections.abc import Iterator

from rollstream.testing.replies import CREATED, RawText, Request, Text, ToolCalls
from schemas.values import JsonObject


def body_of(reply: Text | ToolCalls | RawText, request: Request) -> bytes:
    """A whole response in the shape of the API that was asked."""
    make = {"chat": chat_body, "messages": messages_body}.get(request.api, responses_body)
    if isinstance(reply, RawText):
        return json.dumps(make(Text(_PLACE), request)).encode().replace(_PLACE.encode(), reply.raw)
    # The standard library writes what strict JSON forbids: NaN, and escapes of lone surrogates.
    return json.dumps(make(reply, request)).encode()


_PLACE = "PLACE-OF-RAW-TEXT"


def chat_body(reply: Text | ToolCalls, request: Request) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": reply.text, "refusal": None}
    finish_reason, extra = ("tool_calls", {}) if isinstance(reply, ToolCalls) else (reply.finish_reason, reply.extra)
    if isinstance(reply, ToolCalls):
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text()}}
            for call in reply.calls
        ]
    usage = reply.usage
    return {
        "id": f"chatcmpl-{request.number}",
        "object": "chat.completion",
        "created": CREATED,
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
        **extra,
    }


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def responses_body(reply: Text | ToolCalls, request: Request) -> JsonObject:
    output: list[JsonObject] = []
    if reply.text is not None:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        output.append({"type": "message", "id": "msg-0", "role": "assistant", "status": "completed", "content": [part]})
    reason, extra = (None, {}) if isinstance(reply, ToolCalls) else (_INCOMPLETE.get(reply.finish_reason), reply.extra)
    if isinstance(reply, ToolCalls):
        output += [
            {
                "type": "function_call",
                "id": f"fc-{index}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments_text(),
                "status": "completed",
                **({"namespace": call.namespace} if call.namespace else {}),
            }
            for index, call in enumerate(reply.calls)
        ]
    usage = reply.usage
    return {
        "id": f"resp-{request.number}",
        "object": "response",
        "created_at": CREATED,
        "model": request.model,
        "status": "completed" if reason is None else "incomplete",
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        **extra,
    }


def messages_body(reply: Text | ToolCalls, request: Request) -> JsonObject:
    content: list[JsonObject] = [{"type": "text", "text": reply.text}] if reply.text is not None else []
    reason, extra = ("tool_use", {}) if isinstance(reply, ToolCalls) else (_STOP[reply.finish_reason], reply.extra)
    if isinstance(reply, ToolCalls):
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments_text())}
            for call in reply.calls
        ]
    usage = reply.usage
    return {
        "id": f"msg-{request.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
        },
        **extra,
    }


_STOP = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}


def events_of(reply: Text | ToolCalls, request: Request) -> Iterator[bytes]:
    """A reply as server-sent events."""
    if request.api == "messages":
        yield from _messages_events(messages_body(reply, request))
    elif request.api == "responses":
        yield from _responses_events(responses_body(reply, request))
    else:
        yield from _chat_events(chat_body(reply, request))


def _event(data: JsonObject, name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def _named(name: str, data: JsonObject) -> bytes:
    return _event({"type": name, **data}, name)


def _messages_events(body: JsonObject) -> Iterator[bytes]:
    usage, content = body["usage"], body["content"]
    assert isinstance(usage, dict)
    assert isinstance(content, list)
    begun = {**body, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    yield _named("message_start", {"message": begun})
    for index, block in enumerate(content):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        yield _named("content_block_start", {"index": index, "content_block": empty})
        if is_text:
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _named("content_block_delta", {"index": index, "delta": delta})
        yield _named("content_block_stop", {"index": index})
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield _named("message_delta", {"delta": ended, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _named("message_stop", {})


def _responses_events(body: JsonObject) -> Iterator[bytes]:
    output = body["output"]
    assert isinstance(output, list)
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    yield _named("response.created", {"sequence_number": 0, "response": begun})
    number = 1
    for index, item in enumerate(output):
        for name, told in (("added", {**item, "status": "in_progress"}), ("done", item)):
            yield _named(f"response.output_item.{name}", {"sequence_number": number, "output_index": index, "item": told})
            number += 1
    yield _named(f"response.{body['status']}", {"sequence_number": number, "response": body})


def _chat_events(body: JsonObject) -> Iterator[bytes]:
    choices = body["choices"]
    assert isinstance(choices, list)
    choice = choices[0]
    message = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
    delta = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
    chunk = {**body, "object": "chat.completion.chunk"}
    yield _event({**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None})
    yield _event({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    yield b"data: [DONE]\n\n"
