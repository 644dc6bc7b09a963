"""The environment's tools for programs in boxes: what the protocol's messages are answered, and what becomes of calls."""

import asyncio
from collections.abc import Sequence

import pytest

from rollstream.errors import EnvironmentFailure
from rollstream.testing.harnesses import TOOL
from schemas.action import ObservationReturned, ToolCall
from schemas.values import JsonObject
from services.agent_worker.mcp import OVER, PROTOCOL, ToolDesk


class World:
    """Carries out calls, and remembers them."""

    def __init__(self, answers: Sequence[str | Exception] = (), ends_with: int | None = None) -> None:
        self.calls: list[ToolCall] = []
        self._answers = answers
        self._ends_with = ends_with
        self.at_once = 0
        self.most_at_once = 0

    async def act(self, call: ToolCall) -> ObservationReturned:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        index = len(self.calls)
        self.calls.append(call)
        answer = self._answers[index] if index < len(self._answers) else f"seen {index}"
        if isinstance(answer, Exception):
            raise answer
        messages = [{"role": "tool", "tool_call_id": call.id, "content": answer}]
        return ObservationReturned.model_construct(messages=messages, done=index == self._ends_with, truncated=False)


def desk(world: World, most: int = 10) -> ToolDesk:
    made = ToolDesk([TOOL], most)
    made.carry_out(world.act)
    return made


async def call(at: ToolDesk, name: str = "look", arguments: object = None) -> tuple[str, bool]:
    params: JsonObject = {"name": name, "arguments": arguments if arguments is not None else {}}
    answer = await at.answer({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    assert answer is not None
    result = answer["result"]
    assert isinstance(result, dict)
    return result["content"][0]["text"], result["isError"]


async def test_a_program_learns_of_the_tools_there_are() -> None:
    at = desk(World())
    hello = await at.answer({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-03-26"}})
    assert hello is not None
    assert hello["id"] == 0
    assert hello["result"]["protocolVersion"] == "2025-03-26"  # type: ignore[index]
    assert await at.answer({"jsonrpc": "2.0", "method": "notifications/initialized"}) is None
    listed = await at.answer({"jsonrpc": "2.0", "id": "a", "method": "tools/list"})
    assert listed is not None
    (tool,) = listed["result"]["tools"]  # type: ignore[index]
    assert tool == {
        "name": "look",
        "description": "Look around.",
        "inputSchema": {"type": "object", "properties": {}},
    }


async def test_a_version_that_nobody_knows_is_answered_with_our_own() -> None:
    hello = await desk(World()).answer({"id": 0, "method": "initialize", "params": {"protocolVersion": "1999-01-01"}})
    assert hello is not None
    assert hello["result"]["protocolVersion"] == PROTOCOL  # type: ignore[index]


@pytest.mark.parametrize("request_", [{"id": 1, "method": "resources/list"}, {"id": 1, "method": 5}, {"id": 1}])
async def test_what_is_no_method_of_ours_is_an_error(request_: JsonObject) -> None:
    answer = await desk(World()).answer(request_)
    assert answer is not None
    assert "error" in answer


async def test_a_call_is_an_action_and_its_result_what_comes_of_it() -> None:
    world = World()
    assert await call(desk(world), arguments={"at": "door"}) == ("seen 0", False)
    assert [(one.name, one.arguments) for one in world.calls] == [("look", {"at": "door"})]


async def test_calls_at_once_are_carried_out_one_after_the_other_under_ids_of_their_own() -> None:
    world = World()
    at = desk(world)
    assert await asyncio.gather(*(call(at) for _ in range(5))) == [(f"seen {index}", False) for index in range(5)]
    assert world.most_at_once == 1
    assert len({one.id for one in world.calls}) == 5


async def test_a_mistake_is_told_to_the_program_and_does_nothing() -> None:
    world = World()
    for name, arguments in (("fly", {}), ("look", [1]), ("look", "{")):
        text, failed = await call(desk(world), name, arguments)
        assert failed
        assert "error" in text
    assert world.calls == []


async def test_nothing_is_done_after_the_end_beyond_the_most_or_before_anybody_carries_it_out() -> None:
    world = World(ends_with=0)
    at = desk(world)
    await call(at)
    assert at.ended is not None
    assert await call(at) == (OVER, True)
    few = desk(World(), most=1)
    await call(few)
    assert await call(few) == (OVER, True)
    assert await call(ToolDesk([TOOL], 5)) == (OVER, True)


async def test_an_environment_that_fails_is_remembered_and_not_asked_again() -> None:
    failure = EnvironmentFailure("broken", stage="agent")
    world = World([failure])
    at = desk(world)
    text, failed = await call(at)
    assert (failed, "broken" in text) == (True, False)
    assert at.failure is failure
    assert await call(at) == (OVER, True)
    assert len(world.calls) == 1
