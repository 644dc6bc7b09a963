"""Tic-tac-toe against models and rules: whose turn it is, what a move is, who wins."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from rollstream.environments.registry import admit
from rollstream.environments.self_play import (
    Game,
    SelfPlayEnvironment,
    SelfPlayTask,
    best,
    drawn,
    free,
    other,
    outcome,
    put,
    square_in,
)
from rollstream.errors import ModelFailure, Refused
from rollstream.testing.playing import Played, ScriptedRoles, play, play_oracle
from schemas.action import ToolCall, Utterance


def played(fields: dict[str, object], said: Sequence[str], opponent: Sequence[str | Exception] = ()) -> Played:
    task = admit(SelfPlayEnvironment(), fields)
    actions = [Utterance(text=text) for text in said]
    return asyncio.run(play(SelfPlayEnvironment(), task, actions, models=ScriptedRoles({"opponent": opponent})))


def board_of(found: Played) -> str:
    world = found.episode.world
    assert isinstance(world, Game)
    return world.board


def test_the_agent_wins_against_a_script_that_does_not_look() -> None:
    found = played({"opponent": "scripted", "script": [4, 7, 8]}, ["1", "2", "3"])
    assert found.verdict.reward == 1.0
    assert found.rewards == [0.0, 0.0, 1.0]
    assert "You have won." in str(found.steps[-1].result.observation)


def test_the_opponent_may_begin_and_moves_before_the_agent_is_asked() -> None:
    found = played({"opponent": "scripted", "script": [5, 1, 9], "begins": "opponent"}, [])
    assert "as O" in str(found.seeded.messages[0]["content"])
    assert board_of(found) == "....X...."
    lost = played({"opponent": "scripted", "script": [5, 1, 9], "begins": "opponent"}, ["2", "3"])
    assert (lost.verdict.reward, lost.rewards) == (0.0, [0.0, -1.0])


def test_a_game_goes_on_from_any_board_with_whoever_is_to_move() -> None:
    assert board_of(played({"board": "XX.OO....", "opponent": "scripted"}, ["take 3"])) == "XXXOO...."
    found = played({"board": "X...O....", "begins": "opponent", "opponent": "scripted", "script": [2]}, ["3"])
    assert (board_of(found)[:3], "as O" in str(found.seeded.messages[0]["content"])) == ("XXO", True)
    for board in ("XXX.OO...", "OO.......", "XOXOXOXO", "XXOOXXOOX"):
        with pytest.raises(Refused):
            admit(SelfPlayEnvironment(), {"board": board})


def test_an_illegal_move_is_told_and_changes_nothing() -> None:
    found = played({"opponent": "scripted", "script": [5]}, ["1", "1", "none", "12", "0"])
    for taken in found.steps[1:]:
        assert "error: expected one of the free squares 2, 3, 4, 6, 7, 8, 9" in str(taken.result.observation)
        assert taken.result.reward is None
    assert board_of(found) == "X...O...."
    task = admit(SelfPlayEnvironment(), {})
    called = asyncio.run(play(SelfPlayEnvironment(), task, [ToolCall(id="c", name="put", arguments={"square": 1})]))
    assert board_of(called) == "........."


def test_a_model_plays_the_opponent_and_is_asked_again_when_its_move_is_none() -> None:
    found = played({"opponent": "model"}, ["1", "2"], ["I take 1!", "5", "3"])
    assert board_of(found) == "XXO.O...."
    assert [taken.result.info for taken in found.steps] == [{"opponent": 5, "tries": 2}, {"opponent": 3, "tries": 1}]


def test_a_model_that_never_moves_has_the_first_free_square_taken_for_it() -> None:
    found = played({"opponent": "model"}, ["5"], ["pass", "", "10"])
    assert board_of(found) == "O...X...."
    assert found.steps[0].result.info["taken_for_it"] is True


def test_a_model_that_begins_is_asked_when_the_agent_is_ready() -> None:
    found = played({"opponent": "model", "begins": "opponent"}, ["I am ready, 1 2 3.", "1"], ["5", "9"])
    assert board_of(found) == "O...X...X"
    assert found.seeded.roles == {"opponent"}


def test_a_failing_opponent_is_not_the_agents_fault() -> None:
    failure = ModelFailure("away", kind="model_unavailable", retryable=True)
    with pytest.raises(ModelFailure, match="away"):
        played({"opponent": "model"}, ["1"], [failure])


def test_a_draw_is_half_a_win_unless_it_is_all_there_is() -> None:
    task = admit(SelfPlayEnvironment(), {"draw_wins": True})
    best_play = asyncio.run(play_oracle(SelfPlayEnvironment(), task))
    assert best_play is not None
    assert (best_play.verdict.reward, best_play.verdict.diagnostics["outcome"]) == (1.0, "drawn")
    said = [step.action.text for step in best_play.steps if isinstance(step.action, Utterance)]
    assert played({}, said).verdict.reward == 0.5
    assert SelfPlayEnvironment().reference(SelfPlayTask()) is None


@given(st.integers(0, 10**6), st.sampled_from(["X", "O"]))
def test_nobody_beats_the_perfect_opponent(seed: int, mark: str) -> None:
    chances, board, to_move = random.Random(seed), ".........", "X"
    while outcome(board, "X") is None:
        square = best(board, to_move) if to_move == mark else chances.choice(free(board))
        board, to_move = put(board, square, to_move), other(to_move)
    assert outcome(board, mark) in ("won", "drawn")


@given(st.integers(0, 10**6))
def test_a_random_opponent_is_a_function_of_seed_and_board(seed: int) -> None:
    first, second = (asyncio.run(play_oracle(SelfPlayEnvironment(), SelfPlayTask(opponent="random", seed=seed))) for _ in "ab")
    assert first == second
    assert first is not None
    assert first.verdict.reward == 1.0


@pytest.mark.parametrize(
    ("text", "square"),
    [("5", 5), ("I take 5.", 5), ("not 1, but 5", 5), ("5x", None), ("1.5", None), ("-5", None), ("3", None)],
)
def test_the_last_free_square_that_is_named_is_the_move(text: str, square: int | None) -> None:
    assert square_in(text, "..X......") == square


def test_a_board_is_drawn_with_the_numbers_of_its_free_squares() -> None:
    assert drawn("X...O....") == "X 2 3\n4 O 6\n7 8 9"
