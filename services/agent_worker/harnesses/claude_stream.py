"""What Claude Code prints with `--output-format stream-json --include-partial-messages`, as steps. Pure.

Each block of a message comes as an `assistant` event of its own, with the message's id; only the `message_delta` among the
partial ones has the usage and why the message ended. What the program says in the model's place when a call fails
(`<synthetic>`) is no step.
"""

from dataclasses import replace
from datetime import datetime
from typing import cast

import orjson

from schemas.values import ChatMessage, JsonObject, Usage
from services.agent_worker.harnesses.cli import STOPS, Ending, Step, completion, count, objects, tool_call

SYNTHETIC = "<synthetic>"
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


class ClaudeStream:
    """`StreamParser` of one run."""

    def __init__(self, started_at: datetime, cost_before: float = 0.0) -> None:
        self._boundary = started_at
        """Since when the model may have been at work on what comes next."""
        self._cost_before = cost_before
        self._message: JsonObject = {}
        self._blocks: list[JsonObject] = []
        self._escaped = False
        self._held: Step | None = None
        self._results: list[ChatMessage] = []
        self._finish: str | None = None
        self._failed: str | None = None
        self._session: str | None = None
        self.cost_usd = cost_before
        """Of this run and those that it goes on from."""

    def feed(self, line: JsonObject, escaped: bool, at: datetime) -> list[Step]:
        if isinstance(line.get("session_id"), str):
            self._session = cast("str", line["session_id"])
        if line.get("parent_tool_use_id"):
            # A subagent's: its result is a tool's.
            return []
        kind = line.get("type")
        if kind == "stream_event":
            return self._partial(_object(line.get("event")), at)
        if kind == "assistant":
            return self._block(_object(line.get("message")), escaped, at)
        if kind == "user":
            steps = [*self._close(at), *self._release()]
            self._results += _results(_object(line.get("message")))
            self._boundary = at
            return steps
        if kind == "result":
            return self._result(line, at)
        return []

    def end(self, at: datetime) -> Ending:
        steps = [*self._close(at), *self._release()]
        # It asks a few times for the rest of an answer that was cut short, and then gives up.
        stop = STOPS.get(self._finish) if self._failed else None
        return Ending(steps, self._take_results(), self._failed, self._session, stop)

    def _partial(self, event: JsonObject, at: datetime) -> list[Step]:
        kind = event.get("type")
        if kind == "message_start":
            steps = [*self._close(at), *self._release()]
            self._message = dict(_object(event.get("message")))
            return steps
        if kind == "message_delta" and self._message:
            delta, usage = _object(event.get("delta")), _object(event.get("usage"))
            self._message["stop_reason"] = delta.get("stop_reason")
            self._message["usage"] = {**_object(self._message.get("usage")), **usage}
        if kind == "message_stop":
            return self._close(at)
        return []

    def _block(self, message: JsonObject, escaped: bool, at: datetime) -> list[Step]:
        if message.get("model") == SYNTHETIC:
            return []
        steps = []
        if message.get("id") != self._message.get("id"):
            steps = [*self._close(at), *self._release()]
            self._message = {name: value for name, value in message.items() if name != "content"}
        self._blocks += objects(message.get("content"))
        self._escaped |= escaped
        return steps

    def _close(self, at: datetime) -> list[Step]:
        """The message under way is whole. One that calls tools is a step at once; the last one waits for what the run cost."""
        if not self._blocks:
            return []
        before = self._release()
        reason = self._message.get("stop_reason")
        finish = self._finish = _FINISH.get(reason, reason) if isinstance(reason, str) else None
        step = Step(
            completion(
                _chat(self._blocks),
                {**self._message, "content": self._blocks},
                model=str(self._message.get("model") or ""),
                started_at=self._boundary,
                at=at,
                finish_reason=finish,
                usage=_usage(_object(self._message.get("usage"))),
                escaped=self._escaped,
            ),
            self._take_results(),
        )
        self._message, self._blocks, self._escaped, self._boundary = {}, [], False, at
        if step.completion.message.get("tool_calls"):
            return [*before, step]
        self._held = step
        return before

    def _release(self) -> list[Step]:
        held, self._held = self._held, None
        return [] if held is None else [held]

    def _take_results(self) -> list[ChatMessage]:
        results, self._results = self._results, []
        return results

    def _result(self, line: JsonObject, at: datetime) -> list[Step]:
        steps = self._close(at)
        if line.get("is_error"):
            self._failed = str(line.get("result") or line.get("errors") or line.get("subtype") or "an error")
        else:
            self._failed = ""
        held, self._held = self._held, None
        total, known = line.get("total_cost_usd"), _prices_known(_object(line.get("modelUsage")))
        cost: float | None = None
        if known and isinstance(total, int | float):
            cost = max(0.0, total - self._cost_before)
            self.cost_usd = float(total)
        if held is None:
            return steps
        told = {name: line[name] for name in ("total_cost_usd", "modelUsage", "duration_api_ms", "num_turns") if name in line}
        answer = replace(held.completion, response={**held.completion.response, "result": told}, cost_usd=cost)
        return [*steps, Step(answer, held.new_messages)]


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _chat(blocks: list[JsonObject]) -> ChatMessage:
    """A message of Anthropic's in OpenAI's form."""
    texts = [str(block["text"]) for block in blocks if block.get("type") == "text" and block.get("text")]
    thoughts = [str(block["thinking"]) for block in blocks if block.get("type") == "thinking" and block.get("thinking")]
    calls = [
        tool_call(str(block.get("id") or ""), str(block.get("name") or ""), orjson.dumps(block.get("input") or {}).decode())
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    message: dict[str, object] = {"role": "assistant", "content": "\n\n".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return cast("ChatMessage", message)


def _results(message: JsonObject) -> list[ChatMessage]:
    """Results of tools, as chat messages."""
    return [
        {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": _text(block.get("content"))}
        for block in objects(message.get("content"))
        if block.get("type") == "tool_result"
    ]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in objects(content))


def _usage(usage: JsonObject) -> Usage:
    cached = count(usage, "cache_read_input_tokens")
    return Usage(
        prompt_tokens=count(usage, "input_tokens") + count(usage, "cache_creation_input_tokens") + cached,
        completion_tokens=count(usage, "output_tokens"),
        cached_tokens=cached,
        reasoning_tokens=count(usage.get("output_tokens_details"), "thinking_tokens"),
    )


def _prices_known(models: JsonObject) -> bool:
    """Whether the program knows what the models cost, and does not take some model's price for another's."""
    return bool(models) and all(_object(model).get("costBasis") != "unknown" for model in models.values())
