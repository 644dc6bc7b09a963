"""Tasks that are cancelled: what they clean up is finished, and none goes on as if nothing had happened."""

import asyncio

import pytest

from rollstream import cancelling
from rollstream.cancelling import ended, shielded


async def test_a_clean_up_is_finished_and_the_task_is_cancelled_after_it() -> None:
    begun, finished = asyncio.Event(), asyncio.Event()

    async def clean_up() -> None:
        begun.set()
        await asyncio.sleep(0.05)
        finished.set()

    task = asyncio.create_task(shielded(clean_up()))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert finished.is_set()


async def test_what_a_clean_up_returns_and_raises_is_its_callers() -> None:
    async def fail() -> None:
        raise OSError("no")

    assert await shielded(asyncio.sleep(0, 7)) == 7
    with pytest.raises(OSError, match="no"):
        await shielded(fail())


async def test_a_clean_up_that_takes_a_cancellation_for_another_ones_does_not_keep_its_caller_from_ending() -> None:
    begun = asyncio.Event()

    async def close() -> None:
        # As aiokafka's clients do: they cancel a task of theirs, and wait for it.
        own = asyncio.create_task(asyncio.sleep(60))
        begun.set()
        await asyncio.sleep(0)
        own.cancel()
        try:
            await own
        except asyncio.CancelledError:
            return

    async def caller() -> None:
        await shielded(close())
        await asyncio.sleep(60)

    task = asyncio.create_task(caller())
    await begun.wait()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10)
    assert done
    assert task.cancelled()


async def test_tasks_that_miss_that_they_are_cancelled_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "AGAIN_S", 0.01)
    missed = 0

    async def hard_of_hearing() -> None:
        nonlocal missed
        while missed < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                missed += 1
        await asyncio.sleep(60)

    async def fails() -> None:
        raise OSError("no")

    deaf, over, failed = (
        asyncio.create_task(hard_of_hearing()),
        asyncio.create_task(asyncio.sleep(0)),
        asyncio.create_task(fails()),
    )
    await asyncio.sleep(0.01)
    await ended(deaf, None, over, failed)
    assert (missed, deaf.cancelled(), over.done()) == (3, True, True)
    assert isinstance(failed.exception(), OSError)


async def test_nothing_to_end_is_no_error() -> None:
    await ended()
    await ended(None)
