"""The agent at an environment's shell: when it is told how to go about it, and what it refuses."""

import asyncio
from collections.abc import Sequence

import pytest

from rollstream.environments.weather_tools import WeatherToolsEnvironment
from rollstream.errors import Refused
from rollstream.harnesses import check_composition
from rollstream.testing.harnesses import TOOL, Asked, ScriptedModels
from schemas.action import ToolCall
from schemas.session import SessionReady
from schemas.values import ChatMessage, Composition, JsonObject
from services.agent_worker.harnesses.bash_agent import DONE_BY_SAYING, DONE_BY_SUBMITTING, BashAgentHarness
from services.agent_worker.harnesses.protocol import Turn
from tests.conformance.test_harnesses import BASH, TestBashAgent

SUBMIT: JsonObject = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}
TASK: ChatMessage = {"role": "user", "content": "Mend it."}
RESULT: ChatMessage = {"role": "tool", "tool_call_id": "c", "content": "[exit code 0]"}


def offering(*tools: JsonObject, messages: Sequence[ChatMessage] = (TASK,)) -> SessionReady:
    descriptor = TestBashAgent().descriptor("tools")
    return descriptor.model_copy(update={"tools": list(tools), "messages": list(messages)})


def runs_ls_then_stops(asked: Asked) -> ChatMessage:
    if asked.messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": "Done."}
    call: JsonObject = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def play(descriptor: SessionReady, models: ScriptedModels) -> list[Turn]:
    async def two_turns() -> list[Turn]:
        session = await BashAgentHarness().open(descriptor, models, None)
        return [await session.activate(descriptor.messages), await session.activate([RESULT])]

    return asyncio.run(two_turns())


@pytest.mark.parametrize(("tools", "ending"), [([BASH], DONE_BY_SAYING), ([BASH, SUBMIT], DONE_BY_SUBMITTING)])
def test_an_agent_that_nobody_tells_how_to_work_is_told_once_and_the_transcript_shows_it(
    tools: list[JsonObject], ending: str
) -> None:
    models = ScriptedModels(runs_ls_then_stops)
    first, second = play(offering(*tools), models)
    assert [message["role"] for message in first.messages] == ["user", "assistant"]
    assert str(first.messages[0]["content"]).endswith(ending)
    assert models.asked[0].messages == [TASK, first.messages[0]]
    assert models.asked[1].messages == [TASK, *first.messages, RESULT]
    assert first.actions == [ToolCall(id="c", name="bash", arguments={"command": "ls"})]
    assert (second.messages, second.stop_reason) == ([{"role": "assistant", "content": "Done."}], "completed")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_environment_that_says_how_to_work_is_not_talked_over(role: str) -> None:
    models = ScriptedModels(runs_ls_then_stops)
    told: ChatMessage = {"role": role, "content": "Work so."}  # type: ignore[typeddict-item]
    first, _ = play(offering(BASH, messages=[told, TASK]), models)
    assert models.asked[0].messages == [told, TASK]
    assert [message["role"] for message in first.messages] == ["assistant"]


def test_an_environment_without_a_shell_is_refused() -> None:
    with pytest.raises(Refused, match="works with a tool bash, and environment none offers look"):
        play(offering(TOOL), ScriptedModels(runs_ls_then_stops))


def test_an_environment_without_a_shell_is_refused_when_it_is_published() -> None:
    environment = WeatherToolsEnvironment()
    task = environment.task_type(messages=[TASK])
    with pytest.raises(Refused, match="works with a tool bash, and environment weather_tools offers get_weather"):
        check_composition(Composition(harness="bash_agent"), environment, task)
    check_composition(Composition(harness="tools"), environment, task)
