"""Playing a session whose environment answers back, and going on with one that was broken off."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from rollstream.environments import registry
from rollstream.environments.protocol import TaskLimits
from rollstream.errors import EnvironmentFailure, EpisodeTimeout, NoRoom
from rollstream.eventlog.following import Inbox
from rollstream.eventlog.lanes import fence
from rollstream.models.openai import ModelPool
from rollstream.settings import ModelSettings, Settings
from rollstream.testing.model_server import Call, Reply, Request, Script, ScriptedModelServer, Text, ToolCalls, always
from schemas.action import ActionRequested, ObservationReturned
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted
from schemas.events import EVENTS, decode
from schemas.session import SessionReady
from schemas.step import AgentStepped
from schemas.values import Composition, EpisodeLimits, Usage
from services.agent_worker.handler import PlayHandler
from services.agent_worker.pauses import Pauses
from services.env_worker.handler import SeedHandler
from tests.controls import unheard
from tests.events import Attempt, Log as Records, task_submitted
from tests.unit.test_step_handler import Bench, LabEnvironment

TURNS = 4


class Killed(BaseException):
    """What a SIGKILL looks like from inside: nothing runs any more."""


class Log:
    """A `Publisher` whose records come back: actions are answered, and what is durable can be read by the next worker."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.events: list[Event] = []
        self.inboxes: list[Inbox] = []
        self.dies_at: int | None = None
        """Number of events that become durable before the worker is killed."""
        self.answers = True

    async def publish(self, events: Iterable[Event]) -> None:
        for event in events:
            if self.dies_at is not None and len(self.events) >= self.dies_at:
                raise Killed
            self.events.append(decode(event.to_json(), EVENTS[event.kind]))
            if isinstance(event, ActionRequested) and self.answers:
                observed = await self._bench.act(event, self._bench.worker())
                self.events.append(observed)
                for inbox in self.inboxes:
                    inbox.put(observed.event_id, len(self.events), observed.to_json())

    def inbox(self) -> Inbox:
        """What a worker that takes the session over finds of it."""
        steps = [event.to_json() for event in self.events if isinstance(event, AgentStepped)]
        inbox = Inbox(0, steps)
        for offset, event in enumerate(self.events):
            if isinstance(event, ObservationReturned):
                inbox.put(event.event_id, offset, event.to_json())
        self.inboxes.append(inbox)
        return inbox

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def completed(self) -> EpisodeCompleted:
        (found,) = self.of(EpisodeCompleted)
        assert isinstance(found, EpisodeCompleted)
        return found


class Scene:
    """A handler with a model before it and an environment behind it."""

    def __init__(self, server: ScriptedModelServer, bench: Bench, models: ModelPool) -> None:
        self.server, self.bench, self.models = server, bench, models
        self.log = Log(bench)

    async def descriptor(self, harness: str = "tools", **limits: object) -> SessionReady:
        session = await self.bench.session(goal=TURNS)
        attempt = Attempt(task_submitted(environment="lab"))
        return attempt.ready().model_copy(
            update={
                "interaction": "tools",
                "tools": LabEnvironment().tools(),
                "ticket": session.ticket,
                "composition": Composition(harness=harness, models={"policy": "small"}),
                "limits": EpisodeLimits.model_validate(limits),
            }
        )

    async def play(self, descriptor: SessionReady, generation: int = 1) -> None:
        """One execution, by a worker of its own."""
        token = fence.set(generation)
        pauses = Pauses(unheard(), self.log, "agent_worker@test:1")
        handler = PlayHandler(self.models, self.log, pauses, "agent_worker@test:1", cleanup_timeout_s=0.5)
        try:
            await handler.play(descriptor, self.log.inbox())
        finally:
            fence.reset(token)

    async def killed(self, descriptor: SessionReady, after: int, generation: int = 1) -> None:
        """An execution that is killed once so many more events are durable."""
        self.log.dies_at = len(self.log.events) + after
        with pytest.raises(Killed):
            await self.play(descriptor, generation)
        self.log.dies_at = None


@asynccontextmanager
async def scene(script: Script, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setitem(registry.ENVIRONMENTS, "lab", LabEnvironment)
    async with ScriptedModelServer(script) as server:
        models = ModelPool(Settings(models={"small": ModelSettings(base_url=server.base_url, max_retries=0)}))
        yield Scene(server, Bench(), models)
        await models.close()


def adds_one_by_one(request: Request) -> Reply:
    """Adds 1 until it has added TURNS times, then says so. Depends on the prompt alone."""
    seen = sum(message["role"] == "tool" for message in request.body["messages"])
    if seen < TURNS:
        return ToolCalls([Call("add", {"number": 1}, f"call-{seen}")])
    return Text("It is done.")


def step_of(request: Request) -> int:
    """Which step of its session a request is for."""
    return sum(message["role"] == "assistant" for message in request.body["messages"])


async def test_a_session_is_played_with_an_action_for_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        await here.play(await here.descriptor())
    assert [event.kind for event in here.log.events] == [
        *["AgentStepped", "ActionRequested", "ObservationReturned"] * TURNS,
        "AgentStepped",
        "EpisodeCompleted",
    ]
    done = here.log.completed
    assert (done.stop_reason, done.submission.text, len(done.calls)) == ("completed", "It is done.", TURNS + 1)
    assert [message["role"] for message in done.messages] == ["user", *["assistant", "tool"] * TURNS, "assistant"]
    assert done.receipt is not None
    receipt = await here.bench.tickets.open_receipt(done.receipt, done.session)
    assert json.loads(receipt.world)["count"] == TURNS


@pytest.mark.parametrize("after", range(1, 3 * TURNS + 1))
async def test_wherever_a_worker_dies_the_next_one_goes_on_and_asks_nothing_twice(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        descriptor = await here.descriptor()
        await here.play(descriptor)
        undisturbed, calls_of_one = here.log.completed, len(here.server.requests)
        here.log.events.clear()
        await here.killed(descriptor, after)
        recorded = {step.index for step in here.log.of(AgentStepped) if isinstance(step, AgentStepped)}
        asked_before = len(here.server.requests)
        await here.play(descriptor, generation=2)
        asked_again = [step_of(request) for request in here.server.requests[asked_before:]]
    assert not recorded & set(asked_again), "a step that was in the log was asked for again"
    assert len(asked_again) == calls_of_one - len(recorded)
    done = here.log.completed
    assert done.messages == undisturbed.messages
    assert [call.usage for call in done.calls] == [call.usage for call in undisturbed.calls]
    of_trajectory = {step.event_id: step for step in here.log.of(AgentStepped)}
    indices = [of_trajectory[name].index for name in done.steps]  # type: ignore[attr-defined]
    assert indices == list(range(TURNS + 1))
    assert len(set(done.actions)) == TURNS
    first, last = [await here.bench.tickets.open_receipt(str(one.receipt), one.session) for one in (undisturbed, done)]
    assert (first.world, first.digest) == (last.world, last.digest)


async def test_a_session_that_dies_again_and_again_still_ends_as_if_it_had_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        descriptor = await here.descriptor()
        for generation, after in enumerate((2, 2, 3, 1, 2), start=1):
            await here.killed(descriptor, after, generation)
        await here.play(descriptor, generation=9)
        asked = [step_of(request) for request in here.server.requests]
    recorded_by = {step.event_id: step.execution.fence for step in here.log.of(AgentStepped)}  # type: ignore[attr-defined]
    done = here.log.completed
    assert done.submission.text == "It is done."
    fences = [recorded_by[name] for name in done.steps]
    assert fences == sorted(fences)
    assert len(set(fences)) > 2
    # A call whose answer did not become durable before the end is made again; no other is.
    assert len(asked) <= TURNS + 1 + 5


async def test_an_action_that_was_asked_for_and_not_answered_is_asked_for_again_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        descriptor = await here.descriptor()
        here.log.answers = False
        waiting = asyncio.create_task(here.play(descriptor))
        while len(here.log.events) < 2:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        here.log.answers = True
        await here.play(descriptor, generation=2)
    first, again, *_ = here.log.of(ActionRequested)
    assert first.event_id == again.event_id
    assert len({action.event_id for action in here.log.of(ActionRequested)}) == TURNS


async def test_a_harness_that_asks_something_else_than_was_recorded_is_not_given_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        descriptor = await here.descriptor()
        await here.killed(descriptor, 7)
        for position, event in enumerate(here.log.events):
            if isinstance(event, AgentStepped) and event.index == 1:
                other = event.model_copy(update={"new_messages": [{"role": "user", "content": "something else"}]})
                here.log.events[position] = other
        asked_before = len(here.server.requests)
        await here.play(descriptor, generation=2)
        asked_again = [step_of(request) for request in here.server.requests[asked_before:]]
    assert asked_again == [1, 2, 3, 4]
    assert here.log.completed.submission.text == "It is done."


# Limits and failures.


async def test_the_agents_steps_used_up_are_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        await here.play(await here.descriptor(max_steps=2))
    done = here.log.completed
    assert (done.stop_reason, len(done.calls), len(done.actions)) == ("max_steps", 2, 2)
    assert done.messages[-1]["role"] == "tool"


async def test_the_agents_tokens_used_up_are_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request: Request) -> Reply:
        return ToolCalls([Call("look", {}, "c")], usage=Usage(completion_tokens=6))

    async with scene(script, monkeypatch) as here:
        await here.play(await here.descriptor(max_model_tokens=10))
    done = here.log.completed
    assert (done.stop_reason, len(done.calls)) == ("max_model_tokens", 2)
    assert [request.body["max_tokens"] for request in here.server.requests] == [10, 4]


@pytest.mark.parametrize(("name", "reason"), [("finish", "completed"), ("stop_short", "truncated")])
async def test_the_environment_ends_an_episode_or_breaks_it_off(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = always(ToolCalls([Call(name, {}, "a"), Call("add", {"number": 1}, "b")]))
    async with scene(script, monkeypatch) as here:
        await here.play(await here.descriptor())
    assert (here.log.completed.stop_reason, len(here.log.of(ActionRequested))) == (reason, 1)


@pytest.mark.parametrize(
    ("name", "arguments", "kind"), [("explode", {}, "tool_raised"), ("earn", {"what": "nan"}, "bad_reward")]
)
async def test_an_environment_that_fails_ends_the_session_without_a_score(
    name: str, arguments: dict[str, object], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(always(ToolCalls([Call(name, arguments)])), monkeypatch) as here:
        with pytest.raises(EnvironmentFailure) as caught:
            await here.play(await here.descriptor())
    assert (caught.value.kind, caught.value.stage, caught.value.retryable) == (kind, "agent", False)
    assert here.log.of(EpisodeCompleted) == []
    assert len(here.log.of(AgentStepped)) == 1


async def test_a_worker_without_room_uses_up_no_attempt_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(always(ToolCalls([Call("crowd", {})])), monkeypatch) as here:
        with pytest.raises(NoRoom, match="all rooms are taken") as caught:
            await here.play(await here.descriptor())
    assert (caught.value.counts, caught.value.retryable, caught.value.retry_after_s) == (False, True, 5.0)


async def test_an_environment_that_never_answers_costs_the_episodes_time_and_not_the_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        here.log.answers = False
        with pytest.raises(EpisodeTimeout, match=r"episode ran longer than 0\.8 s") as caught:
            await here.play(await here.descriptor(agent_timeout_s=0.6, episode_timeout_s=0.8))
    assert (caught.value.stage, caught.value.retryable) == ("agent", True)
    assert here.log.of(EpisodeCompleted) == []


@pytest.mark.parametrize(
    ("own", "ends"), [(TaskLimits(max_steps=2), "max_steps"), (TaskLimits(max_model_tokens=10), "max_model_tokens")]
)
async def test_the_limits_of_a_task_hold_where_they_are_lower_than_the_runs(
    own: TaskLimits, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(LabEnvironment):
        limits = own

    def script(request: Request) -> Reply:
        return ToolCalls([Call("add", {"number": 1})], usage=Usage(prompt_tokens=9, completion_tokens=5))

    async with scene(script, monkeypatch) as here:
        monkeypatch.setitem(registry.ENVIRONMENTS, "lab", Strict)
        seeds = SeedHandler(Settings(), here.bench.tickets, here.log, unheard())
        submitted = task_submitted(environment="lab").model_copy(
            update={"row": {"goal": TURNS}, "composition": Composition(harness="tools", models={"policy": "small"})}
        )
        await seeds.seed(Records().record(submitted))
        (ready,) = here.log.of(SessionReady)
        assert isinstance(ready, SessionReady)
        await here.play(ready)
    assert (here.log.completed.stop_reason, len(here.log.completed.calls)) == (ends, 2)


async def test_the_time_that_an_environment_takes_is_not_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(adds_one_by_one, monkeypatch) as here:
        here.log.answers = False
        descriptor = await here.descriptor(agent_timeout_s=6.0)
        playing = asyncio.create_task(here.play(descriptor))
        answered = 0
        while not playing.done():
            actions = [event for event in here.log.of(ActionRequested) if isinstance(event, ActionRequested)]
            for action in actions[answered:]:
                await asyncio.sleep(1.8)
                observed = await here.bench.act(action)
                here.log.inboxes[0].put(observed.event_id, 0, observed.to_json())
                answered += 1
            await asyncio.sleep(0.01)
        await playing
    assert here.log.completed.stop_reason == "completed"
    assert answered == TURNS
    timing = here.log.completed.timing
    assert 1.8 * TURNS <= timing.environment_s <= timing.agent_s - timing.model_s


# Inboxes.


async def test_of_two_answers_to_one_action_the_first_by_offset_is_the_one_that_happened() -> None:
    inbox = Inbox(0)
    inbox.put("o", 7, b"second")
    inbox.put("o", 3, b"first")
    assert inbox.peek("o") == b"first"
    inbox.put("o", 1, b"too late")
    assert inbox.peek("o") is None


async def test_an_answer_that_comes_while_it_is_waited_for_is_handed_over_once() -> None:
    inbox = Inbox(0)
    waiting = asyncio.create_task(inbox.wait("o"))
    await asyncio.sleep(0)
    inbox.put("other", 1, b"other")
    inbox.put("o", 2, b"this")
    inbox.put("o", 3, b"again")
    assert await waiting == b"this"
    assert inbox.peek("o") is None
