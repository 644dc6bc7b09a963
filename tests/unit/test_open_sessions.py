"""What an environment holds outside its worlds: opened before the first action, undone in reverse order whatever happens."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest

from rollstream.environments import registry
from rollstream.environments.cleanup import CleanUpStack
from rollstream.environments.protocol import OpenServices, StepServices
from rollstream.environments.tools import tool
from rollstream.errors import EnvironmentFailure
from rollstream.eventlog.endings import ending_of
from rollstream.eventlog.ownership import Assignment
from schemas.action import ObservationReturned, ToolCall, observation_id
from schemas.failure import ErrorInfo
from services.env_worker.sessions import OpenSessions
from services.env_worker.stepping import StepHandler
from services.env_worker.worlds import WorldCache
from tests.unit.test_step_handler import Bench, Lab, LabEnvironment, LabTask, Session, text_of

happened: list[str] = []
"""What was opened and undone, in order."""


class HolderWorld(Lab):
    handle: str = ""


class HolderEnvironment(LabEnvironment):
    """A lab with something outside: two things are opened before it, and a tool opens a third."""

    name: ClassVar[str] = "holder"
    world_type = HolderWorld

    def begin(self, task: LabTask) -> Lab:
        return HolderWorld(count=task.goal - 2)

    async def open(self, world: HolderWorld, services: OpenServices) -> HolderWorld:
        for name in ("network", "box"):
            happened.append(f"open {name}")
            services.cleanup.push(undo(name))
        if world.count == FAILS_TO_OPEN:
            raise RuntimeError("no box")
        if world.count == HANGS_TO_OPEN:
            await asyncio.Event().wait()
        services.live["box"] = services.session
        return world.model_copy(update={"handle": f"box of {services.session}"})

    async def close(self, world: HolderWorld, services: OpenServices) -> None:
        happened.append(f"close at {world.count}")

    @tool
    async def mount(self, world: HolderWorld, services: StepServices) -> str:
        assert services.opened is not None
        services.opened.cleanup.push(undo("mount"))
        return str(services.opened.live.get("box", "nothing"))


class LeasedEnvironment(HolderEnvironment):
    """A holder that any worker can go on with."""

    name: ClassVar[str] = "leased"

    async def resume(self, world: HolderWorld, services: OpenServices) -> HolderWorld:
        happened.append(f"resume {world.handle[:6]}")
        services.live["box"] = services.session
        services.cleanup.push(undo("box"))
        return world


FAILS_TO_OPEN, HANGS_TO_OPEN = 7, 8


class SharedEnvironment(LeasedEnvironment):
    """One whose verification needs what is outside, and closes it."""

    name: ClassVar[str] = "shared"
    verify_closes: ClassVar[bool] = True


OPENED = ["open network", "open box"]
UNDONE = ["undo box", "undo network"]


def undo(name: str) -> Callable[[], Any]:
    async def undone() -> None:
        happened.append(f"undo {name}")

    return undone


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    happened.clear()
    monkeypatch.setitem(registry.ENVIRONMENTS, "holder", HolderEnvironment)
    monkeypatch.setitem(registry.ENVIRONMENTS, "leased", LeasedEnvironment)
    monkeypatch.setitem(registry.ENVIRONMENTS, "shared", SharedEnvironment)


class Worker:
    """One env_worker that holds sessions."""

    def __init__(self, bench: Bench, most: int = 8, idle_s: float = 60.0, timeout_s: float = 60.0) -> None:
        self.bench = bench
        self.sessions = OpenSessions(most, 0.2, idle_s)
        self.handler = StepHandler(
            bench.tickets, bench.models, bench.published, WorldCache(2**20), self.sessions, timeout_s, "env_worker@test:1"
        )

    async def acts(self, session: Session, index: int, receipt: str | None, name: str, **arguments: Any) -> ObservationReturned:
        before = len(self.bench.published.events)
        await self.handler.step(session.asks(index, receipt, name, **arguments), 3)
        found = [one for one in self.bench.published.events[before:] if isinstance(one, ObservationReturned)]
        assert len(found) == 1
        return found[0]

    async def closed(self) -> None:
        async with asyncio.timeout(5):
            while len(self.sessions):
                await asyncio.sleep(0.01)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    bench = Bench()
    yield Worker(bench)
    await bench.models.close()


async def session_of(bench: Bench, index: int = 0, goal: int = 2, environment: str = "holder") -> Session:
    session = await bench.session(index, goal)
    session.environment = environment
    return session


def failure_of(observed: ObservationReturned) -> ErrorInfo:
    assert observed.failure is not None
    return observed.failure


# What ends a session.


async def test_what_was_opened_is_undone_in_reverse_order_after_the_world_has_ended(worker: Worker) -> None:
    session = await session_of(worker.bench)
    first = await worker.acts(session, 0, None, "mount")
    assert text_of(first) == session.attempt.session
    assert happened == OPENED
    second = await worker.acts(session, 1, first.receipt, "add", number=2)
    assert happened == OPENED
    over = await worker.acts(session, 2, second.receipt, "finish")
    assert over.done
    assert happened == [*OPENED, "undo mount", "close at 2", *UNDONE]
    assert len(worker.sessions) == 0


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [("explode", {}, "tool_raised"), ("hang", {}, "step_timeout"), ("earn", {"what": "nan"}, "bad_reward")],
)
async def test_a_step_that_fails_ends_its_session_and_everything_is_undone(
    name: str, arguments: dict[str, Any], kind: str
) -> None:
    bench = Bench()
    worker = Worker(bench, timeout_s=0.3)
    session = await session_of(bench)
    first = await worker.acts(session, 0, None, "mount")
    failed = await worker.acts(session, 1, first.receipt, name, **arguments)
    assert failure_of(failed).kind == kind
    assert happened == [*OPENED, "undo mount", "close at 0", *UNDONE]
    again = await worker.acts(session, 1, first.receipt, "look")
    assert failure_of(again).kind == "session_over"


@pytest.mark.parametrize(("goal", "kind"), [(FAILS_TO_OPEN + 2, "open_raised"), (HANGS_TO_OPEN + 2, "open_timeout")])
async def test_what_was_pushed_before_open_failed_is_undone_and_close_is_not_called(goal: int, kind: str) -> None:
    worker = Worker(Bench(), timeout_s=0.3)
    session = await session_of(worker.bench, goal=goal)
    assert failure_of(await worker.acts(session, 0, None, "look")).kind == kind
    assert [*OPENED, *UNDONE] == happened
    assert len(worker.sessions) == 0


async def test_an_answer_that_does_not_fit_the_log_ends_its_session(worker: Worker) -> None:
    session = await session_of(worker.bench)
    request = session.asks(0, None, "shout", megabytes=5).model_copy(update={"max_output_bytes": 10_000_000})
    await worker.handler.step(request)
    assert [one.failure.kind for one in worker.bench.published.events if isinstance(one, ObservationReturned) and one.failure]
    assert happened == [*OPENED, "close at 0", *UNDONE]


async def test_an_end_that_the_log_tells_of_closes_the_session_though_no_action_said_so(worker: Worker) -> None:
    session, other = await session_of(worker.bench, 0), await session_of(worker.bench, 1)
    await worker.acts(session, 0, None, "mount")
    await worker.acts(other, 0, None, "look")
    happened.clear()
    worker.sessions.ended("somebody else's", "verified")
    worker.sessions.ended(session.attempt.session, "handed_in")
    worker.sessions.ended(session.attempt.session, "verified")
    async with asyncio.timeout(5):
        while len(worker.sessions) > 1:
            await asyncio.sleep(0.01)
    assert happened == ["undo mount", "close at 0", *UNDONE]


@pytest.mark.parametrize(
    ("topic", "headers", "how"),
    [
        ("episodes.completed", {}, "handed_in"),
        ("rollouts.retries", {"stage": "verification"}, "handed_in"),
        ("rollouts.retries", {"stage": "agent"}, "failed"),
        ("rollouts.scored", {"status": "completed"}, "verified"),
        ("rollouts.scored", {"status": "truncated"}, "verified"),
        ("rollouts.scored", {"status": "errored"}, "failed"),
        ("rollouts.scored", {"status": "cancelled"}, "failed"),
    ],
)
async def test_what_verification_needs_is_closed_by_it_and_by_the_worker_only_without_a_verdict(
    topic: str, headers: dict[str, str], how: str, worker: Worker
) -> None:
    session = await session_of(worker.bench, environment="shared")
    await worker.acts(session, 0, None, "finish")
    assert happened == OPENED
    assert ending_of(topic, headers) == how
    worker.sessions.ended(session.attempt.session, ending_of(topic, headers))
    await asyncio.sleep(0.05)
    expected = {"handed_in": (OPENED, 1), "verified": (OPENED, 0), "failed": ([*OPENED, "close at 0", *UNDONE], 0)}
    assert (happened, len(worker.sessions)) == expected[how]


async def test_a_cancelled_run_closes_its_sessions_also_those_in_the_middle_of_an_action(worker: Worker) -> None:
    session = await session_of(worker.bench)
    first = await worker.acts(session, 0, None, "mount")
    acting = asyncio.create_task(worker.acts(session, 1, first.receipt, "hang"))
    while not worker.sessions.acting(session.attempt.session):
        await asyncio.sleep(0.01)
    # As lanes do it, before anybody else is told.
    acting.cancel()
    worker.sessions.cancelled("another run")
    worker.sessions.cancelled(session.attempt.task.run)
    await worker.closed()
    assert happened == [*OPENED, "undo mount", "close at 0", *UNDONE]
    assert acting.cancelled()


async def test_a_session_that_nobody_acts_on_is_closed_and_one_that_is_acted_on_is_not() -> None:
    worker = Worker(Bench(), idle_s=0.3)
    idle, busy = await session_of(worker.bench, 0), await session_of(worker.bench, 1)
    await worker.sessions.start()
    await worker.acts(idle, 0, None, "look")
    observed = await worker.acts(busy, 0, None, "look")
    for index in range(1, 8):
        await asyncio.sleep(0.1)
        observed = await worker.acts(busy, index, observed.receipt, "look")
    assert happened == [*OPENED, *OPENED, "close at 0", *UNDONE]
    assert len(worker.sessions) == 1
    await worker.sessions.close()


async def test_a_worker_that_stops_closes_what_nobody_can_resume_and_leaves_what_others_can(worker: Worker) -> None:
    await worker.acts(await session_of(worker.bench, 0), 0, None, "look")
    await worker.acts(await session_of(worker.bench, 1, environment="leased"), 0, None, "add", number=5)
    happened.clear()
    await worker.sessions.close()
    assert (happened, len(worker.sessions)) == (["close at 0", *UNDONE], 0)


async def test_a_partition_that_goes_to_another_worker_takes_its_sessions_with_it(worker: Worker) -> None:
    session = await session_of(worker.bench)
    observed = await worker.acts(session, 0, None, "look")
    worker.sessions.assigned(Assignment({3: 0, 4: 0}, frozenset({4})))
    await asyncio.sleep(0.05)
    observed = await worker.acts(session, 1, observed.receipt, "look")
    worker.sessions.assigned(Assignment({4: 0}, frozenset()))
    await worker.closed()
    assert happened == [*OPENED, "close at 0", *UNDONE]


# How it is undone.


async def test_a_clean_up_that_fails_or_hangs_keeps_no_other_from_running_and_is_told() -> None:
    stack = CleanUpStack("environment e, session s", 0.1)

    async def raises() -> None:
        raise OSError("no such box")

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def pushes() -> None:
        stack.push(undo("late"))

    for callback in (undo("first"), raises, hangs, undo("last"), pushes):
        stack.push(callback)
    failures = await stack.run()
    assert happened == ["undo late", "undo last", "undo first"]
    assert [(one.kind, one.stage, one.retryable) for one in failures] == [
        ("cleanup_timeout", "cleanup", False),
        ("cleanup_raised", "cleanup", False),
    ]
    assert "no such box" in str(failures[1])
    assert await stack.run() == []
    with pytest.raises(EnvironmentFailure, match="is over and cleaned up"):
        stack.push(undo("never"))


async def test_a_clean_up_that_fails_changes_no_outcome(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(HolderEnvironment):
        async def close(self, world: HolderWorld, services: OpenServices) -> None:
            raise OSError("the box does not stop")

    registry.ENVIRONMENTS["holder"] = Broken
    over = await worker.acts(await session_of(worker.bench), 0, None, "finish")
    assert (over.done, over.failure) == (True, None)
    assert happened == [*OPENED, *UNDONE]
    assert "the box does not stop" in caplog.text


# Who may act.


async def test_a_session_that_another_worker_opened_is_retried_or_resumed(worker: Worker) -> None:
    other = Worker(worker.bench)
    session = await session_of(worker.bench)
    first = await worker.acts(session, 0, None, "add", number=1)
    elsewhere = failure_of(await other.acts(session, 1, first.receipt, "look"))
    assert (elsewhere.kind, elsewhere.retryable, len(other.sessions)) == ("world_elsewhere", True, 0)
    leased = await session_of(worker.bench, 1, environment="leased")
    first = await worker.acts(leased, 0, None, "add", number=1)
    happened.clear()
    second = await other.acts(leased, 1, first.receipt, "mount")
    assert text_of(second) == leased.attempt.session
    assert (await other.acts(leased, 2, second.receipt, "finish")).done
    assert happened == ["resume box of", "undo mount", "close at 1", "undo box"]


async def test_no_more_sessions_are_held_than_may_be_and_waiting_for_room_uses_up_no_attempt() -> None:
    worker = Worker(Bench(), most=2)
    sessions = [await session_of(worker.bench, index) for index in range(3)]
    first = [await worker.acts(session, 0, None, "look") for session in sessions]
    assert [one.failure.kind if one.failure else None for one in first] == [None, None, "no_room"]
    assert failure_of(first[2]).retryable
    await worker.acts(sessions[0], 1, first[0].receipt, "finish")
    assert text_of(await worker.acts(sessions[2], 0, None, "look")) == "0"


async def test_an_action_that_comes_again_changes_what_is_outside_once(worker: Worker) -> None:
    session = await session_of(worker.bench)
    first = await worker.acts(session, 0, None, "add", number=1)
    second = session.asks(1, first.receipt, "mount")
    before = len(worker.bench.published.events)
    await asyncio.gather(*(worker.handler.step(second) for _ in range(3)))
    assert len(worker.bench.published.events) == before + 1
    await worker.sessions.close()
    assert happened.count("undo mount") == 1


async def test_what_is_outside_is_not_acted_on_from_an_older_receipt_and_lives_on(worker: Worker) -> None:
    session = await session_of(worker.bench)
    first = await worker.acts(session, 0, None, "add", number=1)
    second = await worker.acts(session, 1, first.receipt, "add", number=1)
    other = ToolCall(id="other", name="add", arguments={"number": 9})
    for index, receipt in ((1, first.receipt), (0, None)):
        request = session.asks(index, receipt, "look").model_copy(update={"event_id": f"fork-{index}", "action": other})
        await worker.handler.step(request)
        told = worker.bench.published.events[-1]
        assert isinstance(told, ObservationReturned)
        assert (failure_of(told).kind, failure_of(told).retryable) == ("stale_receipt", True)
    assert text_of(await worker.acts(session, 2, second.receipt, "look")) == "2"
    assert happened == OPENED


async def test_a_forged_action_opens_nothing(worker: Worker) -> None:
    session, other = await session_of(worker.bench, 0), await session_of(worker.bench, 1)
    request = session.asks(0, None, "look").model_copy(update={"ticket": other.ticket})
    await worker.handler.step(request)
    told = worker.bench.published.events[-1]
    assert isinstance(told, ObservationReturned)
    assert (failure_of(told).kind, happened, len(worker.sessions)) == ("ticket_refused", [], 0)


async def test_what_was_opened_for_an_answer_that_came_second_is_undone(worker: Worker) -> None:
    first_worker, again = Worker(worker.bench), Worker(worker.bench)
    session = await session_of(worker.bench, environment="leased")
    first = await first_worker.acts(session, 0, None, "add", number=1)
    await again.acts(session, 0, None, "add", number=1)
    happened.clear()
    assert text_of(await again.acts(session, 1, first.receipt, "look")) == "1"
    assert happened == ["close at 1", *UNDONE, "resume box of"]
    assert len(again.sessions) == 1


class CountedEnvironment(LabEnvironment):
    """Counts what is open for each session, and acts on nothing that is not."""

    name: ClassVar[str] = "counted"
    open_now: ClassVar[Counter[str]] = Counter()
    opened: ClassVar[Counter[str]] = Counter()

    async def open(self, world: Lab, services: OpenServices) -> Lab:
        await asyncio.sleep(0)
        self.open_now[services.session] += 1
        self.opened[services.session] += 1
        return world

    async def step(self, world: Lab, action: Any, services: StepServices) -> Any:
        assert services.opened is not None
        session = services.opened.session
        assert self.open_now[session] == 1, "acted on what is not open"
        stepped = await super().step(world, action, services)
        await asyncio.sleep(0)
        assert self.open_now[session] == 1, "closed in the middle of an action"
        return stepped

    async def close(self, world: Lab, services: OpenServices) -> None:
        await asyncio.sleep(0)
        self.open_now[services.session] -= 1


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_ends_sessions_and_whenever_everything_opened_is_closed_once(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "counted", CountedEnvironment)
    CountedEnvironment.open_now.clear()
    CountedEnvironment.opened.clear()
    chances = random.Random(seed)
    worker = Worker(Bench(), most=100)

    async def play(index: int) -> None:
        session = await session_of(worker.bench, index, environment="counted")
        receipt: str | None = None
        for step in range(chances.randrange(1, 6)):
            name, arguments = chances.choice([("add", {"number": 1}), ("look", {}), ("finish", {}), ("explode", {})])
            request = session.asks(step, receipt, name, **arguments)
            acting = [asyncio.create_task(worker.handler.step(request, index % 4)) for _ in range(chances.choice([1, 1, 2]))]
            if chances.random() < 0.1:
                await asyncio.sleep(0)
                # As lanes do when a partition is lost; whoever has it then is told besides.
                acting[0].cancel()
                worker.sessions.assigned(Assignment(dict.fromkeys({0, 1, 2, 3} - {index % 4}), frozenset()))
            if chances.random() < 0.2:
                worker.sessions.ended(session.attempt.session, chances.choice(["handed_in", "failed"]))
            await asyncio.gather(*acting, return_exceptions=True)
            found = [one for one in worker.bench.published.events if one.event_id == observation_id(request.event_id)]
            receipt = found[0].receipt if found and isinstance(found[0], ObservationReturned) else None
            if receipt is None:
                return

    await asyncio.gather(*(play(index) for index in range(60)))
    await worker.sessions.close()
    assert len(CountedEnvironment.opened) >= 30
    assert set(CountedEnvironment.open_now.values()) == {0}
    assert "AssertionError" not in caplog.text
    assert len(worker.sessions) == 0
