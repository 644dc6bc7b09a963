"""Carrying out one action: what is answered, what it earned, and what is refused."""

import asyncio
import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollstream.blobs import BlobReference, BlobStore
from rollstream.environments import registry
from rollstream.environments.protocol import Episode, Services, StepServices, Task, Verdict, World
from rollstream.environments.receipts import Receipt
from rollstream.environments.tickets import Tickets
from rollstream.environments.tools import Combination, ToolEnvironment, ToolError, ToolResult, tool
from rollstream.errors import EnvironmentFailure, NoRoom
from rollstream.eventlog.producer import RecordTooLarge
from rollstream.models.openai import ModelPool
from rollstream.sealing import Sealer
from rollstream.settings import ModelSettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, always
from schemas.action import ActionRequested, EnvironmentCalled, ObservationReturned, StepRewarded, ToolCall, action_id
from schemas.envelope import Event
from schemas.events import EVENTS, decode
from schemas.session import Submission
from schemas.step import Execution
from schemas.values import ChatMessage, Composition, JsonObject
from schemas.verdict import StepReward
from services.env_worker.sessions import OpenSessions
from services.env_worker.stepping import StepHandler
from services.env_worker.trails import Trails
from services.env_worker.worlds import OpenWorld, WorldCache
from tests.events import Attempt, at, task_submitted

KEY = b"k" * 32


class LabTask(Task):
    goal: int = 2


class Lab(World):
    count: int = 0
    ballast: str = ""


class LabEnvironment(ToolEnvironment[LabTask, Lab]):
    """A tool for each thing that can go well or wrong."""

    name: ClassVar[str] = "lab"
    version: ClassVar[str] = "1"
    task_type = LabTask
    world_type = Lab
    combination: ClassVar[Combination] = Combination(terminal=1.0, steps=0.5)

    def begin(self, task: LabTask) -> Lab:
        return Lab()

    def prompt(self, task: LabTask) -> list[ChatMessage]:
        return [{"role": "user", "content": "Work."}]

    @tool
    async def add(self, world: Lab, number: int) -> ToolResult:
        """Add a number."""
        world.count += number
        return ToolResult({"count": world.count}, reward=0.25, info={"why": "added"}, components={"size": float(number)})

    @tool
    async def look(self, world: Lab) -> int:
        return world.count

    @tool
    async def finish(self, world: Lab) -> ToolResult:
        return ToolResult("over", done=True)

    @tool
    async def stop_short(self, world: Lab) -> ToolResult:
        return ToolResult("too long", truncated=True)

    @tool
    async def refuse(self, world: Lab) -> str:
        world.count = 99
        raise ToolError("not now")

    @tool
    async def explode(self, world: Lab) -> str:
        raise ZeroDivisionError("in the tool")

    @tool
    async def crowd(self, world: Lab) -> str:
        raise NoRoom("all rooms are taken")

    @tool
    async def hang(self, world: Lab) -> str:
        await asyncio.Event().wait()
        return "never"

    @tool
    async def earn(self, world: Lab, what: str) -> ToolResult:
        return ToolResult("paid", reward=float(what))

    @tool
    async def shout(self, world: Lab, megabytes: int) -> str:
        return "x" * (megabytes * 1_000_000)

    @tool
    async def mumble(self, world: Lab) -> bytes:
        return b"caf\xe9"

    @tool
    async def halve(self, world: Lab) -> str:
        return "half a pair: \ud800."

    @tool
    async def load(self, world: Lab, kilobytes: int) -> str:
        world.ballast = "".join(sha256(b"%d" % number).hexdigest() for number in range(kilobytes * 16))
        return "loaded"

    @tool
    async def ask(self, world: Lab, services: StepServices, role: str) -> str:
        completion = await services.models.complete([{"role": "user", "content": "Well?"}], role)
        return str(completion.message["content"])

    @tool
    async def ask_then_explode(self, world: Lab, services: StepServices, role: str) -> str:
        await self.ask(world, services, role)
        raise ZeroDivisionError("after the answer")

    @tool
    async def ask_on(self, world: Lab, services: StepServices, role: str) -> str:
        while True:
            await self.ask(world, services, role)

    async def score(self, task: LabTask, world: Lab, episode: Episode, services: Services) -> Verdict:
        return Verdict(reward=1.0 if world.count == task.goal else 0.0)


class Published:
    """A `Publisher` that keeps what it is given, as it would be read again; what is too large for a record it refuses."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def publish(self, events: Iterable[Event]) -> None:
        for event in events:
            raw = event.to_json()
            if len(raw) > 1_000_000:
                raise RecordTooLarge(event, 1_000_000)
            self.events.append(decode(raw, EVENTS[event.kind]))


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENVIRONMENTS, "lab", LabEnvironment)


class Bench:
    """One env_worker's handler, and the sessions that act on it."""

    def __init__(
        self, blobs: str = "memory://step-handler", base_url: str = "http://127.0.0.1:9/v1", timeout_s: float = 60.0
    ) -> None:
        self.tickets = Tickets(Sealer([KEY]), BlobStore(blobs), 8192)
        self.published = Published()
        self.cache = WorldCache(2**20)
        models = {"judge-1b": ModelSettings(base_url=base_url, max_retries=0)}
        self.models = ModelPool(Settings(models=models))
        self._timeout_s = timeout_s
        self.handler = self.worker()

    def worker(self) -> StepHandler:
        """Another worker of the same installation, with a cache of its own."""
        sessions = OpenSessions(8, 1.0, 60.0)
        worlds = WorldCache(2**20)
        return StepHandler(self.tickets, self.models, self.published, worlds, sessions, self._timeout_s, "env_worker@test:1")

    async def act(self, request: ActionRequested, worker: StepHandler | None = None) -> ObservationReturned:
        await (worker or self.handler).step(request)
        found = [event for event in self.published.events if isinstance(event, ObservationReturned)]
        return found[-1]

    async def session(self, index: int = 0, goal: int = 2) -> "Session":
        attempt = Attempt(task_submitted(environment="lab"), index=index)
        return Session(attempt, await self.tickets.seal_task({"goal": goal}, attempt.session))

    @property
    def called(self) -> list[EnvironmentCalled]:
        return [event for event in self.published.events if isinstance(event, EnvironmentCalled)]

    @property
    def rewards(self) -> list[StepRewarded]:
        return [event for event in self.published.events if isinstance(event, StepRewarded)]


class Session:
    """Actions of one session."""

    def __init__(self, attempt: Attempt, ticket: str) -> None:
        self.attempt, self.ticket = attempt, ticket
        self.environment = "lab"

    def asks(self, index: int, receipt: str | None, name: str, **arguments: object) -> ActionRequested:
        composition = Composition(harness="tools", models={"policy": "p", "judge": "judge-1b"})
        return ActionRequested(
            event_id=action_id(self.attempt.session, "e", "agent", index),
            occurred_at=at(3),
            caused_at=at(1),
            execution=Execution(id="e"),
            index=index,
            action=ToolCall(id=f"call-{index}", name=name, arguments=arguments),
            composition=composition,
            max_output_bytes=10_000,
            ticket=self.ticket,
            receipt=receipt,
            **self.attempt.ids() | {"environment": self.environment},
        )


def text_of(observed: ObservationReturned) -> str:
    (message,) = observed.messages
    assert message["role"] == "tool"
    return str(message["content"])


# What happens.


async def test_an_action_is_answered_with_what_the_agent_sees_and_its_reward_goes_another_way() -> None:
    bench = Bench()
    session = await bench.session()
    observed = await bench.act(session.asks(0, None, "add", number=2))
    assert observed.messages == [{"role": "tool", "tool_call_id": "call-0", "content": '{"count":2}'}]
    assert (observed.done, observed.truncated, observed.failure, observed.escaped) == (False, False, None, False)
    (rewarded,) = bench.rewards
    assert (rewarded.reward, rewarded.components, rewarded.info) == (0.25, {"size": 2.0}, {"why": "added"})
    assert rewarded.action == observed.action
    assert b"0.25" not in observed.to_json()


async def test_any_worker_goes_on_where_another_one_stopped() -> None:
    bench = Bench()
    session = await bench.session()
    first = await bench.act(session.asks(0, None, "add", number=2), bench.worker())
    second = await bench.act(session.asks(1, first.receipt, "add", number=3), bench.worker())
    third = await bench.act(session.asks(2, second.receipt, "look"), bench.worker())
    assert text_of(third) == "5"
    assert third.receipt is not None
    receipt = await bench.tickets.open_receipt(third.receipt, session.attempt.session)
    assert [step.reward for step in receipt.rewards] == [0.25, 0.25, None]
    assert (receipt.index, receipt.done) == (2, False)


async def test_a_worker_that_knows_the_world_already_gives_the_same_answer() -> None:
    bench = Bench()
    session = await bench.session()
    first = await bench.act(session.asks(0, None, "add", number=2))
    warm = await bench.act(session.asks(1, first.receipt, "look"))
    cold = await bench.act(session.asks(1, first.receipt, "look"), bench.worker())
    assert warm.model_dump(exclude={"receipt", "occurred_at", "duration_s"}) == cold.model_dump(
        exclude={"receipt", "occurred_at", "duration_s"}
    )


async def test_an_action_that_is_handled_twice_has_answers_and_rewards_of_one_id() -> None:
    bench = Bench()
    session = await bench.session()
    request = session.asks(0, None, "add", number=2)
    first, again = await bench.act(request), await bench.act(request, bench.worker())
    assert first.event_id == again.event_id
    assert len({event.event_id for event in bench.rewards}) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("nothing", {}, "error: no tool is called 'nothing'; there are add, ask"),
        ("add", {}, "error: expected valid arguments of add, found number: Field required"),
        ("add", {"number": "2"}, "error: expected valid arguments of add, found number: Input should be a valid integer"),
        ("add", {"number": 2, "more": 1}, "error: expected valid arguments of add, found more: Extra inputs are not permitted"),
        ("refuse", {}, "error: not now"),
    ],
)
async def test_what_an_agent_does_wrong_is_told_to_it_and_leaves_the_world_as_it_was(
    name: str, arguments: JsonObject, told: str
) -> None:
    bench = Bench()
    session = await bench.session()
    observed = await bench.act(session.asks(0, None, name, **arguments))
    assert text_of(observed).startswith(told)
    assert text_of(await bench.act(session.asks(1, observed.receipt, "look"))) == "0"


async def test_the_end_of_the_world_and_a_limit_of_the_environment_are_told_apart() -> None:
    bench = Bench()
    over = await bench.act((await bench.session(0)).asks(0, None, "finish"))
    short = await bench.act((await bench.session(1)).asks(0, None, "stop_short"))
    assert [(one.done, one.truncated) for one in (over, short)] == [(True, False), (False, True)]


async def test_a_model_that_an_environment_asks_is_recorded_where_the_agent_does_not_read() -> None:
    async with ScriptedModelServer(always("Rather well.")) as server:
        bench = Bench(base_url=server.base_url)
        session = await bench.session()
        observed = await bench.act(session.asks(0, None, "ask", role="judge"))
        unbound = await bench.act(session.asks(1, observed.receipt, "ask", role="opponent"))
        await bench.models.close()
    assert text_of(observed) == "Rather well."
    (called,) = bench.called
    assert (called.role, called.message["content"], called.call.model) == ("judge", "Rather well.", "judge-1b")
    assert (called.stage, called.cause, called.index, called.escaped) == ("agent", observed.action, 0, False)
    assert "calls" not in json.loads(observed.to_json())
    assert unbound.failure is not None
    assert unbound.failure.kind == "role_unbound"
    assert "the run binds judge, policy" in unbound.failure.message


async def test_what_models_were_asked_is_in_the_log_though_the_step_fails_or_is_done_twice() -> None:
    async with ScriptedModelServer(always("Rather well.")) as server:
        bench = Bench(base_url=server.base_url)
        session = await bench.session()
        request = session.asks(0, None, "ask_then_explode", role="judge")
        first, second = await bench.act(request), await bench.act(request, bench.worker())
        await bench.models.close()
    assert first.failure is not None
    assert (first.failure.kind, first.event_id) == ("tool_raised", second.event_id)
    assert [(one.role, one.index, one.call.usage.completion_tokens > 0) for one in bench.called] == [("judge", 0, True)] * 2
    assert len({one.event_id for one in bench.called}) == 2
    assert bench.rewards == []


async def test_an_answer_too_long_for_the_log_is_cut_there_and_whole_for_the_environment() -> None:
    async with ScriptedModelServer(always("x" * 600_000)) as server:
        bench = Bench(base_url=server.base_url)
        session = await bench.session()
        request = session.asks(0, None, "ask", role="judge").model_copy(update={"max_output_bytes": 700_000})
        observed = await bench.act(request)
        await bench.models.close()
    assert len(text_of(observed)) == 600_000
    (called,) = bench.called
    assert called.escaped
    assert int(str(called.response["omitted_bytes"])) > 600_000
    assert "[truncated by rollstream: 600000 bytes in all" in str(called.message["content"])


async def test_an_environment_that_asks_without_end_fails_and_has_what_it_asked_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollstream.environments.roles.MAX_CALLS", 3)
    async with ScriptedModelServer(always("Go on.")) as server:
        bench = Bench(base_url=server.base_url)
        observed = await bench.act((await bench.session()).asks(0, None, "ask_on", role="judge"))
        await bench.models.close()
    assert observed.failure is not None
    assert (observed.failure.kind, observed.failure.retryable, len(bench.called)) == ("too_many_calls", False, 3)


# What an environment can do wrong.


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "retryable"),
    [
        ("explode", {}, "tool_raised", False),
        ("hang", {}, "step_timeout", True),
        ("earn", {"what": "nan"}, "bad_reward", False),
        ("earn", {"what": "inf"}, "bad_reward", False),
        ("ask", {"role": "judge"}, "model_unreachable", True),
    ],
)
async def test_a_step_that_fails_is_answered_with_a_failure_and_earns_nothing(
    name: str, arguments: JsonObject, kind: str, retryable: bool
) -> None:
    bench = Bench(timeout_s=0.5 if name == "hang" else 60.0)
    session = await bench.session()
    observed = await bench.act(session.asks(0, None, name, **arguments))
    assert observed.failure is not None
    assert (observed.failure.kind, observed.failure.retryable, observed.receipt) == (kind, retryable, None)
    assert bench.rewards == []
    await bench.models.close()


async def test_fifty_megabytes_are_cut_to_what_the_agent_wants_to_see() -> None:
    bench = Bench()
    session = await bench.session()
    observed = await bench.act(session.asks(0, None, "shout", megabytes=50))
    assert observed.escaped
    assert text_of(observed).endswith("[truncated by rollstream: 50000000 bytes in all, 10000 kept]")
    assert len(observed.to_json()) < 20_000


async def test_what_does_not_fit_a_record_is_answered_too() -> None:
    bench = Bench()
    session = await bench.session()
    request = session.asks(0, None, "look").model_copy(update={"max_output_bytes": 10_000_000})
    action = ToolCall(id="c", name="shout", arguments={"megabytes": 5})
    observed = await bench.act(request.model_copy(update={"action": action}))
    assert observed.failure is not None
    assert (observed.failure.kind, observed.failure.retryable, bench.rewards) == ("record_too_large", False, [])


@pytest.mark.parametrize(("name", "told"), [("mumble", "caf\\xe9"), ("halve", "half a pair: \\ud800.")])
async def test_what_is_no_unicode_is_spelled_out_and_marked(name: str, told: str) -> None:
    bench = Bench()
    session = await bench.session()
    observed = await bench.act(session.asks(0, None, name))
    assert (text_of(observed), observed.escaped) == (told, True)


# What an agent's side can do wrong.


async def refused(bench: Bench, request: ActionRequested) -> str:
    observed = await bench.act(request, bench.worker())
    assert observed.failure is not None
    assert (observed.receipt, observed.messages, observed.failure.retryable) == (None, [], False)
    return observed.failure.kind


async def test_nobody_acts_after_the_end() -> None:
    bench = Bench()
    for index, name in enumerate(("finish", "stop_short")):
        session = await bench.session(index)
        over = await bench.act(session.asks(0, None, name))
        assert await refused(bench, session.asks(1, over.receipt, "look")) == "action_after_done"


async def test_actions_come_in_order_and_each_once() -> None:
    bench = Bench()
    session = await bench.session()
    first = await bench.act(session.asks(0, None, "add", number=1))
    second = await bench.act(session.asks(1, first.receipt, "add", number=1))
    assert await refused(bench, session.asks(1, None, "look")) == "action_out_of_order"
    assert await refused(bench, session.asks(0, first.receipt, "look")) == "action_out_of_order"
    assert await refused(bench, session.asks(2, first.receipt, "look")) == "action_out_of_order"
    assert await refused(bench, session.asks(1, second.receipt, "look")) == "action_out_of_order"


@pytest.mark.parametrize("index", [0, 1])
async def test_what_was_seen_of_an_action_cannot_be_made_unseen_by_another_in_its_place(index: int) -> None:
    bench = Bench()
    session = await bench.session()
    receipts: list[str | None] = [None]
    for step in range(3):
        receipts.append((await bench.act(session.asks(step, receipts[-1], "add", number=1))).receipt)
    fork = await bench.act(session.asks(index, receipts[index], "add", number=9))
    assert fork.failure is not None
    assert (fork.failure.kind, fork.failure.retryable, fork.receipt) == ("stale_receipt", True, None)
    assert len(bench.rewards) == 3
    again = await bench.act(session.asks(index, receipts[index], "add", number=1))
    assert (again.failure, text_of(again)) == (None, f'{{"count":{index + 1}}}')
    assert text_of(await bench.act(session.asks(3, receipts[3], "look"))) == "3"


async def test_two_actions_in_one_place_at_the_same_time_are_one_and_a_refusal() -> None:
    bench = Bench()
    session = await bench.session()
    await asyncio.gather(*(bench.handler.step(session.asks(0, None, "add", number=number)) for number in (1, 2, 3)))
    observed = [event for event in bench.published.events if isinstance(event, ObservationReturned)]
    kinds = [one.failure.kind if one.failure else None for one in observed]
    assert sorted(map(str, kinds)) == ["None", "stale_receipt", "stale_receipt"]


async def test_a_receipt_of_another_past_is_refused_by_whoever_knows_the_session() -> None:
    """The other past was made by a worker that did not know; this one does."""
    bench = Bench()
    session = await bench.session()
    mine = await bench.act(session.asks(0, None, "add", number=1))
    theirs = await bench.act(session.asks(0, None, "add", number=9), bench.worker())
    assert mine.failure is theirs.failure is None
    fork = await bench.act(session.asks(1, theirs.receipt, "look"))
    assert fork.failure is not None
    assert fork.failure.kind == "stale_receipt"


def digests(*contents: int) -> list[str]:
    return [sha256(bytes(contents[: length + 1])).hexdigest() for length in range(len(contents))]


def test_what_is_known_of_sessions_is_bounded_and_the_latest_are_kept() -> None:
    trails = Trails(max_sessions=100, max_bytes=8 * 300)
    one, other = digests(1, 2, 3), digests(1, 2, 4)
    for number in range(500):
        for index, digest in enumerate(one):
            trails.take(f"s{number}", index, one[index - 1] if index else "", digest)
    assert trails.size_bytes == 8 * 300
    with pytest.raises(EnvironmentFailure, match="expected the latest receipt"):
        trails.take("s499", 2, one[1], other[2])
    trails.take("s0", 2, one[1], other[2])
    assert trails.size_bytes == 8 * 298


def test_a_worker_that_did_not_do_what_lies_between_begins_anew_and_forgets_what_was_before() -> None:
    trails = Trails()
    done = digests(1, 2, 3, 4, 5)
    trails.take("s", 0, "", done[0])
    trails.take("s", 3, done[2], done[3])
    trails.take("s", 4, done[3], done[4])
    trails.take("s", 3, done[2], done[3])
    assert trails.size_bytes == 16
    with pytest.raises(EnvironmentFailure):
        trails.take("s", 4, done[3], digests(1, 2, 3, 4, 6)[4])


async def test_a_ticket_or_a_receipt_of_another_session_is_refused() -> None:
    bench = Bench()
    session, other = await bench.session(0), await bench.session(1)
    mine = await bench.act(session.asks(0, None, "add", number=1))
    theirs = await bench.act(other.asks(0, None, "add", number=2))
    foreign = session.asks(0, None, "look").model_copy(update={"ticket": other.ticket})
    assert await refused(bench, foreign) == "ticket_refused"
    assert await refused(bench, session.asks(1, theirs.receipt, "look")) == "ticket_refused"
    later = session.asks(1, mine.receipt, "look").model_copy(update={"ticket": other.ticket})
    assert await refused(bench, later) == "ticket_refused"


async def test_a_ticket_is_no_receipt_and_a_receipt_no_ticket() -> None:
    bench = Bench()
    session = await bench.session()
    mine = await bench.act(session.asks(0, None, "add", number=1))
    assert await refused(bench, session.asks(1, session.ticket, "look")) == "ticket_refused"
    swapped = session.asks(0, None, "look").model_copy(update={"ticket": mine.receipt})
    assert await refused(bench, swapped) == "ticket_refused"


async def test_an_environment_without_steps_refuses_actions() -> None:
    bench = Bench()
    session = await bench.session()
    request = session.asks(0, None, "look").model_copy(update={"environment": "math"})
    assert await refused(bench, request) == "no_actions"


# Long receipts.


def only_file(folder: Path) -> tuple[Path, bytes]:
    (path,) = [path for path in folder.rglob("*") if path.is_file()]
    return path, path.read_bytes()


async def test_a_long_receipt_travels_by_reference_and_is_opened_by_any_worker(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path))
    session = await bench.session()
    loaded = await bench.act(session.asks(0, None, "load", kilobytes=64))
    assert loaded.receipt is not None
    assert BlobReference.parse(loaded.receipt) is not None
    assert len(loaded.to_json()) < 4_000
    assert text_of(await bench.act(session.asks(1, loaded.receipt, "look"), bench.worker())) == "0"


async def test_a_blob_that_is_gone_may_come_back_and_one_that_was_altered_is_refused(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path))
    session = await bench.session()
    loaded = await bench.act(session.asks(0, None, "load", kilobytes=64))
    path, whole = only_file(tmp_path)
    await asyncio.to_thread(path.write_bytes, whole[:-1] + b"!")
    altered = await bench.act(session.asks(1, loaded.receipt, "look"), bench.worker())
    path.unlink()
    gone = await bench.act(session.asks(1, loaded.receipt, "look"), bench.worker())
    await asyncio.to_thread(path.write_bytes, whole)
    back = await bench.act(session.asks(1, loaded.receipt, "look"), bench.worker())
    kinds = [(one.failure.kind, one.failure.retryable) for one in (altered, gone) if one.failure]
    assert kinds == [("blob_unavailable", False), ("blob_unavailable", True)]
    assert text_of(back) == "0"


# The cache.


def opened(session: str, index: int, size: int) -> OpenWorld:
    return OpenWorld(Lab(), Receipt(session=session, index=index, digest="d", world="x" * size))


def test_the_cache_lets_the_oldest_go_before_it_holds_too_much() -> None:
    cache = WorldCache(100_000)
    for number in range(100):
        cache.keep(f"sealed {number}", opened(f"s{number}", 0, 1_000))
        assert cache.size_bytes <= 100_000
    assert cache.take("s0", 0, "sealed 0") is None
    assert cache.take("s99", 0, "sealed 99") is not None
    assert cache.take("s99", 0, "sealed 99") is None
    for number in range(100):
        cache.take(f"s{number}", 0, f"sealed {number}")
    assert cache.size_bytes == 0


def test_the_cache_is_asked_by_the_very_receipt_and_holds_nothing_that_is_over_or_too_large() -> None:
    cache = WorldCache(10_000)
    cache.keep("sealed", opened("s", 0, 10))
    assert cache.take("s", 0, "forged") is None
    cache.keep("large", opened("l", 0, 100_000))
    assert cache.take("l", 0, "large") is None
    over = opened("o", 0, 10)
    cache.keep("over", OpenWorld(over.world, over.receipt.model_copy(update={"done": True})))
    assert cache.take("o", 0, "over") is None


# Hybrid rewards.


async def test_a_hybrid_reward_is_combined_as_declared_and_its_parts_stay_apart() -> None:
    environment: Any = LabEnvironment()
    steps = [StepReward(index=0, reward=0.25), StepReward(index=1, reward=None), StepReward(index=2, reward=0.75)]
    episode = Episode([], Submission(), "completed", Lab(count=2), steps)
    verdict = await environment.verify(LabTask(), episode, None)
    assert (verdict.reward, verdict.components) == (1.5, {"terminal": 1.0, "steps": 1.0})
