"""What Codex prints with `exec --json`, as steps. Pure.

An item (a command, a change of files, a message) is a step, since the program does not tell its model calls apart; only a
message that a command follows was said together with it, or the turn would have ended. Usage comes once, at the end of a turn,
counts on from the runs before, and stands with the turn's last step. The first item is always a complaint about an unknown
model, which means nothing.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import cast

import orjson

from schemas.episode import StopReason
from schemas.values import ChatMessage, JsonObject, Usage
from services.agent_worker.harnesses.cli import Ending, Step, completion, count, tool_call

_INCOMPLETE = re.compile(r"Incomplete response returned, reason: (\w+)")
_STOPS: dict[str, StopReason] = {"max_output_tokens": "length", "content_filter": "content_filter"}
TOLD = frozenset({"agent_message", "reasoning", "error", "todo_list"})
"""Items that are no calls of tools."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A message that may be a turn's last, or go with a command."""

    message: ChatMessage
    item: JsonObject
    started_at: datetime
    at: datetime
    escaped: bool
    results: list[ChatMessage]


class CodexStream:
    """`StreamParser` of one run."""

    def __init__(self, started_at: datetime, model: str, before: Usage | None = None) -> None:
        self._boundary = started_at
        self._model = model
        self._before = before or Usage()
        self.total = self._before
        """Usage of this run and those that it goes on from."""
        self._held: _Held | None = None
        self._called: set[str] = set()
        self._results: list[ChatMessage] = []
        self._thoughts: list[str] = []
        self._failed: str | None = None
        self._stop: StopReason | None = None
        self._thread: str | None = None

    def feed(self, line: JsonObject, escaped: bool, at: datetime) -> list[Step]:
        kind = line.get("type")
        if kind == "thread.started":
            self._thread = str(line.get("thread_id") or "") or None
        elif kind == "turn.started":
            self._boundary = at
        elif kind == "turn.failed":
            error = line.get("error")
            self._failed = str(error.get("message") if isinstance(error, dict) else error) or "a turn failed"
            cut_short = _INCOMPLETE.search(self._failed)
            self._stop = None if cut_short is None else _STOPS.get(cut_short[1])
            return self._release(None)
        elif kind == "turn.completed":
            self._failed = ""
            return self._release(self._usage(line.get("usage")))
        elif kind in ("item.started", "item.completed"):
            item = line.get("item")
            if isinstance(item, dict):
                return self._item(item, kind == "item.completed", escaped, at)
        return []

    def end(self, at: datetime) -> Ending:
        steps = self._release(None)
        return Ending(steps, self._take_results(), self._failed, self._thread, self._stop)

    def _item(self, item: JsonObject, done: bool, escaped: bool, at: datetime) -> list[Step]:
        kind, name = str(item.get("type") or ""), str(item.get("id") or "")
        if kind in TOLD:
            return self._told(kind, item, escaped, at) if done else []
        steps: list[Step] = []
        if name not in self._called:
            self._called.add(name)
            steps = [self._calling(_call(kind, name, item), item, at, escaped)]
        if done:
            self._results.append({"role": "tool", "tool_call_id": name, "content": _result(kind, item)})
            self._boundary = at
        return steps

    def _told(self, kind: str, item: JsonObject, escaped: bool, at: datetime) -> list[Step]:
        if kind == "reasoning":
            self._thoughts.append(str(item.get("text") or ""))
        if kind != "agent_message":
            return []
        steps = self._release(None)
        message = self._said({"role": "assistant", "content": str(item.get("text") or "")})
        self._held = _Held(message, item, self._boundary, at, escaped, self._take_results())
        return steps

    def _said(self, message: ChatMessage) -> ChatMessage:
        """A message with what was thought before it."""
        thoughts, self._thoughts = self._thoughts, []
        if not thoughts:
            return message
        return cast("ChatMessage", {**message, "reasoning_content": "\n\n".join(thoughts)})

    def _calling(self, message: ChatMessage, item: JsonObject, at: datetime, escaped: bool) -> Step:
        """The call of a tool, with what was said right before it."""
        response: JsonObject = {"item": item}
        results = self._results
        held, self._held = self._held, None
        if held is not None:
            message["content"] = held.message.get("content")
            response = {"item": item, "said": held.item}
            escaped, results = escaped or held.escaped, [*held.results, *self._results]
        self._results = []
        started_at, self._boundary = self._boundary, at
        made = completion(
            self._said(message),
            response,
            model=self._model,
            started_at=started_at,
            at=at,
            finish_reason="tool_calls",
            escaped=escaped,
        )
        return Step(made, results)

    def _release(self, usage: Usage | None) -> list[Step]:
        """The message that waits to see whether the turn ends with it; with its usage, if it does."""
        held, self._held = self._held, None
        if held is None:
            if usage is None or usage == Usage():
                return []
            # A turn that ends without a message has cost something nevertheless.
            nothing: ChatMessage = {"role": "assistant", "content": ""}
            held = _Held(nothing, {}, self._boundary, self._boundary, False, self._take_results())
        response: JsonObject = {"item": held.item} if usage is None else {"item": held.item, "usage": usage.model_dump()}
        made = completion(
            held.message,
            response,
            model=self._model,
            started_at=held.started_at,
            at=held.at,
            finish_reason="stop",
            usage=usage,
            escaped=held.escaped,
        )
        return [Step(made, held.results)]

    def _usage(self, told: object) -> Usage:
        """What this run has used."""
        self.total = Usage(
            prompt_tokens=count(told, "input_tokens"),
            completion_tokens=count(told, "output_tokens"),
            cached_tokens=count(told, "cached_input_tokens"),
            reasoning_tokens=count(told, "reasoning_output_tokens"),
        )
        before = self._before
        return Usage(
            prompt_tokens=max(0, self.total.prompt_tokens - before.prompt_tokens),
            completion_tokens=max(0, self.total.completion_tokens - before.completion_tokens),
            cached_tokens=max(0, self.total.cached_tokens - before.cached_tokens),
            reasoning_tokens=max(0, self.total.reasoning_tokens - before.reasoning_tokens),
        )

    def _take_results(self) -> list[ChatMessage]:
        results, self._results = self._results, []
        return results


_OUTCOME = frozenset({"id", "type", "status", "aggregated_output", "exit_code", "result", "error"})
"""Fields of an item that tell what came of it."""


def _call(kind: str, name: str, item: JsonObject) -> ChatMessage:
    """An item as the call of a tool that is called like it."""
    arguments = {key: value for key, value in item.items() if key not in _OUTCOME}
    call = tool_call(name, kind, orjson.dumps(arguments).decode())
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(kind: str, item: JsonObject) -> str:
    if kind == "command_execution":
        output, code = str(item.get("aggregated_output") or ""), item.get("exit_code")
        return output if code == 0 else f"{output}\n[exit code {code}]"
    outcome = {key: item[key] for key in ("status", "result", "error") if item.get(key) is not None}
    return orjson.dumps(outcome).decode()
