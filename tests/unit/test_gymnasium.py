"""Gymnasium worlds in words: what an agent's text means, what it sees, and that a cold worker finds the world again."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from rollstream.environments.gymnasium.environment import GymnasiumEnvironment, GymnasiumTask, GymnasiumWorld
from rollstream.environments.gymnasium.simulations import Simulations
from rollstream.environments.gymnasium.wording import ActionWords, Unreadable, plain, shown, without_colours
from rollstream.environments.protocol import StepServices
from rollstream.environments.registry import admit
from rollstream.errors import Refused
from rollstream.testing.playing import Played, ScriptedRoles, play, play_oracle
from schemas.action import Utterance

LAKE = ActionWords("discrete", (0,), (4,), ("left", "down", "right", "up"))
PAIR = ActionWords("multi_discrete", (0, 1), (3, 2))
FROZEN_LAKE = {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}, "solution": ["down", 1, "right", 1, 2, 2]}


def task(**fields: object) -> GymnasiumTask:
    found = admit(GymnasiumEnvironment(), fields)
    assert isinstance(found, GymnasiumTask)
    return found


def played(environment: GymnasiumEnvironment, of: GymnasiumTask, said: Sequence[str]) -> Played:
    return asyncio.run(play(environment, of, [Utterance(text=text) for text in said]))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2", 2),
        ("I go right.", 2),
        ("First left, no: DOWN", 1),
        ("Action: 3", 3),
        ("left is 0, but I take 2", 2),
        ("My choice is **up**", 3),
        ("\\boxed{1}", 1),
        ("2" + " " * 1_000, 2),
    ],
)
def test_the_last_action_in_an_answer_counts(text: str, action: int) -> None:
    assert LAKE.read(text) == action


@pytest.mark.parametrize("text", ["", "upward", "1.5", "x2", "٢", "action four", "9" * 5_000, "2" + " " * 3_000])
def test_an_answer_without_an_action_says_which_there_are(text: str) -> None:
    with pytest.raises(Unreadable, match=r"Actions: 0 = left, 1 = down, 2 = right, 3 = up"):
        LAKE.read(text)


@pytest.mark.parametrize("text", ["7", "-1", "action 4"])
def test_an_action_that_is_none_is_named(text: str) -> None:
    with pytest.raises(Unreadable, match="there is no action"):
        LAKE.read(text)


def test_a_text_is_an_action_where_the_world_takes_it() -> None:
    from gymnasium.spaces import Text

    words = ActionWords.of(Text(max_length=4, charset="abc"), ())
    assert words.read(" abca\n") == "abca"
    for text in ("", "abcab", "xyz"):
        with pytest.raises(Unreadable, match="1 to 4 of the characters abc"):
            words.read(text)


def test_an_action_of_several_places_is_a_list() -> None:
    assert PAIR.read("first [0, 1], then [ 2,2 ]") == [2, 2]
    for text in ("2", "[2]", "[3, 1]", "[0, 0]", "[1, 2, 1]"):
        with pytest.raises(Unreadable):
            PAIR.read(text)


@given(st.text(max_size=300))
def test_any_text_is_an_action_or_unreadable(text: str) -> None:
    for words in (LAKE, PAIR):
        try:
            value = words.read(text)
        except Unreadable:
            continue
        places = value if isinstance(value, list) else [value]
        spaces = zip(places, words.lowest, words.counts, strict=True)
        assert all(low <= int(place) < low + count for place, low, count in spaces)


def test_a_terminals_colours_become_marks() -> None:
    assert without_colours("\x1b[41mS\x1b[0mFFF") == "[S]FFF"
    assert without_colours("|\x1b[34;1mB\x1b[0m: \x1b[43m \x1b[0m|") == "|(blue B): [ ]|"
    assert without_colours("\x1b[2Jx") == "x"


def test_what_is_seen_is_plain_json_of_bounded_length() -> None:
    import numpy

    assert plain({"a": numpy.int64(3), "b": numpy.array([1.5, float("nan")]), "c": (True, None)}) == {
        "a": 3,
        "b": [1.5, "nan"],
        "c": [True, None],
    }
    assert shown((7, 10, False), None) == "Observation: [7, 10, false]"
    assert len(shown(numpy.zeros((100, 100)), None)) < 5_000


def test_frozen_lake_is_won_by_its_solution_and_its_rewards_sum_to_one() -> None:
    found = asyncio.run(play_oracle(GymnasiumEnvironment(), task(**FROZEN_LAKE)))
    assert found is not None
    assert found.rewards == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert found.verdict.reward == 1.0
    assert found.steps[-1].result.done
    assert "[G]" in str(found.steps[-1].result.observation)


def test_a_hole_ends_the_episode_without_reward() -> None:
    found = played(GymnasiumEnvironment(), task(**FROZEN_LAKE), ["right", "down"])
    assert (found.steps[-1].result.done, found.verdict.reward, found.verdict.success) == (True, 0.0, False)


def test_the_worlds_own_time_limit_truncates() -> None:
    found = played(GymnasiumEnvironment(), task(**FROZEN_LAKE | {"env_kwargs": {"max_episode_steps": 3}}), ["0", "0", "0"])
    assert [step.result.truncated for step in found.steps] == [False, False, True]
    assert not found.steps[-1].result.done
    assert found.episode.stop_reason == "truncated"


def test_a_mistake_changes_nothing_but_its_count() -> None:
    found = played(GymnasiumEnvironment(), task(**FROZEN_LAKE), ["sideways", "down"])
    assert found.steps[0].result.reward is None
    assert str(found.steps[0].result.observation).startswith("error: expected an action, found none.")
    world = found.steps[1].world
    assert isinstance(world, GymnasiumWorld)
    assert (world.actions, world.mistakes) == ([1], 1)


def test_the_seed_of_the_task_decides_the_chances() -> None:
    def first_cards(seed: int) -> object:
        return GymnasiumEnvironment().seed(task(env_id="Blackjack-v1", seed=seed)).messages

    assert first_cards(5) == first_cards(5)
    assert len({str(first_cards(seed)) for seed in range(10)}) > 5


async def test_a_cold_worker_finds_the_same_world_and_a_warm_one_does_nothing_again() -> None:
    warm, slippery = GymnasiumEnvironment(), task(env_id="FrozenLake-v1", env_kwargs={"map_name": "8x8"}, seed=7)
    world = warm.seed(slippery).world
    assert isinstance(world, GymnasiumWorld)
    chances = random.Random(1)
    for index in range(30):
        if world.over:
            break
        action, services = Utterance(text=str(chances.randrange(4))), StepServices(ScriptedRoles(), index)
        cold_environment = GymnasiumEnvironment()
        cold = await cold_environment.step(world, action, services)
        assert cold_environment.simulations.refolded == len(world.actions)
        here = await warm.step(world, action, services)
        assert here == cold
        world = here[0]
    assert len(world.actions) > 5
    assert warm.simulations.refolded == 0


async def test_simulations_are_bounded_and_what_was_forgotten_is_made_again() -> None:
    environment = GymnasiumEnvironment()
    environment.simulations = Simulations(capacity=2)
    worlds = []
    for seed in range(4):
        world = environment.seed(task(env_id="FrozenLake-v1", seed=seed)).world
        assert isinstance(world, GymnasiumWorld)
        worlds.append((await environment.step(world, Utterance(text="0"), StepServices(ScriptedRoles(), 0)))[0])
    assert environment.simulations.refolded == 0
    for world in worlds:
        await environment.step(world, Utterance(text="0"), StepServices(ScriptedRoles(), 1))
    assert environment.simulations.refolded >= 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"env_id": "FrozenLke-v1"}, r"'FrozenLke-v1' cannot be made: .*Did you mean"),
        ({"env_id": "FrozenLake-v9"}, "version `v9` .* doesn't exist"),
        ({"env_id": "antigravity:Flying-v1"}, "expected the id of a registered environment"),
        ({"env_id": "Pendulum-v1"}, "Pendulum-v1 cannot be acted on in words: expected actions of Discrete"),
        ({"env_id": "FrozenLake-v1", "env_kwargs": {"wings": 2}}, "cannot be made: .* unexpected keyword argument 'wings'"),
        (
            {"env_id": "FrozenLake-v1", "env_kwargs": {"render_mode": "human"}},
            "found render_mode, which",
        ),
        ({"env_id": "FrozenLake-v1", "action_names": ["go"]}, "expected 4 names of actions, found 1"),
    ],
)
def test_a_world_that_cannot_be_played_is_refused_in_one_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence) as refused:
        GymnasiumEnvironment().seed(task(**fields))
    assert "\n" not in str(refused.value)


def test_returns_bring_the_reward_between_nothing_and_one() -> None:
    cliff = {"env_id": "CliffWalking-v1", "solved_at": -13, "returns": [-100, -13], "solution": [0, *[1] * 11, 2]}
    found = asyncio.run(play_oracle(GymnasiumEnvironment(), task(**cliff)))
    assert found is not None
    assert (found.verdict.reward, found.verdict.success, found.verdict.components) == (1.0, True, {"return": -13.0})
    unfinished = played(GymnasiumEnvironment(), task(**cliff), ["up"])
    assert (unfinished.verdict.reward, unfinished.verdict.success) == (0.0, False)
    with pytest.raises(Refused, match="in rising order"):
        task(env_id="CliffWalking-v1", returns=[1, 1])
