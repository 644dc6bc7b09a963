"""`self_play`: two agents take turns on one board, here tic-tac-toe.

The order of play is the environment's own: the opponent moves inside `step`, or before the agent's first move, so that the
agent always finds itself to move. The opponent is a model in the role `opponent`, or plays by a rule that the task names.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rollstream.environments.protocol import (
    Episode,
    RoleModels,
    Seeded,
    Services,
    StepResult,
    StepServices,
    Task,
    Verdict,
    World,
)
from rollstream.errors import EnvironmentFailure
from schemas.action import ToolCall, Utterance
from schemas.session import Submission
from schemas.values import ChatMessage, text_of

ROLE = "opponent"
TAIL = 2_000
OPPONENT_TRIES = 3
"""Answers of a model without a legal move before the first free square is taken for it."""
EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_SQUARE = re.compile(r"(?<![\w.-])[1-9](?![\w]|\.[0-9])")
_DRAW_REWARD = 0.5

Mark = Literal["X", "O"]
Outcome = Literal["won", "lost", "drawn"]


class SelfPlayTask(Task):
    """Who begins, and who plays against the agent."""

    opponent: Literal["model", "perfect", "random", "scripted"] = "perfect"
    script: list[Annotated[int, Field(ge=1, le=9)]] = []
    """Squares that a scripted opponent wants, in this order; it takes the first of them that is free, or the first free one."""
    seed: int = 0
    """Of a random opponent."""
    begins: Literal["agent", "opponent"] = "agent"
    board: Annotated[str, Field(pattern=r"^[XO.]{9}$")] = EMPTY
    """Where the game stands, row by row. X always begins."""
    draw_wins: bool = False
    """Whether a draw is all that can be had, and so full reward; otherwise it is half."""

    @model_validator(mode="after")
    def _is_a_game_under_way(self) -> "SelfPlayTask":
        begun = self.board.count("X") - self.board.count("O")
        if begun not in (0, 1) or outcome(self.board, "X") is not None:
            raise ValueError(f"expected a board of a game under way, X having begun, found {self.board}")
        return self

    @property
    def mark(self) -> Mark:
        """The agent's: X begins an empty board, and on any other whoever is to move plays on."""
        to_move: Mark = "X" if self.board.count("X") == self.board.count("O") else "O"
        other: Mark = "O" if to_move == "X" else "X"
        return to_move if self.begins == "agent" else other


class Game(World):
    """A board, and who plays on it."""

    board: str
    mark: Mark
    opponent: Literal["model", "perfect", "random", "scripted"]
    script: list[int] = []
    seed: int = 0
    owed: bool = False
    """A model opponent begins, and has not moved yet: nothing is asked while a task is seeded."""
    outcome: Outcome | None = None


def outcome(board: str, mark: str) -> Outcome | None:
    """How a game ended for `mark`; None while it goes on."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return "won" if board[a] == mark else "lost"
    return None if "." in board else "drawn"


def free(board: str) -> list[int]:
    """Free squares, from 1."""
    return [place + 1 for place, taken in enumerate(board) if taken == "."]


def put(board: str, square: int, mark: str) -> str:
    return board[: square - 1] + mark + board[square:]


def other(mark: str) -> str:
    return "O" if mark == "X" else "X"


def best(board: str, mark: str) -> int:
    """The best square for whoever is to move, by looking at every game from here; the first of equals."""
    return max(free(board), key=lambda square: (-_worth(put(board, square, mark), other(mark)), -square))


@cache
def _worth(board: str, to_move: str) -> int:
    """What a board is worth to whoever is to move: sooner is better, won or lost later. There are 5,478 boards."""
    ended = outcome(board, to_move)
    if ended is not None:
        return {"won": 1, "lost": -1, "drawn": 0}[ended] * (1 + board.count("."))
    return max(-_worth(put(board, square, to_move), other(to_move)) for square in free(board))


def square_in(text: str, board: str) -> int | None:
    """The last free square that a text names."""
    named = [int(found.group()) for found in _SQUARE.finditer(text[-TAIL:])]
    return named[-1] if named and named[-1] in free(board) else None


def drawn(board: str) -> str:
    """The board, with the numbers of free squares."""
    cells = [str(place + 1) if mark == "." else mark for place, mark in enumerate(board)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


class SelfPlayEnvironment:
    """Reward 1.0 for a win, for a draw 0.5 (or 1.0 where the task says so), for a loss and an unfinished game 0.0."""

    name: ClassVar[str] = "self_play"
    version: ClassVar[str] = "1"
    task_type = SelfPlayTask
    example: ClassVar[Mapping[str, object]] = {"opponent": "scripted", "script": [4, 7, 8]}
    world_type = Game
    public_fields: ClassVar[frozenset[str]] = frozenset({"opponent", "script", "seed", "begins", "board"})
    success_threshold: ClassVar[float] = 1.0

    def seed(self, task: SelfPlayTask) -> Seeded:
        game = self._begun(task)
        rules = (
            f"You play tic-tac-toe as {game.mark}. A number is a free square; answer with the one that you take. The last free "
            "square that your answer names counts. Three in a row win."
        )
        now = "Your opponent begins. Say that you are ready." if game.owed else f"{drawn(game.board)}\nYour move."
        first: ChatMessage = {"role": "user", "content": f"{rules}\n\n{now}"}
        roles = frozenset({ROLE}) if task.opponent == "model" else frozenset[str]()
        return Seeded([*(task.messages or []), first], interaction="gymnasium", world=game, roles=roles)

    def reference(self, task: SelfPlayTask) -> Submission | None:
        """None against a model, and where not even the best play leads to full reward."""
        if task.opponent == "model" or self._line(self._begun(task), draw_wins=task.draw_wins) is None:
            return None
        return Submission(text="Good game.")

    def reference_actions(self, task: SelfPlayTask) -> Sequence[Utterance]:
        squares = [] if task.opponent == "model" else self._line(self._begun(task), draw_wins=task.draw_wins) or []
        return [Utterance(text=str(square)) for square in squares]

    async def step(self, world: Game, action: ToolCall | Utterance, services: StepServices) -> tuple[Game, StepResult]:
        if world.outcome is not None:
            return world, StepResult(f"The game is over: {world.outcome}.", done=True)
        if world.owed:
            begun, info = await self._answered(world.model_copy(update={"owed": False}), services.models)
            return begun, StepResult(f"{drawn(begun.board)}\nYour move.", info=info)
        square = square_in(action.text, world.board) if isinstance(action, Utterance) else None
        if square is None:
            squares = ", ".join(map(str, free(world.board)))
            told = f"error: expected one of the free squares {squares}, found none"
            return world, StepResult(f"{told}\n{drawn(world.board)}\nYour move.")
        moved = self._moved(world, square, world.mark)
        if moved.outcome is not None:
            return moved, self._over(moved, {})
        answered, info = await self._answered(moved, services.models)
        if answered.outcome is not None:
            return answered, self._over(answered, info)
        return answered, StepResult(f"{drawn(answered.board)}\nYour move.", reward=0.0, info=info)

    async def verify(self, task: SelfPlayTask, episode: Episode, services: Services) -> Verdict:
        if not isinstance(episode.world, Game):
            message = "self_play: expected how the game ended, found nothing"
            raise EnvironmentFailure(message, stage="verification", kind="no_world")
        ended = episode.world.outcome
        draw = 1.0 if task.draw_wins else _DRAW_REWARD
        reward = {"won": 1.0, "drawn": draw, "lost": 0.0, None: 0.0}[ended]
        return Verdict(reward=reward, diagnostics={"outcome": ended or "unfinished", "board": episode.world.board})

    def _begun(self, task: SelfPlayTask) -> Game:
        game = Game(
            board=task.board, mark=task.mark, opponent=task.opponent, script=task.script, seed=task.seed,
            owed=task.begins == "opponent" and task.opponent == "model",
        )  # fmt: skip
        if task.begins == "agent" or game.owed:
            return game
        return self._moved(game, self._rule(game), other(game.mark))

    async def _answered(self, game: Game, models: RoleModels) -> tuple[Game, dict[str, object]]:
        """The game after the opponent's move."""
        mark = other(game.mark)
        if game.opponent != "model":
            square = self._rule(game)
            return self._moved(game, square, mark), {"opponent": square}
        rules = (
            f"You play tic-tac-toe as {mark}. A number is a free square. Answer with the number of the square that you take, "
            "and nothing else. Three in a row win."
        )
        asked: list[ChatMessage] = [{"role": "user", "content": f"{rules}\n\n{drawn(game.board)}\nYour move."}]
        for number in range(1, OPPONENT_TRIES + 1):
            completion = await models.complete(asked, ROLE)
            chosen = square_in(text_of(completion.message), game.board)
            if chosen is not None:
                return self._moved(game, chosen, mark), {"opponent": chosen, "tries": number}
            squares = ", ".join(map(str, free(game.board)))
            asked += [completion.message, {"role": "user", "content": f"Answer with one of {squares}."}]
        taken = free(game.board)[0]
        return self._moved(game, taken, mark), {"opponent": taken, "tries": OPPONENT_TRIES, "taken_for_it": True}

    @staticmethod
    def _rule(game: Game) -> int:
        """What an opponent that is no model plays: a function of the game, so that a step can be done twice."""
        squares = free(game.board)
        if game.opponent == "perfect":
            return best(game.board, other(game.mark))
        if game.opponent == "random":
            return random.Random(f"{game.seed} {game.board}").choice(squares)
        return next((square for square in game.script if square in squares), squares[0])

    @staticmethod
    def _moved(game: Game, square: int, mark: str) -> Game:
        board = put(game.board, square, mark)
        return game.model_copy(update={"board": board, "outcome": outcome(board, game.mark)})

    @staticmethod
    def _over(game: Game, info: dict[str, object]) -> StepResult:
        told = {"won": "You have won.", "lost": "You have lost.", "drawn": "It is a draw."}[game.outcome or "drawn"]
        reward = {"won": 1.0, "lost": -1.0, "drawn": 0.0}[game.outcome or "drawn"]
        return StepResult(f"{drawn(game.board)}\n{told}", reward=reward, done=True, info=info)

    def _line(self, game: Game, *, draw_wins: bool) -> list[int] | None:
        """Squares that lead to full reward against an opponent that plays by a rule; None if there is no way."""
        if game.outcome is not None:
            return [] if game.outcome == "won" or (draw_wins and game.outcome == "drawn") else None
        for square in free(game.board):
            moved = self._moved(game, square, game.mark)
            if moved.outcome is None:
                moved = self._moved(moved, self._rule(moved), other(moved.mark))
            rest = self._line(moved, draw_wins=draw_wins)
            if rest is not None:
                return [square, *rest]
        return None
