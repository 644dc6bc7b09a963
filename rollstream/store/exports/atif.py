"""ATIF: one document an attempt, in Harbor's Agent Trajectory Interchange Format.

Messages become steps: a tool's message is no step but an observation of the step that called it. Arguments of tool calls are
objects there; what a model wrote that is no JSON object stands under `raw_arguments`.

Source: RFC 0001 of the Harbor project, version 1.6, which added content parts. Later versions read it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import orjson

from rollstream.store.exports.grpo import UnreadableTokens, unpack
from rollstream.store.exports.messages import called
from rollstream.store.exports.rows import Duplicates, Row
from rollstream.store.exports.selection import Attempt, Group
from schemas.rollout import RolloutScored
from schemas.step import Call
from schemas.values import JsonObject

VERSION = "ATIF-v1.6"

_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class AtifRows:
    """Documents of every attempt that said something, whatever became of it: `extra` has status and reward."""

    def __init__(self, *, dedupe: bool) -> None:
        self.left_out: Counter[str] = Counter()
        self._duplicates = Duplicates(dedupe)

    def observe(self, group: Group) -> None:
        """Documents have no columns."""

    def rows(self, group: Group) -> Iterator[Row]:
        self.left_out["unreadable"] += group.unreadable
        for attempt in group.attempts:
            steps = steps_of(attempt.record)
            if not steps:
                self.left_out["without messages"] += 1
            elif self._duplicates.repeats([step.get("message") for step in steps] + [step.get("tool_calls") for step in steps]):
                self.left_out["duplicate"] += 1
            else:
                yield document(attempt, steps)

    def schema(self) -> None:
        return None


def document(attempt: Attempt, steps: list[Row]) -> Row:
    """One ATIF trajectory."""
    record = attempt.record
    usage = record.usage
    return {
        "schema_version": VERSION,
        "session_id": record.session,
        "agent": _agent(record),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": usage.prompt_tokens,
            "total_completion_tokens": usage.completion_tokens,
            "total_cached_tokens": usage.cached_tokens,
            "total_steps": len(steps),
        },
        "extra": {
            "run_id": record.run,
            "environment": record.environment,
            "environment_version": record.versions.environment,
            "dataset": attempt.dataset,
            "task_id": attempt.task,
            "group_id": record.group.id,
            "group_index": record.group.index,
            "group_size": record.group.size,
            "rollout_id": record.rollout,
            "status": record.status,
            "stop_reason": record.stop_reason,
            "reward": record.reward,
            "success": record.success,
            "reward_components": record.reward_components,
        },
    }


def _agent(record: RolloutScored) -> Row:
    composition = record.composition
    return _present(
        name=record.versions.harness or (composition.harness if composition else "unknown"),
        version=record.versions.harness_version or "unknown",
        model_name=record.versions.model or (composition.models.get("policy") if composition else None),
        tool_definitions=record.tools or None,
    )


def steps_of(record: RolloutScored) -> list[Row]:
    """The steps of a transcript."""
    steps: list[Row] = []
    metrics = _metrics(record)
    for message in record.messages:
        raw: Mapping[str, object] = message
        role = raw.get("role")
        if role in ("tool", "function"):
            _observe(steps, raw)
        else:
            step = _step(len(steps) + 1, _SOURCES.get(str(role), "user"), raw)
            steps.append(step | (next(metrics, {}) if role == "assistant" else {}))
    return steps


def _step(number: int, source: str, message: Mapping[str, object]) -> Row:
    calls = message.get("tool_calls") if source == "agent" else None
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return _present(
        step_id=number,
        source=source,
        message=_content(message.get("content")),
        reasoning_content=reasoning if source == "agent" and isinstance(reasoning, str) else None,
        tool_calls=[_tool_call(number, n, call) for n, call in enumerate(calls)] if isinstance(calls, list) and calls else None,
    )


def _tool_call(step: int, number: int, call: JsonObject) -> Row:
    name, arguments = called(call)
    return {
        "tool_call_id": str(call.get("id") or f"call_{step}_{number}"),
        "function_name": name,
        "arguments": _arguments(arguments),
    }


def _arguments(text: str) -> JsonObject:
    try:
        parsed = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"raw_arguments": text}


def _observe(steps: list[Row], message: Mapping[str, object]) -> None:
    """Add a tool's message to the step that called it."""
    if not steps or steps[-1]["source"] == "user":
        steps.append({"step_id": len(steps) + 1, "source": "system", "message": ""})
    calls = steps[-1].get("tool_calls")
    known = [call["tool_call_id"] for call in calls] if isinstance(calls, list) else []
    call_id = message.get("tool_call_id")
    result = _present(source_call_id=call_id if call_id in known else None, content=_content(message.get("content")))
    observation = steps[-1].setdefault("observation", {"results": []})
    assert isinstance(observation, dict)
    observation["results"].append(result)


def _content(content: object) -> object:
    """A text, or parts where there is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part) for part in content] if isinstance(content, list) else [_text_part(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts


def _part(part: object) -> Row:
    if isinstance(part, dict) and isinstance(text := part.get("text"), str):
        return {"type": "text", "text": text}
    image = part.get("image_url") if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else image
    media_type = _media_type(url) if isinstance(url, str) else None
    return {"type": "image", "source": {"media_type": media_type, "path": url}} if media_type else _text_part(part)


def _text_part(part: object) -> Row:
    """What ATIF has no part for, spelled out."""
    return {"type": "text", "text": orjson.dumps(part).decode()}


def _media_type(url: str) -> str | None:
    """Of an image at a `data:` URL or one with a usual suffix."""
    path = url.partition("?")[0].lower().replace(".jpg", ".jpeg")
    return next((one for one in _IMAGES if url.startswith(f"data:{one}") or path.endswith(f".{one[6:]}")), None)


def _metrics(record: RolloutScored) -> Iterator[Row]:
    """What each call of the policy cost, in order; nothing where calls and answers do not match one to one."""
    answers = sum(message.get("role") == "assistant" for message in record.messages)
    if len(record.calls) != answers:
        return
    sampled = _sampled(record)
    for number, call in enumerate(record.calls):
        yield {
            "timestamp": call.started_at.isoformat(),
            "model_name": call.model,
            "metrics": _present(**_usage(call), **sampled.get(number, {})),
        }


def _usage(call: Call) -> Row:
    usage = call.usage
    extra = _present(finish_reason=call.finish_reason, duration_s=call.duration_s, policy_version=call.policy_version)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "extra": extra,
    }


def _sampled(record: RolloutScored) -> dict[int, Row]:
    """By call, the tokens that it sampled and their log probabilities, where they were captured."""
    found: dict[int, Row] = {}
    for sequence in record.sequences:
        try:
            tokens = unpack(sequence.token_ids, "i")
            logprobs = unpack(sequence.logprobs, "f") if sequence.logprobs is not None else None
        except UnreadableTokens:
            continue
        for start, end, call in sequence.spans:
            found[call] = _present(
                completion_token_ids=[*_list(found, call, "completion_token_ids"), *tokens[start:end]],
                logprobs=[*_list(found, call, "logprobs"), *logprobs[start:end]] if logprobs else None,
            )
    return found


def _list(found: dict[int, Row], call: int, name: str) -> Iterable[object]:
    values = found.get(call, {}).get(name)
    return values if isinstance(values, list) else []


def _present(**values: object) -> Row:
    """The fields that have a value: ATIF leaves the others out."""
    return {name: value for name, value in values.items() if value is not None}
