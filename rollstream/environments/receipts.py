"""Receipts: the world after an action, and what the actions so far earned. Pure; `tickets` seals them.

A receipt is what makes workers stateless: the next action carries it, and the last one tells the verifier how it ended.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Annotated

from pydantic import Field

from rollstream.errors import Refused
from schemas.action import ActionRequested, chained_digest
from schemas.values import Name, Value
from schemas.verdict import StepReward


class Receipt(Value):
    """What is known of a session after an action."""

    session: Name
    index: Annotated[int, Field(ge=0)]
    """Of the action."""
    digest: str
    """Over all actions so far, in order: which actions this is the receipt for."""
    trail: str = ""
    """Over the ids of all actions so far, in order; empty in receipts of before there was one."""
    world: str
    """As JSON."""
    rewards: list[StepReward] = []
    done: bool = False

    def to_json(self) -> bytes:
        return self.__pydantic_serializer__.to_json(self)


class ActionRefused(Refused):
    """An action that does not follow from what was there before."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message, stage="agent", kind=kind)


def trail_of(actions: Iterable[str], before: str = "") -> str:
    """SHA-256 chained over the ids of actions."""
    for action in actions:
        before = sha256(f"{before}\n{action}".encode()).hexdigest()
    return before


def require_whole(session: str, actions: Sequence[str], receipt: Receipt | None) -> None:
    """Make sure that an episode was handed in with the receipt of its last action, and with all of its actions.

    Raises:
        Refused: it was not. What the agent's side tells of its actions is not believed, and not scored either.
    """
    claimed = f"{len(actions)} action{'' if len(actions) == 1 else 's'}"
    if receipt is None:
        found = None if not actions else f"{claimed} without any receipt"
    elif receipt.index + 1 != len(actions):
        found = f"{claimed} with the receipt of {receipt.index + 1}"
    else:
        found = f"{claimed} with the receipt of others" if receipt.trail not in ("", trail_of(actions)) else None
    if found is not None:
        message = f"expected the episode of session {session} with the receipt of the last of its actions, found {found}"
        raise Refused(message, stage="verification", kind="receipt_mismatch")


def require_next(request: ActionRequested, before: Receipt | None) -> str:
    """Make sure that an action follows its receipt; returns the digest of all actions with this one.

    Raises:
        ActionRefused: it has another index than the next, or the episode was over.
    """
    expected = 0 if before is None else before.index + 1
    if before is not None and before.done:
        raise ActionRefused(
            f"expected no action after the end of session {request.session}, found one of index {request.index}",
            "action_after_done",
        )
    if request.index != expected:
        raise ActionRefused(
            f"expected the action of index {expected} in session {request.session}, found index {request.index}",
            "action_out_of_order",
        )
    return chained_digest("" if before is None else before.digest, request.action)
