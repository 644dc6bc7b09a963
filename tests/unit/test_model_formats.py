"""Both OpenAI APIs, to and from the canonical chat message."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollstream.models.formats import (
    Malformed,
    chat_answer,
    chat_request,
    parse_json,
    responses_answer,
    responses_request,
)
from schemas.events import decode
from schemas.step import AgentStepped
from schemas.values import MAX_DEPTH, ChatMessage, JsonObject, Sampling, Usage
from tests.events import Attempt

LIMIT = 1_000_000
TOOL: JsonObject = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL: JsonObject = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def chat(message: object, **more: object) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": "stop"}], **more}


def test_a_chat_request_carries_messages_tools_and_only_the_sampling_that_is_set() -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": "1 + 1?"}]
    body = chat_request("m", messages, [TOOL], Sampling(temperature=0.0, stop=["\n"]))
    assert body == {"model": "m", "messages": messages, "tools": [TOOL], "temperature": 0.0, "stop": ["\n"]}


def test_a_chat_request_without_tools_has_no_tools_key() -> None:
    assert "tools" not in chat_request("m", [{"role": "user", "content": "q"}], [], Sampling())


def test_a_responses_request_turns_tool_calls_and_results_into_items() -> None:
    messages: list[ChatMessage] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    body = responses_request("m", messages, [TOOL], Sampling(max_tokens=7))
    assert body["input"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    assert body["tools"] == [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    assert body["max_output_tokens"] == 7


def test_a_responses_request_spells_parts_of_content_its_own_way() -> None:
    picture: JsonObject = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    messages: list[ChatMessage] = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]},
        {"role": "assistant", "content": [{"type": "text", "text": "A dot."}]},
    ]
    body: dict[str, Any] = responses_request("m", messages, [], Sampling())
    asked, answered = body["input"]
    assert asked["content"] == [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
    ]
    assert answered["content"] == [{"type": "output_text", "text": "A dot."}]


def test_a_chat_answer_keeps_what_the_provider_adds_and_drops_nulls() -> None:
    answer = chat_answer(
        chat({"role": "assistant", "content": "2", "reasoning_content": "1 + 1", "refusal": None}, model="m-1")
    )
    assert answer.message == {"role": "assistant", "content": "2", "reasoning_content": "1 + 1"}
    assert (answer.finish_reason, answer.model) == ("stop", "m-1")


def test_a_chat_answer_that_calls_tools_keeps_its_null_content() -> None:
    answer = chat_answer(chat({"role": "assistant", "content": None, "tool_calls": [CALL]}))
    assert answer.message == {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_usage_of_both_apis_is_counted_alike() -> None:
    expected = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4, reasoning_tokens=3)
    chatted: JsonObject = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    responded: JsonObject = {
        "input_tokens": 10,
        "output_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens_details": {"reasoning_tokens": 3},
    }
    assert chat_answer(chat({"content": "2"}, usage=chatted)).usage == expected
    assert responses_answer({"output": [{}], "usage": responded}).usage == expected


@pytest.mark.parametrize("usage", [None, [], "many", {"prompt_tokens": True}, {"prompt_tokens": -1}, {"prompt_tokens": "7"}])
def test_usage_that_makes_no_sense_counts_nothing(usage: object) -> None:
    assert chat_answer(chat({"content": "2"}, usage=usage)).usage == Usage()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, r"expected choices\[0\], found only an empty object"),
        ({"choices": []}, r"expected choices\[0\], found \[\]"),
        ({"choices": [None]}, r"expected choices\[0\], found \[None\]"),
        ({"choices": [{"text": "2"}]}, r"expected choices\[0\].message, found 'None'"),
        ({"error": {"message": "busy"}}, "found the error {'message': 'busy'}"),
        (chat({"content": 7}), "expected an assistant message, found content"),
        (chat({"content": ["2"]}), "expected an assistant message, found content"),
        (chat({"content": "2", "tool_calls": "add"}), "expected an assistant message, found tool_calls"),
    ],
)
def test_a_chat_response_that_is_none_is_malformed_and_the_sentence_says_what_was_found(
    body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Malformed, match=sentence):
        chat_answer(body)


def test_a_responses_answer_joins_texts_and_collects_calls() -> None:
    answer = responses_answer(
        {
            "model": "m-1",
            "output": [
                {"type": "reasoning", "summary": []},
                {"type": "message", "content": [{"type": "output_text", "text": "Let me "}, {"text": "add."}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            ],
        }
    )
    assert answer.message == {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]}
    assert answer.finish_reason == "tool_calls"


def test_a_refusal_through_the_responses_api_is_kept() -> None:
    answer = responses_answer({"output": [{"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}]})
    assert answer.message == {"role": "assistant", "content": "", "refusal": "No."}


@pytest.mark.parametrize(
    ("reason", "finish"), [("max_output_tokens", "length"), ("content_filter", "content_filter"), (["odd"], "['odd']")]
)
def test_an_incomplete_response_says_why_even_without_output(reason: object, finish: str) -> None:
    answer = responses_answer({"output": [], "status": "incomplete", "incomplete_details": {"reason": reason}})
    assert (answer.message["content"], answer.finish_reason) == ("", finish)


def test_a_failed_response_is_malformed_and_tells_the_servers_error() -> None:
    with pytest.raises(Malformed, match=r"found the error .*overloaded"):
        responses_answer({"status": "failed", "output": [], "error": {"message": "overloaded"}})


def test_strict_json_is_taken_as_it_is() -> None:
    assert parse_json(b'{"a": [1, 2.5, "\\u00e9"]}', LIMIT) == ({"a": [1, 2.5, "é"]}, False)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (rb'{"a": "half \ud800."}', "half \\ud800."),
        (b'{"a": "caf\xe9"}', "caf\\xe9"),
        (b'{"a": "\xff\\ud800"}', "\\xff\\ud800"),
        (b'{"a": NaN}', "nan"),
        (b'{"a": -Infinity}', "-inf"),
        (b'{"a": 123456789012345678901234567890}', "123456789012345678901234567890"),
    ],
)
def test_what_json_or_the_log_cannot_carry_is_spelled_out_and_marked(raw: bytes, found: str) -> None:
    assert parse_json(raw, LIMIT) == ({"a": found}, True)


@pytest.mark.parametrize("raw", [b"", b"<html>", b'{"a": ', b'{"a": "\xff', b"[1]", b'"text"', b"null", b"\x00"])
def test_what_is_no_json_object_is_malformed(raw: bytes) -> None:
    with pytest.raises(Malformed, match="expected"):
        parse_json(raw, LIMIT)


def test_long_text_is_cut_with_a_marker_that_gives_its_size() -> None:
    cut = "x" * 1024 + "\n[truncated by rollstream: 5000 bytes in all, 1024 kept]"
    raw = json.dumps({"a": ["x" * 5000, "short"]}).encode()
    assert parse_json(raw, 1024) == ({"a": [cut, "short"]}, True)


def _nested(depth: int) -> bytes:
    return b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_a_response_nested_as_deeply_as_allowed_still_fits_an_event() -> None:
    body, _ = parse_json(_nested(MAX_DEPTH), LIMIT)
    step = Attempt().stepped().model_copy(update={"response": body})
    assert decode(step.to_json(), AgentStepped).response == body


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 300, 2_000, 200_000])
def test_a_response_nested_too_deeply_for_the_decoders_of_the_log_is_malformed(depth: int) -> None:
    with pytest.raises(Malformed, match=f"nested more than {MAX_DEPTH} deep"):
        parse_json(_nested(depth), LIMIT)


def test_many_objects_side_by_side_are_not_nesting() -> None:
    raw = json.dumps({"logprobs": [{"token": "a", "top": [{}]}] * 500}).encode()
    assert parse_json(raw, LIMIT)[1] is False


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "type", "content", "x"]), inner),
    max_leaves=8,
)
MESSAGE_KEYS = st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name", "refusal"])
MESSAGE = JSON | st.dictionaries(MESSAGE_KEYS, JSON)
CHAT_BODY = st.fixed_dictionaries(
    {"choices": JSON | st.lists(st.fixed_dictionaries({"message": MESSAGE}, optional={"finish_reason": JSON}), max_size=2)},
    optional={"usage": JSON, "error": JSON, "model": JSON},
)
RESPONSES_BODY = st.fixed_dictionaries(
    {
        "output": JSON
        | st.lists(st.fixed_dictionaries({"type": st.sampled_from(["message", "function_call"]), "content": JSON}))
    },
    optional={"incomplete_details": JSON, "usage": JSON, "error": JSON, "model": JSON},
)


@given(CHAT_BODY | RESPONSES_BODY)
def test_whatever_a_server_answers_is_an_answer_that_an_event_holds_or_malformed(body: object) -> None:
    raw = json.dumps(body).encode()
    for read in (chat_answer, responses_answer):
        try:
            response, _ = parse_json(raw, LIMIT)
            answer = read(response)
        except Malformed:
            continue
        step = AgentStepped.model_validate(
            {**dict(Attempt().stepped()), "message": answer.message, "response": response, "new_messages": [answer.message]}
        )
        assert decode(step.to_json(), AgentStepped).message == answer.message
