"""The environment `gymnasium`: one episode of a Gymnasium world, acted on in words.

The reward of an episode is its return, the sum of its steps' rewards, as the receipt tells them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, JsonValue, model_validator

from rollstream.environments.gymnasium.simulations import Origin, Simulations, next_digest
from rollstream.environments.gymnasium.wording import (
    LEGENDS,
    ActionValue,
    ActionWords,
    Legend,
    Unreadable,
    Unsupported,
    plain,
    shown,
)
from rollstream.environments.protocol import Episode, Seeded, Services, StepResult, StepServices, Task, Verdict, World
from rollstream.errors import EnvironmentFailure, Refused
from schemas.action import ToolCall, Utterance
from schemas.session import Submission
from schemas.values import ChatMessage

OVER = "The episode is over."


class GymnasiumTask(Task):
    """A world and where to begin in it."""

    env_id: Annotated[str, Field(min_length=1, max_length=200)]
    env_kwargs: dict[str, JsonValue] = {}
    """Arguments of `gymnasium.make`, e.g. `{"is_slippery": false}`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    action_names: list[Annotated[str, Field(min_length=1, max_length=40)]] = []
    """Of a Discrete space, in order; known worlds bring their own."""
    note: str = ""
    """What the agent is told about the world, instead of what is known of it."""
    solution: list[ActionValue] | None = None
    """Actions that solve it, for the harness `oracle`."""
    solved_at: float = 1.0
    """Lowest return of a finished episode that counts as success."""
    returns: tuple[float, float] | None = None
    """Returns that are worth 0 and 1, to bring the reward there; an episode that is not finished is then worth 0. Without
    them, the reward is the return as it is."""

    @model_validator(mode="after")
    def _has_two_different_returns(self) -> "GymnasiumTask":
        if self.returns and self.returns[0] >= self.returns[1]:
            raise ValueError(f"expected returns as [worth 0, worth 1] in rising order, found {list(self.returns)}")
        return self

    @property
    def origin(self) -> Origin:
        return Origin(self.env_id, self.env_kwargs, self.seed)


class GymnasiumWorld(World):
    """How a simulation came about, from which it can be made again."""

    env_id: str
    env_kwargs: dict[str, JsonValue]
    seed: int
    words: ActionWords
    actions: list[ActionValue] = []
    digest: str
    """Names origin and actions, so that whoever has the simulation running finds it."""
    over: bool = False
    mistakes: int = 0
    """Answers in which no action was found."""


class GymnasiumEnvironment:
    """Reward is the return of the episode, or its place between two returns that the task names."""

    name: ClassVar[str] = "gymnasium"
    version: ClassVar[str] = "1"
    task_type = GymnasiumTask
    example: ClassVar[Mapping[str, object]] = {
        "env_id": "FrozenLake-v1",
        "env_kwargs": {"is_slippery": False},
        "solution": ["down", "down", "right", "down", "right", "right"],
    }
    world_type = GymnasiumWorld
    public_fields: ClassVar[frozenset[str]] = frozenset({"env_id", "env_kwargs", "seed", "action_names", "note"})
    success_threshold: ClassVar[float] = 1.0
    seed_blocks: ClassVar[bool] = True
    """Importing Gymnasium and making a world take their time."""

    @cached_property
    def simulations(self) -> Simulations:
        return Simulations()

    def seed(self, task: GymnasiumTask) -> Seeded:
        simulation, observation, drawing = self.simulations.begin(task.origin)
        legend = LEGENDS.get(simulation.spec.name, Legend())
        try:
            words = ActionWords.of(simulation.action_space, task.action_names or legend.actions)
        except Unsupported as error:
            raise Refused(f"gymnasium: {task.env_id} cannot be acted on in words: {error}") from None
        finally:
            simulation.close()
        world = GymnasiumWorld(
            env_id=task.env_id, env_kwargs=task.env_kwargs, seed=task.seed, words=words, digest=task.origin.digest()
        )
        opening = f"You are in {task.env_id}, a world that you act on one action at a time."
        rules = " ".join(part for part in (opening, task.note or legend.note, words.legend()) if part)
        first: ChatMessage = {"role": "user", "content": f"{rules}\n\n{shown(observation, drawing)}"}
        return Seeded(messages=[*(task.messages or []), first], interaction="gymnasium", world=world)

    def reference(self, task: GymnasiumTask) -> Submission | None:
        return None if task.solution is None else Submission(text=OVER)

    def reference_actions(self, task: GymnasiumTask) -> Sequence[Utterance]:
        return [Utterance(text=str(action)) for action in task.solution or ()]

    async def step(
        self, world: GymnasiumWorld, action: ToolCall | Utterance, services: StepServices
    ) -> tuple[GymnasiumWorld, StepResult]:
        try:
            if not isinstance(action, Utterance):
                raise Unreadable(f"this world has no tools. {world.words.legend()}")
            value = world.words.read(action.text)
        except Unreadable as error:
            return world.model_copy(update={"mistakes": world.mistakes + 1}), StepResult(f"error: {error}")
        origin = Origin(world.env_id, world.env_kwargs, world.seed)
        moved = await asyncio.to_thread(self.simulations.move, origin, world.digest, world.actions, value)
        over = moved.terminated or moved.truncated
        after = world.model_copy(
            update={"actions": [*world.actions, value], "digest": next_digest(world.digest, value), "over": over}
        )
        told = shown(moved.observation, moved.drawing)
        info: dict[str, Any] = {"action": value, **plain(moved.info)}
        result = StepResult(
            f"{told}\n{OVER}" if over else told,
            reward=moved.reward,
            done=moved.terminated,
            truncated=moved.truncated and not moved.terminated,
            info=info,
        )
        return after, result

    async def verify(self, task: GymnasiumTask, episode: Episode, services: Services) -> Verdict:
        world = episode.world
        if not isinstance(world, GymnasiumWorld):
            raise EnvironmentFailure(
                "gymnasium: expected how the world ended, found nothing", stage="verification", kind="no_world"
            )
        total = float(sum(step.reward for step in episode.steps if step.reward is not None))
        reward = total
        if task.returns is not None:
            worst, best = task.returns
            reward = min(1.0, max(0.0, (total - worst) / (best - worst))) if world.over else 0.0
        return Verdict(
            reward=reward,
            success=world.over and total >= task.solved_at,
            components={"return": total},
            diagnostics={"actions": len(world.actions), "over": world.over, "mistakes": world.mistakes},
        )
