"""Cancelling asyncio tasks without losing what they clean up, nor the cancellation."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

AGAIN_S = 5.0
"""How long a cancelled task may clean up before it is taken to have missed that it was cancelled."""


async def shielded(call: Awaitable[T]) -> T:
    """Let a clean-up finish although its task is being cancelled, and be cancelled after it.

    Also for clean-ups of libraries which wait for tasks of their own in a way that takes a cancellation of the caller for
    theirs, as aiokafka's clients do: called directly, the caller would go on as if nobody had cancelled it.
    """
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def ended(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks, and return when all have ended, however that is. One that goes on regardless is told again."""
    running = {task for task in tasks if task is not None}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=AGAIN_S)
