"""The tool-calling loop: what becomes an action, what is told to the model, and how it ends."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollstream.testing.harnesses import Asked, ScriptedModels
from schemas.action import ToolCall
from schemas.values import ChatMessage, JsonObject
from services.agent_worker.harnesses.protocol import Mistake, Turn
from services.agent_worker.harnesses.tools import MAX_CALLS, ToolsHarness, read_call
from tests.conformance.test_harnesses import TestTools

KNOWN = frozenset({"look", "add"})


def call(arguments: Any, name: object = "add", id_: object = "c1") -> JsonObject:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def told(made: JsonObject) -> str:
    mistake = read_call(made, KNOWN)
    assert isinstance(mistake, Mistake)
    assert (mistake.reply["role"], mistake.reply["tool_call_id"]) == ("tool", str(made.get("id") or ""))
    return str(mistake.reply["content"])


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_a_call_of_a_tool_is_an_action_with_its_arguments() -> None:
    assert read_call(call('{"a": 1, "b": [true, null]}'), KNOWN) == ToolCall(
        id="c1", name="add", arguments={"a": 1, "b": [True, None]}
    )


@pytest.mark.parametrize("nothing", ["", None, "{}", {}])
def test_no_arguments_are_an_empty_object(nothing: object) -> None:
    assert read_call(call(nothing), KNOWN) == ToolCall(id="c1", name="add")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("{", "error: expected the arguments of add as a JSON object, found 1 bytes that are not"),
        ("add 1 and 2", "found 11 bytes that are not"),
        ("[1, 2]", "found a JSON list"),
        ('"text"', "found a JSON str"),
        ("3", "found a JSON int"),
        (7, "found a int"),
        (nested(150), "nested more than 100 deep"),
        (nested(100_000), "bytes that are not"),
        ('{"a": "' + "x" * 5_000_000 + '"}', "found 5000009 bytes, of which at most 1048576 are read"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_no_object_are_told_to_the_model(arguments: object, sentence: str) -> None:
    answer = told(call(arguments))
    assert sentence in answer
    assert len(answer) < 500


def test_a_tool_that_nobody_has_is_told_with_those_there_are() -> None:
    assert told(call("{}", name="fly")) == "error: no tool is called 'fly'; there are add, look"


@pytest.mark.parametrize("odd", [{}, {"id": "c1"}, {"id": "c1", "function": "add"}, {"function": {"name": 7}}])
def test_what_is_no_call_of_a_function_is_told(odd: JsonObject) -> None:
    assert told(odd) == "error: expected a call of a function with a name"


@given(st.text(max_size=200) | st.binary(max_size=50).map(repr))
def test_no_arguments_whatever_they_hold_break_the_harness(arguments: str) -> None:
    found = read_call(call(arguments), KNOWN)
    if isinstance(found, ToolCall):
        assert isinstance(json.loads(arguments or "{}"), dict)


def play(*answers: ChatMessage, finish_reason: str = "stop") -> tuple[list[Turn], ScriptedModels]:
    """Activate once for each answer; every action is answered with its name."""

    async def playing() -> list[Turn]:
        session = await ToolsHarness().open(TestTools().descriptor("tools"), models, None)
        turns, observation = [], list(TestTools().descriptor("tools").messages)
        for _ in answers:
            turns.append(await session.activate(observation))
            observation = [
                action.reply
                if isinstance(action, Mistake)
                else {"role": "tool", "tool_call_id": getattr(action, "id", ""), "content": "seen"}
                for action in turns[-1].actions
            ]
        return turns

    given_so_far = iter(answers)
    models = ScriptedModels(lambda asked: next(given_so_far), finish_reason)
    return asyncio.run(playing()), models


def calls(*made: JsonObject, text: str | None = None) -> ChatMessage:
    return {"role": "assistant", "content": text, "tool_calls": list(made)}


LOOK = call("{}", "look")


def test_calls_made_at_once_are_carried_out_in_their_order_with_mistakes_in_between() -> None:
    (turn, end), models = play(
        calls(call("{}", "look", "1"), call("{", "look", "2"), call("{}", "look", "3")),
        {"role": "assistant", "content": "Done."},
    )
    assert [type(action) for action in turn.actions] == [ToolCall, Mistake, ToolCall]
    assert (turn.stop_reason, end.stop_reason) == (None, "completed")
    assert [message.get("tool_call_id") for message in models.asked[1].messages[-3:]] == ["1", "2", "3"]


def test_arguments_that_are_no_json_do_not_stand_in_the_next_prompt_but_in_the_transcript() -> None:
    (turn, _), models = play(calls(call("{", "look")), {"role": "assistant", "content": "Sorry."})
    asked: Asked = models.asked[1]
    (kept,) = asked.messages[-2]["tool_calls"]
    assert kept["function"] == {"name": "look", "arguments": "{}"}
    assert turn.messages == [calls(call("{", "look"))]


def test_more_calls_at_once_than_anybody_means_are_told_so() -> None:
    ((turn),), _ = play(calls(*[call("{}", "look", str(number)) for number in range(MAX_CALLS + 2)]))
    assert [type(action) for action in turn.actions[-3:]] == [ToolCall, Mistake, Mistake]


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_an_answer_that_was_cut_short_carries_nothing_out(reason: str) -> None:
    ((turn),), _ = play(calls(LOOK), finish_reason=reason)
    assert (turn.stop_reason, list(turn.actions)) == (reason, [])
