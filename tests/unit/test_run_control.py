"""Paused and cancelled runs: what has been said of them, who waits for whom, and what makes a worker pause one."""

import asyncio
from collections.abc import Iterable
from datetime import timedelta

import pytest

from rollstream.errors import ModelFailure
from rollstream.eventlog.control import RunControl, RunStates
from rollstream.eventlog.waiting import WaitingRoom
from schemas.envelope import Event, now
from schemas.retry import RetryScheduled
from schemas.run import RunCancelled, RunPaused, RunResumed
from services.agent_worker.pauses import HOW_MANY, Pauses
from tests.controls import unheard
from tests.events import Attempt, run_published


def paused(run: str = "run-1", reason: str = "the key is refused") -> RunPaused:
    return RunPaused.create(run=run, reason=reason, cause="model_unauthorized", by="agent_worker@host:1")


def states(*events: Event) -> RunStates:
    found = RunStates()
    for event in events:
        found.learn(event)
    return found


# What has been said.


def test_a_run_that_was_only_announced_goes_on() -> None:
    found = states(run_published())
    assert found.paused("run-1") is None
    assert not found.cancelled("run-1")
    assert found.paused_runs() == {}


def test_the_last_word_holds_and_other_runs_are_not_concerned() -> None:
    first, second = paused(reason="first"), paused(reason="second")
    assert states(first, second).paused("run-1") == second
    assert states(first, RunResumed.create(run="run-1")).paused("run-1") is None
    assert states(first).paused("run-2") is None
    assert states(first, paused("run-2")).paused_runs().keys() == {"run-1", "run-2"}


def test_a_cancelled_run_is_not_paused_any_more_and_only_a_resume_brings_it_back() -> None:
    cancelled = states(paused(), RunCancelled.create(run="run-1"))
    assert cancelled.cancelled("run-1")
    assert cancelled.paused("run-1") is None
    cancelled.learn(RunResumed.create(run="run-1"))
    assert not cancelled.cancelled("run-1")


# Waiting.


def due_in(seconds: float) -> RetryScheduled:
    at = now()
    return Attempt().retry().model_copy(update={"occurred_at": at, "not_before": at + timedelta(seconds=seconds)})


class Work:
    """What is done with a retry; counts, and goes on until it is let go."""

    def __init__(self, held: bool = False) -> None:
        self.begun: list[str] = []
        self.let_go = asyncio.Event()
        if not held:
            self.let_go.set()

    async def __call__(self, retry: RetryScheduled) -> None:
        self.begun.append(retry.rollout)
        await self.let_go.wait()


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def admitted(room: WaitingRoom, retry: RetryScheduled, work: Work) -> "asyncio.Task[None]":
    return asyncio.create_task(room.admit(retry, work))


async def test_a_retry_that_is_due_works_at_once_and_another_not_before_its_time() -> None:
    room, work = WaitingRoom(unheard(), 10), Work()
    later = admitted(room, due_in(0.1), work)
    await room.admit(due_in(-5), work)
    assert len(work.begun) == 1
    begun = asyncio.get_running_loop().time()
    await later
    assert len(work.begun) == 2
    assert asyncio.get_running_loop().time() - begun > 0.05


async def test_a_clock_that_is_ahead_makes_nobody_wait_longer_than_was_planned() -> None:
    tomorrow = now() + timedelta(days=1)
    retry = due_in(0).model_copy(update={"occurred_at": tomorrow, "not_before": tomorrow + timedelta(seconds=0.05)})
    work = Work()
    async with asyncio.timeout(5):
        await WaitingRoom(unheard(), 10).admit(retry, work)
    assert len(work.begun) == 1


async def test_a_paused_run_waits_until_it_is_resumed() -> None:
    control, work = unheard(), Work()
    await control.tell(paused())
    waiting = admitted(WaitingRoom(control, 10), due_in(0), work)
    await settled()
    assert work.begun == []
    await control.tell(RunResumed.create(run="run-1"))
    async with asyncio.timeout(5):
        await waiting
    assert len(work.begun) == 1


async def test_a_run_that_is_cancelled_while_its_retry_waits_does_no_work() -> None:
    control, work = unheard(), Work()
    await control.tell(paused())
    waiting = admitted(WaitingRoom(control, 10), due_in(0), work)
    await settled()
    await control.tell(RunCancelled.create(run="run-1"))
    async with asyncio.timeout(5):
        await waiting
    assert work.begun == []


async def test_only_so_many_work_at_once_however_many_are_due() -> None:
    work = Work(held=True)
    room = WaitingRoom(unheard(), at_once=2)
    tasks = [admitted(room, due_in(0), work) for _ in range(5)]
    await settled()
    assert len(work.begun) == 2
    work.let_go.set()
    await asyncio.gather(*tasks)
    assert len(work.begun) == 5


async def test_those_that_wait_for_their_time_keep_nobody_else_from_working() -> None:
    work = Work()
    room = WaitingRoom(unheard(), at_once=1)
    waiting = [admitted(room, due_in(60), work) for _ in range(5)]
    async with asyncio.timeout(5):
        await room.admit(due_in(0), work)
    assert len(work.begun) == 1
    for task in waiting:
        task.cancel()


# What makes a worker pause a run.


class Published:
    """A `Publisher` on a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def publish(self, events: Iterable[Event]) -> None:
        self.events += events


def pausing() -> tuple[Pauses, RunControl, Published]:
    control, published = unheard(), Published()
    return Pauses(control, published, "agent_worker@host:1"), control, published


def failure(kind: str) -> ModelFailure:
    return ModelFailure(f"the server says {kind}", kind=kind, retryable=False)


@pytest.mark.parametrize("kind", ["model_unauthorized", "model_payment_required", "model_forbidden", "model_not_found"])
async def test_what_would_fail_every_episode_alike_pauses_the_run_at_once_and_once(kind: str) -> None:
    pauses, control, published = pausing()
    await pauses.consider("run-1", failure(kind))
    await pauses.consider("run-1", failure(kind))
    (pause,) = published.events
    assert isinstance(pause, RunPaused)
    assert (pause.run, pause.cause, pause.by) == ("run-1", kind, "agent_worker@host:1")
    assert f"the server says {kind}" in pause.reason
    assert "`rollstream resume run-1`" in pause.reason
    assert control.paused("run-1") == pause


async def test_a_request_that_the_server_calls_invalid_pauses_its_run_only_when_several_in_a_row_are() -> None:
    pauses, control, _ = pausing()
    for _ in range(HOW_MANY - 1):
        await pauses.consider("run-1", failure("model_rejected_request"))
    pauses.went_well("run-1")
    for _ in range(HOW_MANY - 1):
        await pauses.consider("run-1", failure("model_rejected_request"))
        await pauses.consider("run-2", failure("model_unavailable"))
    assert control.paused("run-1") is None
    await pauses.consider("run-1", failure("model_rejected_request"))
    assert control.paused("run-1") is not None
    assert control.paused("run-2") is None


async def test_work_of_a_paused_run_is_parked_in_the_log_without_using_up_an_attempt() -> None:
    pauses, control, published = pausing()
    descriptor = Attempt(try_=1).ready().model_copy(update={"failures": 1})
    assert not await pauses.parked(descriptor)
    await control.tell(paused(reason="the key is refused"))
    assert await pauses.parked(descriptor)
    (retry,) = published.events
    assert isinstance(retry, RetryScheduled)
    assert (retry.failures, retry.next_try, retry.cause.kind) == (1, 2, "run_paused")
    assert retry.cause.message == "the key is refused"
    assert retry.not_before <= now()
