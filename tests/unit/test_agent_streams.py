"""What programs of agents print, as steps: streams that the real ones printed, and what could come instead."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rollstream.errors import ModelFailure, Refused
from rollstream.models.protocol import ContextOverflow
from rollstream.sandboxes.protocol import ExecResult, Output
from schemas.values import Usage
from services.agent_worker.harnesses.claude_stream import ClaudeStream
from services.agent_worker.harnesses.cli import (
    MAX_LINE_BYTES,
    AgentFailed,
    Ending,
    Lines,
    Step,
    StreamParser,
    instruction_of,
    judge,
)
from services.agent_worker.harnesses.codex_stream import CodexStream
from services.agent_worker.harnesses.command import JsonlStream, fill
from services.agent_worker.harnesses.protocol import AgentBox

AT = datetime(2026, 1, 1, tzinfo=UTC)
STREAMS = Path(__file__).with_name("streams")


def clock() -> Iterator[datetime]:
    at = AT
    while True:
        at += timedelta(seconds=1)
        yield at


def heard(parser: StreamParser, raw: bytes, piece: int = 100) -> tuple[list[Step], Ending]:
    """All steps of a stream that comes in pieces, those at its end as well, and the end."""
    lines, times, steps = Lines(100_000), clock(), []
    for start in range(0, len(raw), piece):
        for line, escaped in lines.feed(raw[start : start + piece]):
            steps += parser.feed(line, escaped, next(times))
    ending = parser.end(next(times))
    return [*steps, *ending.steps], ending


def recorded(name: str) -> bytes:
    return (STREAMS / f"{name}.jsonl").read_bytes()


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


# Claude Code.


def test_claude_codes_messages_are_steps_with_their_tools_results_and_usage() -> None:
    steps, ending = heard(ClaudeStream(AT), recorded("claude_command"))
    first, last = steps
    assert first.completion.message["content"] == "I'll run it."
    (call,) = first.completion.message["tool_calls"]
    assert (call["type"], call["id"]) == ("function", "call-1")
    function = call["function"]
    assert isinstance(function, dict)
    assert (function["name"], json.loads(function["arguments"])["command"]) == ("Bash", "cat calc.py; ls missing")
    (result,) = last.new_messages
    assert (result["role"], result["tool_call_id"]) == ("tool", "call-1")
    assert "return a - b" in str(result["content"])
    assert last.completion.message == {"role": "assistant", "content": "It is mended."}
    assert [step.completion.finish_reason for step in steps] == ["tool_calls", "stop"]
    assert [step.completion.usage for step in steps] == [Usage(prompt_tokens=10, completion_tokens=5)] * 2
    assert [step.completion.model for step in steps] == ["small-1b"] * 2
    assert (ending.failed, ending.left) == ("", [])
    assert ending.resume


def test_claude_codes_two_blocks_of_one_message_are_one_step() -> None:
    steps, _ = heard(ClaudeStream(AT), recorded("claude_command"))
    content = steps[0].completion.response["content"]
    assert isinstance(content, list)
    assert [block["type"] for block in content] == ["text", "tool_use"]


def test_a_price_that_claude_code_only_guesses_is_no_cost() -> None:
    steps, _ = heard(ClaudeStream(AT), recorded("claude_command"))
    assert [step.completion.cost_usd for step in steps] == [None, None]


def test_claude_codes_cost_is_of_this_run_and_stands_with_its_last_step() -> None:
    known = recorded("claude_command").replace(b'"costBasis":"unknown"', b'"costBasis":"list"')
    total = json.loads(known.splitlines()[-1])["total_cost_usd"]
    steps, _ = heard(ClaudeStream(AT, cost_before=total / 4), known)
    assert steps[0].completion.cost_usd is None
    assert steps[1].completion.cost_usd == pytest.approx(total * 3 / 4)


def test_what_claude_code_says_in_the_place_of_its_model_is_no_step() -> None:
    steps, ending = heard(ClaudeStream(AT), recorded("claude_refused"))
    assert steps == []
    assert ending.failed is not None
    assert "401" in ending.failed


def test_an_answer_of_claude_codes_model_that_was_cut_short_is_an_outcome() -> None:
    raw = recorded("claude_command").replace(b'"stop_reason":"end_turn"', b'"stop_reason":"max_tokens"')
    raw = raw.replace(b'"is_error":false,"num_turns"', b'"is_error":true,"num_turns"')
    steps, ending = heard(ClaudeStream(AT), raw)
    assert steps[-1].completion.finish_reason == "length"
    assert judge("claude_code", ended(1), ending, box(None)) == "length"


def test_a_step_of_claude_code_is_told_before_its_tool_has_run() -> None:
    before, _, _ = recorded("claude_command").partition(b'{"type":"user"')
    lines, parser, times, steps = Lines(100_000), ClaudeStream(AT), clock(), []
    for line, escaped in lines.feed(before):
        steps += parser.feed(line, escaped, next(times))
    assert [step.completion.finish_reason for step in steps] == ["tool_calls"]


def test_a_stream_of_claude_code_that_breaks_off_keeps_what_it_had() -> None:
    raw = recorded("claude_command")
    cut = raw[: raw.index(b'"type":"result"') - 2_000]
    steps, ending = heard(ClaudeStream(AT), cut)
    assert steps[0].completion.message["content"] == "I'll run it."
    assert ending.failed is None


def test_a_subagent_of_claude_code_makes_no_steps() -> None:
    raw = recorded("claude_command").replace(b'"parent_tool_use_id":null', b'"parent_tool_use_id":"toolu_1"')
    assert heard(ClaudeStream(AT), raw)[0] == []


# Codex.


def test_codexes_items_are_steps_and_the_turns_usage_stands_with_the_last() -> None:
    steps, ending = heard(CodexStream(AT, "small-1b"), recorded("codex_command"))
    first, last = steps
    assert first.completion.message["content"] == "I'll run it."
    (call,) = first.completion.message["tool_calls"]
    function = call["function"]
    assert isinstance(function, dict)
    assert function["name"] == "command_execution"
    assert json.loads(function["arguments"]) == {"command": "/bin/bash -lc 'cat calc.py; ls missing'"}
    (result,) = last.new_messages
    assert str(result["content"]).endswith("[exit code 2]")
    assert result["tool_call_id"] == call["id"]
    assert last.completion.message == {"role": "assistant", "content": "It is mended."}
    assert [step.completion.usage for step in steps] == [Usage(), Usage(prompt_tokens=20, completion_tokens=10)]
    assert ending.failed == ""
    assert ending.resume == "01a22aed-fc96-7e21-9ef1-d209777d371b"


def test_codexes_usage_counts_on_and_only_what_is_new_is_this_runs() -> None:
    first = CodexStream(AT, "small-1b")
    heard(first, recorded("codex_command"))
    steps, _ = heard(CodexStream(AT, "small-1b", first.total), recorded("codex_command_again"))
    assert [step.completion.usage for step in steps] == [Usage(prompt_tokens=10, completion_tokens=5)]


def test_codexes_complaint_about_an_unknown_model_is_neither_a_step_nor_a_failure() -> None:
    steps, ending = heard(CodexStream(AT, "m"), recorded("codex_command").partition(b'{"type":"turn.started"}')[0])
    assert (steps, ending.failed) == ([], None)


def test_a_turn_of_codex_that_fails_says_so() -> None:
    steps, ending = heard(CodexStream(AT, "m"), recorded("codex_refused"))
    assert steps == []
    assert "401" in (ending.failed or "")


@pytest.mark.parametrize(("reason", "stop"), [("max_output_tokens", "length"), ("content_filter", "content_filter")])
def test_an_answer_of_codexes_model_that_was_cut_short_is_an_outcome(reason: str, stop: str) -> None:
    message = f"Incomplete response returned, reason: {reason}"
    _, ending = heard(CodexStream(AT, "m"), jsonl({"type": "turn.failed", "error": {"message": message}}))
    assert judge("codex", ended(1), ending, box(None)) == stop


def test_what_codex_thought_goes_with_what_it_does_then() -> None:
    raw = jsonl(
        {"type": "turn.started"},
        {"type": "item.completed", "item": {"id": "i0", "type": "reasoning", "text": "Look first."}},
        {
            "type": "item.completed",
            "item": {"id": "i1", "type": "file_change", "changes": [{"path": "a"}], "status": "completed"},
        },
        {"type": "turn.completed", "usage": {"input_tokens": 7, "output_tokens": 2}},
    )
    steps, _ = heard(CodexStream(AT, "m"), raw)
    assert steps[0].completion.message["reasoning_content"] == "Look first."  # type: ignore[typeddict-item]
    assert steps[1].completion.usage == Usage(prompt_tokens=7, completion_tokens=2)
    assert [message["role"] for message in steps[1].new_messages] == ["tool"]


# Any stream.


@pytest.mark.parametrize(
    "parser", [ClaudeStream(AT), CodexStream(AT, "m"), JsonlStream(AT, "m")], ids=lambda p: type(p).__name__
)
def test_lines_that_are_something_else_change_nothing(parser: StreamParser) -> None:
    odd = jsonl(
        {}, {"type": None}, {"type": "assistant"}, {"type": "user", "message": 3}, {"type": "stream_event", "event": []}
    )
    odd += jsonl({"type": "result"}, {"type": "item.started", "item": "x"}, {"role": 5}, [1], "x", 3)
    steps, _ = heard(parser, b"not json\n\xff\xfe{\n{\n" + odd)
    assert steps == []


def test_a_line_beyond_all_reason_is_left_out_and_the_next_is_read() -> None:
    lines = Lines(1_000)
    found = []
    for _ in range(MAX_LINE_BYTES // 1_000_000 + 2):
        found += lines.feed(b'{"x": "' + b"y" * 1_000_000)
    found += lines.feed(b'"}\n{"a": 1}\n')
    assert found == [({"a": 1}, False)]


def test_long_text_in_a_line_is_cut_and_marked() -> None:
    ((line, escaped),) = Lines(1_000).feed(jsonl({"text": "x" * 5_000}))
    assert escaped
    assert "5000 bytes in all" in str(line["text"])


def test_chat_messages_a_line_are_steps() -> None:
    raw = jsonl(
        {"role": "assistant", "content": None, "tool_calls": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
        {"note": "not a message"},
        {"role": "assistant", "content": "Done.", "model": "other", "finish_reason": "length"},
        {"role": "tool", "tool_call_id": "d", "content": "late"},
    )
    steps, ending = heard(JsonlStream(AT, "m"), raw)
    assert [step.completion.model for step in steps] == ["m", "other"]
    assert steps[0].completion.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert steps[1].new_messages == [{"role": "tool", "tool_call_id": "c", "content": "seen"}]
    assert steps[1].completion.finish_reason == "length"
    assert ending.left == [{"role": "tool", "tool_call_id": "d", "content": "late"}]


def test_a_template_is_filled_once() -> None:
    argv = fill(["agent", "--do={instruction}", "{workdir}", "{other}"], {"instruction": "say {workdir}", "workdir": "/w"})
    assert argv == ["agent", "--do=say {workdir}", "/w", "{other}"]


def test_an_instruction_names_speakers_only_where_there_are_two() -> None:
    assert (
        instruction_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]) == "Be brief.\n\nGo."
    )
    both = instruction_of([{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Where?"}])
    assert both == "user: Go.\n\nassistant: Where?"


# How a run has ended.


class Shut:
    def __init__(self, failure: ModelFailure | ContextOverflow | None) -> None:
        self.failure = failure

    async def open(self) -> None: ...


REFUSED = ModelFailure("the key is refused", kind="model_unauthorized", retryable=False)


def box(failure: ModelFailure | ContextOverflow | None) -> AgentBox:
    return AgentBox(None, door=Shut(failure))  # type: ignore[arg-type]


def says(failed: str | None) -> Ending:
    return Ending([], [], failed)


def ended(code: int | None, said: bytes = b"", *, oom: bool = False) -> ExecResult:
    return ExecResult(code, Output(), Output(said, size=len(said)), oom_killed=oom)


def test_a_program_that_says_it_is_done_is_done_whatever_a_call_of_its_own_came_to() -> None:
    assert judge("x", ended(0), says(""), box(REFUSED)) is None


def test_a_program_that_stops_because_its_model_failed_has_not_finished() -> None:
    for code, failed in ((1, "API Error"), (0, "API Error"), (0, None), (3, None)):
        with pytest.raises(ModelFailure) as caught:
            judge("x", ended(code), says(failed), box(REFUSED))
        assert caught.value is REFUSED


def test_a_context_that_is_full_is_an_outcome() -> None:
    assert judge("x", ended(1), says("too long"), box(ContextOverflow("full"))) == "context_overflow"


def test_a_program_that_breaks_down_is_nobodys_zero() -> None:
    with pytest.raises(AgentFailed, match="exit code 3: stumbled") as crashed:
        judge("x", ended(3, b"once\nstumbled\n"), says(None), box(None))
    assert (crashed.value.kind, crashed.value.retryable) == ("agent_crashed", True)
    with pytest.raises(AgentFailed) as full:
        judge("x", ended(137, oom=True), says(None), box(None))
    assert full.value.kind == "agent_out_of_memory"
    with pytest.raises(Refused, match=r"set harnesses\.x\.path"):
        judge("x", ended(127, b"claude: not found"), says(None), box(None))
    assert judge("x", ended(3), says(None), box(None), ok_exit_codes=[0, 3]) is None
