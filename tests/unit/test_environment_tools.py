"""The base for worlds with tools: what the model is offered, what a class may not be, how rewards are combined."""

from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from rollstream.environments.protocol import Seeded, StepServices, Task, TaskLimits, Verdict, World
from rollstream.environments.tools import Combination, ToolEnvironment, ToolResult, tool
from rollstream.errors import EnvironmentFailure, Refused
from rollstream.testing.environments import NoModels
from schemas.action import ToolCall, Utterance
from schemas.values import EpisodeLimits, JsonObject
from services.env_worker.handler import lowered


class Room(World):
    lights: dict[str, bool] = {}
    seen: list[int] = []


class RoomTask(Task):
    pass


class RoomEnvironment(ToolEnvironment[RoomTask, Room]):
    name: ClassVar[str] = "room"
    version: ClassVar[str] = "1"
    task_type = RoomTask
    world_type = Room

    def begin(self, task: RoomTask) -> Room:
        return Room()

    @tool
    async def switch(
        self,
        world: Room,
        lamp: Annotated[str, Field(description="Which lamp.", max_length=10)],
        state: Literal["on", "off"] = "on",
    ) -> dict[str, bool]:
        """Switch a lamp.

        It may be on already.
        """
        world.lights[lamp] = state == "on"
        return world.lights

    @tool
    async def nothing(self, world: Room) -> object:
        return object()

    def step_reward(self, before: Room, after: Room, call: ToolCall) -> float | None:
        return None if before == after else 1.0


SERVICES = StepServices(models=NoModels(), index=0)


async def act(name: str, **arguments: Any) -> tuple[Room, Any]:
    return await RoomEnvironment().step(Room(), ToolCall(id="c", name=name, arguments=arguments), SERVICES)


def test_a_tool_is_offered_with_its_docstring_and_the_schema_of_its_typed_arguments() -> None:
    offered = {tool["function"]["name"]: tool["function"] for tool in RoomEnvironment().tools()}  # type: ignore[index]
    assert offered["switch"] == {
        "name": "switch",
        "description": "Switch a lamp.\n\nIt may be on already.",
        "parameters": {
            "type": "object",
            "properties": {
                "lamp": {"type": "string", "description": "Which lamp.", "maxLength": 10},
                "state": {"type": "string", "enum": ["on", "off"], "default": "on"},
            },
            "required": ["lamp"],
            "additionalProperties": False,
        },
    }
    assert offered["nothing"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}


async def test_defaults_hold_and_what_the_world_was_before_stays() -> None:
    before = Room()
    after, result = await RoomEnvironment().step(before, ToolCall(id="c", name="switch", arguments={"lamp": "desk"}), SERVICES)
    assert (after.lights, before.lights, result.observation) == ({"desk": True}, {}, '{"desk":true}')


async def test_a_reward_that_no_tool_gives_comes_from_the_hook() -> None:
    _, changed = await act("switch", lamp="desk")
    _, refused = await act("switch", lamp="x" * 11)
    assert (changed.reward, refused.reward) == (1.0, None)


async def test_a_result_that_is_no_json_is_the_environments_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="tool nothing of environment room returned what is no JSON"):
        await act("nothing")


async def test_words_are_told_to_be_no_action_here() -> None:
    _, result = await RoomEnvironment().step(Room(), Utterance(text="light!"), SERVICES)
    assert result.observation == "error: this world is acted on with tools only"


def seed(**row: Any) -> Seeded:
    ask = [{"role": "user", "content": "Light the desk."}]
    return RoomEnvironment().seed(RoomTask.model_validate({"messages": ask, **row}))


def test_tools_of_a_row_are_offered_as_they_are_if_the_environment_has_them() -> None:
    own: JsonObject = {"type": "function", "function": {"name": "switch", "parameters": {}}}
    strange: JsonObject = {"type": "function", "function": {"name": "open_window"}}
    assert seed(tools=[own]).tools == [own]
    assert len(seed().tools) == 2
    with pytest.raises(Refused, match="which has nothing, switch; found open_window"):
        seed(tools=[own, strange])


def test_a_class_whose_tools_cannot_be_offered_is_refused_when_it_is_written() -> None:
    with pytest.raises(TypeError, match="expected an async function as tool"):

        @tool
        def at_once(self: Any, world: Room) -> str:
            return ""

    with pytest.raises(TypeError, match="expected argument lamp of tool bare with a type"):

        class Untyped(RoomEnvironment):
            @tool
            async def bare(self, world: Room, lamp) -> str:  # type: ignore[no-untyped-def]
                return ""

    with pytest.raises(TypeError, match="expected tool worldless as a method that takes self and a world"):

        class Worldless(RoomEnvironment):
            @tool
            async def worldless(self) -> str:
                return ""


@pytest.mark.parametrize(
    ("combination", "rewards", "reward", "components"),
    [
        (Combination(), [], 1.0, {"own": 0.5}),
        (Combination(), [0.5], 1.0, {"own": 0.5, "terminal": 1.0, "steps": 0.5}),
        (Combination(terminal=0.5, steps=1.0), [0.25, 0.25], 1.0, {"own": 0.5, "terminal": 1.0, "steps": 0.5}),
        (Combination(terminal=0.0, steps=1.0), [], 0.0, {"own": 0.5, "terminal": 1.0, "steps": 0.0}),
    ],
)
def test_step_rewards_and_the_terminal_score_become_one_reward_as_declared(
    combination: Combination, rewards: list[float], reward: float, components: dict[str, float]
) -> None:
    combined = combination.combine(Verdict(reward=1.0, success=True, components={"own": 0.5}), rewards)
    assert (combined.reward, combined.success, combined.components) == (reward, True, components)


def test_what_was_not_scored_stays_unscored_whatever_the_steps_earned() -> None:
    assert Combination(steps=1.0).combine(Verdict(reward=None), [1.0]).reward is None


def test_limits_of_a_task_hold_where_they_are_lower() -> None:
    run = EpisodeLimits(max_steps=10, max_model_tokens=None, agent_timeout_s=60)
    both = lowered(run, TaskLimits(max_steps=20, max_model_tokens=100, agent_timeout_s=30), "e")
    assert (both.max_steps, both.max_model_tokens, both.agent_timeout_s) == (10, 100, 30)
    assert lowered(run, TaskLimits(), "e") is run


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (TaskLimits(max_steps=0), "max_steps: Input should be greater than or equal to 1"),
        (TaskLimits(agent_timeout_s=-1.0), "agent_timeout_s: Input should be greater than 0"),
        (TaskLimits(max_output_bytes=-5), "max_output_bytes: Input should be greater than or equal to 1"),
    ],
)
def test_limits_of_a_task_that_leave_no_room_are_the_environments_failure(own: TaskLimits, sentence: str) -> None:
    with pytest.raises(
        EnvironmentFailure, match=f"environment e: expected limits of a task that leave it room, found {sentence}"
    ):
        lowered(EpisodeLimits(), own, "e")


def test_a_tool_result_says_no_more_than_it_is_told() -> None:
    assert ToolResult("x") == ToolResult("x", None, False, False, {}, {})
