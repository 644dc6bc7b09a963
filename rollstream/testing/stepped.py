"""What every environment that answers back must do, as tests to inherit; beside what every environment must.

class TestMine(SteppedEnvironmentConformance):
    def environment(self):
        return MyEnvironment()

    def rows(self):
        return [{"coins": 3, "left": 1}]
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from copy import deepcopy
from itertools import islice
from typing import Any, TypeVar, cast

from rollstream.environments.graders import GraderPool
from rollstream.environments.protocol import (
    Environment,
    Episode,
    OpenServices,
    OpensResources,
    RoleModels,
    Services,
    SteppedEnvironment,
    StepServices,
    Task,
    Verdict,
    World,
)
from rollstream.testing import playing
from rollstream.testing.environments import HOSTILE, EnvironmentConformance, offered_names
from rollstream.testing.playing import BrokenPromise, Played, ScriptedRoles
from schemas.action import ToolCall, Utterance
from schemas.session import Submission
from schemas.values import JsonObject
from schemas.verdict import StepReward

R = TypeVar("R")


def hostile_arguments() -> dict[str, JsonObject]:
    """What an agent may put into a call of any tool."""
    deep: JsonObject = {}
    for _ in range(80):
        deep = {"a": deep}
    return {
        "nothing": {},
        "unknown names": {"zz_unknown": 1},
        "deep nesting": deep,
        "five megabytes": {"text": "x" * 5_000_000},
        "odd text": {"text": "\x00 答案 🙂", "id": "", "name": None},
        "odd numbers": {"count": -(2**63), "index": 1e308, "id": -1},
    }


class SteppedEnvironmentConformance(EnvironmentConformance):
    """Inherit, under a name that begins with `Test`, and say which environment and which rows."""

    def models(self) -> RoleModels:
        """What the environment's roles answer; every step and every verdict gets its own."""
        return ScriptedRoles()

    def step_services(self, index: int, opened: OpenServices | None = None) -> StepServices:
        return StepServices(self.models(), index, opened)

    def acts_on_any_world(self) -> bool:
        """Whether a world is all that an action needs; what is opened for a session belongs to it alone. Override for yours."""
        return not isinstance(self.environment(), OpensResources)

    def test_every_task_begins_in_a_world(self) -> None:
        for row, task in self._tasks():
            assert self.environment().seed(task).interaction != "single_turn", f"{row} asks for single_turn, and needs no step"
            self._begin(task)

    def test_the_agents_word_is_worth_nothing_without_its_deeds(self) -> None:
        """The right submission and a transcript that claims everything, in a world where nothing was done."""
        for row, task in self._tasks():
            played = self._oracle(task)
            if played is not None and played.steps:
                forged = Episode(played.episode.messages, played.episode.submission, "completed", self._begin(task), ())
                verdict = self._run(self._score(task, forged))
                assert not self._succeeds(verdict), f"a forged transcript of {row} scored {verdict}"

    def test_a_fresh_instance_goes_on_where_another_stopped(self) -> None:
        """Nothing that matters is kept in the instance: any worker answers any action."""
        if not self.deterministic_steps:
            return
        for row, task in self._tasks():
            for index, (world, action) in enumerate(self._path(task)):
                if not self.acts_on_any_world():
                    return
                here = self._run(playing.step(self._stepped(), world, action, self.step_services(index)))
                fresh = cast("SteppedEnvironment[Any, Any]", self.fresh_environment())
                there = self._run(playing.step(fresh, world, action, self.step_services(index)))
                assert (here.world, here.result) == (there.world, there.result), (
                    f"action {index} in {row} depends on who answers"
                )

    def test_what_an_agent_does_wrong_is_an_observation(self) -> None:
        for row, task in islice(self._tasks(), 2):
            begun = self._begin(task)
            for what, action in self._hostile(task):
                started = time.monotonic()
                stepped = self._step(begun, action, 0)
                took_s = time.monotonic() - started
                assert took_s < self.hostile_time_s, f"{what} in {row} took {took_s:.1f} s"
                assert not self._succeeds(self._run(self._ended(task, stepped.world, stepped.result.reward))), (
                    f"{what} in {row} succeeded"
                )

    def test_mistakes_on_the_way_do_not_spoil_the_world_for_json(self) -> None:
        for _, task in self._tasks():
            for index, (world, _) in enumerate(self._path(task)):
                for action in (Utterance(text="nonsense"), ToolCall(id="x", name="zz_unknown", arguments={"a": [1]})):
                    self._step(world, action, index)

    def fresh_environment(self) -> Environment[Any]:
        """Another instance, as another worker has it; override where `environment` returns a shared one."""
        return type(self.environment())()

    def _stepped(self) -> SteppedEnvironment[Any, Any]:
        return cast("SteppedEnvironment[Any, Any]", self.environment())

    def _begin(self, task: Task) -> World:
        world = playing.first_world(self.environment(), self.environment().seed(task))
        if world is None:
            raise BrokenPromise("a task of the interaction single_turn has no world")
        return world

    def _oracle(self, task: Task) -> Played | None:
        return self._run(playing.play_oracle(self.environment(), task, models=self.models()))

    def _path(self, task: Task) -> Iterator[tuple[World, ToolCall | Utterance]]:
        """The worlds of the reference, each with the action that leads on; the first world if there is no reference.

        Without `acts_on_any_world` it is the first world alone: for later ones, what they need is closed.
        """
        played = self._oracle(task)
        world = self._begin(task)
        if played is None or not played.steps or not self.acts_on_any_world():
            yield world, Utterance(text="0")
            return
        for taken in played.steps:
            yield world, taken.action
            world = taken.world

    def _hostile(self, task: Task) -> Iterator[tuple[str, ToolCall | Utterance]]:
        for what, text in [("silence", ""), ("white space", " \n"), *HOSTILE.items()]:
            # What reaches an environment has passed the log, which carries no lone surrogates.
            yield what, Utterance(text=text.encode("utf-8", "backslashreplace").decode())
        names = ["zz_unknown", "", "__init__", "verify", *offered_names(self.environment().seed(task))]
        for name in names:
            for what, arguments in hostile_arguments().items():
                yield f"{what} to {name!r}", ToolCall(id="call-0", name=name, arguments=deepcopy(arguments))

    def _step(self, world: World, action: ToolCall | Utterance, index: int) -> playing.Stepped:
        return self._run(self._opened_and_stepped(world, action, index))

    async def _opened_and_stepped(self, world: World, action: ToolCall | Utterance, index: int) -> playing.Stepped:
        async with playing.opened(self.environment(), world) as begun:
            assert begun.world is not None
            taken = await playing.step(self._stepped(), begun.world, action, self.step_services(index, begun.services))
            begun.world = taken.world
            return taken

    async def _ended(self, task: Task, world: World, reward: float | None) -> Verdict:
        steps = [StepReward(index=0, reward=reward)]
        return await self._score(task, Episode([], Submission(), "completed", world, steps))

    async def _score(self, task: Task, episode: Episode) -> Verdict:
        async with GraderPool(1, self.grader_timeout_s) as graders:
            return await self.environment().verify(task, episode, Services(graders, self.models()))

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run(coroutine)


def _told(played: Played) -> str:
    return "; ".join(f"{taken.action!r:.80} -> {taken.result!r:.120}" for taken in played.steps[-5:])
