"""`tools`: the model calls the environment's tools until it says something without calling any.

A call that cannot be carried out (arguments that are no JSON object, a tool that nobody has) is answered to the model at once:
it is the model's mistake, and its own to mend.
"""

from collections.abc import Sequence
from typing import ClassVar

from rollstream.models.protocol import ContextOverflow
from schemas.action import ToolCall
from schemas.episode import StopReason
from schemas.session import SessionReady, Submission
from schemas.values import ChatMessage, JsonObject, parse_json, text_of, tool_names
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Mistake, Models, Turn

MAX_CALLS = 64
"""Carried out of one answer; a model that makes more has lost its thread."""
MAX_ARGUMENTS_BYTES = 1024 * 1024
_STOP: dict[str | None, StopReason] = {"length": "length", "content_filter": "content_filter"}


class ToolsHarness:
    name: ClassVar[str] = "tools"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = Capabilities(interactions=frozenset({"single_turn", "tools"}), tools=True)

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> "ToolsSession":
        return ToolsSession(models, descriptor.tools)


class ToolsSession:
    def __init__(self, models: Models, tools: Sequence[JsonObject]) -> None:
        self._models = models
        self._tools = list(tools)
        self._names = tool_names(tools)
        self._context: list[ChatMessage] = []
        self._answer = ""

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        self._context += observation
        try:
            completion = await self._models.complete(self._context, self._tools)
        except ContextOverflow:
            return Turn([], "context_overflow")
        message = completion.message
        self._answer = text_of(message) or self._answer
        calls = message.get("tool_calls") or []
        actions = [
            read_call(call, self._names) if number < MAX_CALLS else _refused(call, f"at most {MAX_CALLS} calls are carried out")
            for number, call in enumerate(calls)
        ]
        self._context.append(_fit_for_servers(message, actions))
        # An answer that was cut short may have lost the end of its last call: nothing of it is carried out.
        stop = _STOP.get(completion.finish_reason)
        if stop is not None or not calls:
            return Turn([message], stop or "completed")
        return Turn([message], None, actions)

    async def close(self) -> Submission:
        return Submission(text=self._answer)


def read_call(call: JsonObject, known: frozenset[str]) -> ToolCall | Mistake:
    """One of the tool calls of an answer as an action, or what to tell the model of it."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return _refused(call, "expected a call of a function with a name")
    name = function["name"]
    if name not in known:
        return _refused(call, f"no tool is called {name!r:.100}; there are {', '.join(sorted(known)) or 'none'}")
    try:
        arguments = _arguments(function.get("arguments"))
    except ValueError as error:
        return _refused(call, f"expected the arguments of {name} as a JSON object, found {error}")
    return ToolCall(id=_id_of(call), name=name, arguments=arguments)


def _arguments(given: object) -> JsonObject:
    """Arguments as the object they should be.

    Raises:
        ValueError: they are none; the message says what they are.
    """
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        raise ValueError(f"a {type(given).__name__}")
    raw = given.encode("utf-8", "replace")
    if len(raw) > MAX_ARGUMENTS_BYTES:
        raise ValueError(f"{len(raw)} bytes, of which at most {MAX_ARGUMENTS_BYTES} are read")
    try:
        parsed, _ = parse_json(raw)
    except ValueError as error:
        raise ValueError(f"{len(raw)} bytes that are not ({str(error)[:200]})") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"a JSON {type(parsed).__name__}")
    return parsed


def _refused(call: JsonObject, why: str) -> Mistake:
    return Mistake({"role": "tool", "tool_call_id": _id_of(call), "content": f"error: {why}"})


def _id_of(call: JsonObject) -> str:
    return str(call.get("id") or "")


def _fit_for_servers(message: ChatMessage, actions: Sequence[ToolCall | Mistake]) -> ChatMessage:
    """An answer as it stands in the next prompt: many servers fail on a history whose arguments are no JSON objects."""
    if not any(isinstance(action, Mistake) for action in actions):
        return message
    calls: list[JsonObject] = []
    for call, action in zip(message.get("tool_calls") or [], actions, strict=True):
        function = call.get("function")
        if isinstance(action, Mistake) and isinstance(function, dict) and not _is_object(function.get("arguments")):
            call = {**call, "function": {**function, "arguments": "{}"}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _is_object(arguments: object) -> bool:
    try:
        _arguments(arguments)
    except ValueError:
        return False
    return isinstance(arguments, str) and arguments != ""
