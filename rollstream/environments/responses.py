"""OpenAI Responses requests, as NeMo Gym rows carry them, in the chat form that everything else speaks.

What has no chat counterpart and changes what the agent can do (a hosted tool, an unknown item) is refused, because a task
without it is another task. Reasoning items are left out: they are another model's working.
"""

from collections.abc import Mapping, Sequence

from schemas.values import ChatMessage, JsonObject

ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")


class Unconvertible(ValueError):
    """A request that chat cannot express. The message is one sentence."""


def messages_of(params: Mapping[str, object]) -> list[ChatMessage] | None:
    """`instructions` and `input` as chat messages; None when there are none."""
    instructions, items = params.get("instructions"), params.get("input")
    messages: list[ChatMessage] = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    elif isinstance(items, list):
        for index, item in enumerate(items):
            _append(messages, item, f"responses_create_params.input.{index}")
    elif items is not None:
        raise Unconvertible(f"expected responses_create_params.input as text or a list, found {_kind(items)}")
    return messages or None


def tools_of(tools: object) -> list[JsonObject] | None:
    """Function tools in either form as chat tools; None when there are none."""
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Unconvertible(f"expected tools as a list, found {_kind(tools)}")
    return [_tool(tool, index) for index, tool in enumerate(tools)]


def sampling_of(params: Mapping[str, object]) -> JsonObject:
    """The sampling parameters of a request by our names; absent ones are absent."""
    names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
    return {ours: params[theirs] for theirs, ours in names.items() if params.get(theirs) is not None}


def _append(messages: list[ChatMessage], item: object, where: str) -> None:
    if not isinstance(item, dict):
        raise Unconvertible(f"expected {where} as an object, found {_kind(item)}")
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise Unconvertible(f"expected {where}.role as one of {', '.join(ROLES)}, found {role!r:.80}")
        messages.append({"role": role, "content": _content(item.get("content"), where)})
    elif kind == "function_call":
        call: JsonObject = {
            "id": _text(item, "call_id", where),
            "type": "function",
            "function": {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)},
        }
        # Calls of one turn are items side by side; in chat they are one message, with the text that went before them.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
    elif kind != "reasoning":
        raise Unconvertible(f"expected {where} as a message, function_call or function_call_output, found {kind!r:.80}")


def _content(content: object, where: str) -> str | list[JsonObject]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise Unconvertible(f"expected the content of {where} as text or a list of parts, found {_kind(content)}")
    parts = [_part(part, where) for part in content]
    only = parts[0].get("text") if len(parts) == 1 else None
    return only if isinstance(only, str) else parts


def _part(part: object, where: str) -> JsonObject:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in _TEXT_PARTS:
        return {"type": "text", "text": _text(part, "text", where)}
    if isinstance(part, dict) and kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail") or "auto"}}
    found = repr(kind)[:80] if isinstance(part, dict) else _kind(part)
    raise Unconvertible(f"expected content parts of {where} of type input_text, output_text or input_image, found {found}")


def _tool(tool: object, index: int) -> JsonObject:
    where = f"tools.{index}"
    if not isinstance(tool, dict):
        raise Unconvertible(f"expected {where} as an object, found {_kind(tool)}")
    if tool.get("type") != "function":
        raise Unconvertible(f"expected {where} of type function, found {tool.get('type')!r:.80}")
    if isinstance(tool.get("function"), dict):
        return tool
    function: JsonObject = {"name": _text(tool, "name", where)}
    function |= {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _text(item: Mapping[str, object], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise Unconvertible(f"expected {where}.{name} as text, found {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
