"""Playing one session: what stands in the log afterwards, however it ended."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import httpx2
import pytest

from rollstream.errors import BoundaryFailure, EpisodeTimeout, ModelFailure, Refused
from rollstream.eventlog.lanes import fence
from rollstream.models.openai import ModelPool
from rollstream.settings import ModelSettings, SamplingSettings, Settings
from rollstream.testing.model_server import (
    CONTEXT_OVERFLOW,
    LONE_SURROGATE,
    Hang,
    Reply,
    Request,
    Script,
    ScriptedModelServer,
    Status,
    Text,
    always,
    big_text,
    in_turn,
)
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted
from schemas.events import EVENTS, decode
from schemas.retry import RetryScheduled
from schemas.run import RunPaused
from schemas.session import SessionReady, Submission
from schemas.step import AgentStepped
from schemas.values import ChatMessage, Composition, EpisodeLimits, Sampling, Usage
from services.agent_worker.handler import PlayHandler
from services.agent_worker.harnesses import registry
from services.agent_worker.harnesses.protocol import AgentBox, AgentSession, Capabilities, Models, Turn
from services.agent_worker.pauses import Pauses
from tests.controls import unheard
from tests.events import CANARY, Attempt

QUESTION: list[ChatMessage] = [{"role": "user", "content": "1 + 1 = ?"}]


class Published:
    """A `Publisher` that keeps what it is given, as it would be read again."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []

    async def publish(self, events: Iterable[Event]) -> None:
        self.batches.append([decode(event.to_json(), EVENTS[event.kind]) for event in events])

    @property
    def steps(self) -> list[AgentStepped]:
        return [event for batch in self.batches for event in batch if isinstance(event, AgentStepped)]

    @property
    def completed(self) -> EpisodeCompleted:
        (found,) = [event for batch in self.batches for event in batch if isinstance(event, EpisodeCompleted)]
        return found


class Scene:
    """One handler, with a scripted server behind it and a list before it."""

    def __init__(self, server: ScriptedModelServer, models: ModelPool) -> None:
        self.server = server
        self.published = Published()
        self.control = unheard()
        pauses = Pauses(self.control, self.published, "agent_worker@test:1")
        self.handler = PlayHandler(models, self.published, pauses, "agent_worker@test:1", cleanup_timeout_s=0.3)

    async def play(self, descriptor: SessionReady) -> EpisodeCompleted:
        await self.handler.play(descriptor)
        return self.published.completed

    async def fail(self, descriptor: SessionReady, kind: type[BoundaryFailure]) -> BoundaryFailure:
        with pytest.raises(kind) as caught:
            await self.handler.play(descriptor)
        assert not [event for batch in self.published.batches for event in batch if isinstance(event, EpisodeCompleted)]
        return caught.value


@pytest.fixture(autouse=True, scope="module")
def _one_ssl_context() -> Iterator[None]:
    """Reading the system's certificates takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        context = httpx2.create_ssl_context()
        patch.setattr(httpx2, "create_ssl_context", lambda **_: context)
        yield


@asynccontextmanager
async def scene(script: Script | Reply | str) -> AsyncIterator[Scene]:
    async with ScriptedModelServer(script if callable(script) else always(script)) as server:
        small = ModelSettings(
            base_url=server.base_url, model="small-1b", max_retries=0, sampling=SamplingSettings(temperature=0.5, max_tokens=64)
        )
        models = ModelPool(Settings(models={"small": small}))
        yield Scene(server, models)
        await models.close()


def ready(harness: str = "chat", sampling: Sampling | None = None, **limits: object) -> SessionReady:
    """A session of the model `small`."""
    composition = Composition(harness=harness, models={"policy": "small"}, sampling=sampling or Sampling())
    changes = {"composition": composition, "limits": EpisodeLimits.model_validate(limits), "reference": None}
    return Attempt().ready().model_copy(update=changes)


# An episode that ends well.


async def test_the_last_step_and_the_end_of_the_episode_are_published_together() -> None:
    async with scene("It is 2.") as here:
        await here.play(ready())
    assert [[event.kind for event in batch] for batch in here.published.batches] == [["AgentStepped", "EpisodeCompleted"]]


async def test_a_completed_episode_tells_all_that_verifying_and_training_need() -> None:
    descriptor = ready()
    async with scene(Text("It is 2.", usage=Usage(prompt_tokens=9, completion_tokens=4))) as here:
        episode = await here.play(descriptor)
    (step,) = here.published.steps
    assert episode.submission == Submission(text="It is 2.")
    assert episode.messages == [*QUESTION, {"role": "assistant", "content": "It is 2."}]
    assert (episode.stop_reason, episode.steps, episode.calls) == ("completed", [step.event_id], [step.call])
    assert episode.ids() == descriptor.ids()
    assert (episode.ticket, episode.composition) == (descriptor.ticket, descriptor.composition)
    assert episode.caused_at == step.caused_at == descriptor.occurred_at
    assert (episode.seeded_at, episode.submitted_at) == (descriptor.occurred_at, descriptor.submitted_at)
    assert episode.execution == step.execution
    assert episode.execution.worker == "agent_worker@test:1"
    assert 0 < episode.timing.model_s <= episode.timing.agent_s
    assert step.call.usage == Usage(prompt_tokens=9, completion_tokens=4)
    assert step.response["choices"]


async def test_the_agent_side_has_no_word_for_reward() -> None:
    async with scene("It is 2.") as here:
        await here.play(ready())
    for event in here.published.batches[0]:
        for word in (b"reward", b"success", b"verdict"):
            assert word not in event.to_json().lower()


async def test_a_step_tells_the_sampling_that_was_sent_the_runs_over_the_models_own() -> None:
    async with scene("It is 2.") as here:
        episode = await here.play(ready(sampling=Sampling(temperature=0.0)))
    body = here.server.requests[0].body
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.0, 64, "small-1b")
    assert episode.calls[0].sampling == Sampling(temperature=0.0, max_tokens=64)


async def test_two_executions_of_one_session_share_the_end_and_not_the_steps() -> None:
    async with scene("It is 2.") as here:
        await here.handler.play(ready())
        await here.handler.play(ready())
    ends = [event for batch in here.published.batches for event in batch if isinstance(event, EpisodeCompleted)]
    assert len({end.event_id for end in ends}) == 1
    assert len({step for end in ends for step in end.steps}) == 2


async def test_an_execution_carries_the_generation_under_which_it_ran() -> None:
    token = fence.set(7)
    try:
        async with scene("It is 2.") as here:
            assert (await here.play(ready())).execution.fence == 7
    finally:
        fence.reset(token)


async def test_the_oracle_calls_no_model() -> None:
    descriptor = ready("oracle").model_copy(update={"reference": Submission(text="2")})
    async with scene("never asked") as here:
        episode = await here.play(descriptor)
    assert (episode.submission.text, episode.steps, episode.calls) == ("2", [], [])
    assert here.server.requests == []


# Outcomes.


async def test_a_context_that_is_full_is_an_outcome() -> None:
    async with scene(CONTEXT_OVERFLOW) as here:
        episode = await here.play(ready())
    assert (episode.stop_reason, episode.submission.text, episode.messages) == ("context_overflow", "", QUESTION)


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_an_answer_cut_short_is_an_outcome(reason: str) -> None:
    async with scene(Text("It is", finish_reason=reason)) as here:
        assert (await here.play(ready())).stop_reason == reason


async def test_the_token_budget_limits_the_call_and_using_it_up_is_an_outcome_of_its_own() -> None:
    async with scene(Text("It is", finish_reason="length", usage=Usage(completion_tokens=3))) as here:
        episode = await here.play(ready(max_model_tokens=3))
    assert here.server.requests[0].body["max_tokens"] == 3
    assert episode.stop_reason == "max_model_tokens"


async def test_the_token_budget_never_raises_a_lower_limit() -> None:
    async with scene("It is 2.") as here:
        await here.play(ready(sampling=Sampling(max_tokens=5), max_model_tokens=1_000))
    assert here.server.requests[0].body["max_tokens"] == 5


async def test_text_over_the_sessions_own_limit_is_cut_and_marked() -> None:
    async with scene(big_text(500_000)) as here:
        episode = await here.play(ready(max_output_bytes=2_000))
    assert episode.submission.text.endswith("[truncated by rollstream: 500000 bytes in all, 2000 kept]")
    assert here.published.steps[0].escaped
    assert len(episode.to_json()) < 20_000


async def test_an_answer_that_is_no_unicode_is_played_spelled_out() -> None:
    async with scene(LONE_SURROGATE) as here:
        assert (await here.play(ready())).submission.text == "half a pair: \\ud800."


# Harnesses that take their time. `Turns` runs a script of its own, so that a test can stop it anywhere.

Act = Callable[["Turns", Sequence[ChatMessage]], Awaitable[Turn]]


class Turns:
    """Harness and session in one, for one test."""

    name: ClassVar[str] = "turns"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = Capabilities(interactions=frozenset({"single_turn"}))
    act: ClassVar[Act]
    at_close: ClassVar[Callable[[], Awaitable[None]] | None]
    closed: ClassVar[int]

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> AgentSession:
        self.models = models
        self.context: list[ChatMessage] = []
        return self

    async def ask(self, *more: ChatMessage) -> str:
        self.context += more
        completion = await self.models.complete(self.context)
        self.context.append(completion.message)
        return str(completion.message["content"])

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        return await type(self).act(self, observation)

    async def close(self) -> Submission:
        type(self).closed += 1
        at_close = type(self).at_close
        if at_close is not None:
            await at_close()
        return Submission(text=f"after {len(self.context)} messages")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> type[Turns]:
    harness = type("ThisTurns", (Turns,), {"closed": 0, "at_close": None})
    monkeypatch.setitem(registry.HARNESSES, "turns", harness)
    return harness


async def forever() -> None:
    await asyncio.Event().wait()


async def two_calls(agent: Turns, observation: Sequence[ChatMessage]) -> Turn:
    await agent.ask(*observation)
    await agent.ask({"role": "user", "content": "Sure?"})
    return Turn(agent.context[len(observation) :], None)


async def one_call_and_a_long_thought(agent: Turns, observation: Sequence[ChatMessage]) -> Turn:
    await agent.ask(*observation)
    await forever()
    raise AssertionError


async def test_a_step_is_durable_before_the_next_call_is_sent(turns: type[Turns]) -> None:
    turns.act = two_calls
    stored: list[int] = []

    def script(request: Request) -> Reply:
        stored.append(len(here.published.steps))
        return Text(f"answer {request.number}")

    async with scene(script) as here:
        episode = await here.play(ready("turns"))
    assert stored == [0, 1]
    assert episode.steps == [step.event_id for step in here.published.steps]
    assert [step.index for step in here.published.steps] == [0, 1]
    assert [step.new_messages for step in here.published.steps] == [[], [{"role": "user", "content": "Sure?"}]]
    assert [message["content"] for message in episode.messages] == ["1 + 1 = ?", "answer 0", "Sure?", "answer 1"]


async def test_what_is_left_of_the_token_budget_limits_the_next_call(turns: type[Turns]) -> None:
    turns.act = two_calls
    async with scene(Text("x", usage=Usage(completion_tokens=7))) as here:
        await here.play(ready("turns", max_model_tokens=10))
    assert [request.body["max_tokens"] for request in here.server.requests] == [10, 3]


async def test_an_agent_that_uses_up_its_time_is_scored_for_what_it_has(turns: type[Turns]) -> None:
    turns.act = one_call_and_a_long_thought
    async with scene("It is 2.") as here:
        episode = await here.play(ready("turns", agent_timeout_s=0.8))
    assert (episode.stop_reason, episode.submission.text) == ("agent_timeout", "after 2 messages")
    assert episode.messages == [*QUESTION, {"role": "assistant", "content": "It is 2."}]
    assert episode.steps == [step.event_id for step in here.published.steps]
    assert len(episode.steps) == 1
    assert turns.closed == 1


async def test_time_spent_waiting_for_the_model_is_not_held_against_the_agent() -> None:
    async with scene(Hang()) as here:
        error = await here.fail(ready(agent_timeout_s=0.2), ModelFailure)
    assert (error.kind, error.retryable) == ("model_timeout", True)


async def test_a_model_that_failed_earlier_is_not_blamed_for_a_long_thought(turns: type[Turns]) -> None:
    async def ponder(agent: Turns, observation: Sequence[ChatMessage]) -> Turn:
        with pytest.raises(ModelFailure):
            await agent.ask(*observation)
        await forever()
        raise AssertionError

    turns.act = ponder
    async with scene(Status(500)) as here:
        assert (await here.play(ready("turns", agent_timeout_s=0.8))).stop_reason == "agent_timeout"


async def test_an_episode_over_its_own_limit_is_a_failure_that_a_retry_can_help(turns: type[Turns]) -> None:
    turns.act = one_call_and_a_long_thought
    async with scene("It is 2.") as here:
        error = await here.fail(ready("turns", episode_timeout_s=0.8), EpisodeTimeout)
    assert (error.stage, error.retryable, str(error)) == ("agent", True, "episode ran longer than 0.8 s")
    assert (len(here.published.steps), turns.closed) == (1, 1)


# Failures.


@pytest.mark.parametrize("status", [401, 500])
async def test_a_model_that_fails_ends_the_session_and_nothing_is_handed_in(status: int) -> None:
    async with scene(Status(status)) as here:
        error = await here.fail(ready(), ModelFailure)
    assert error.retryable == (status == 500)
    assert [event.kind for batch in here.published.batches for event in batch] == (["RunPaused"] if status == 401 else [])


async def test_a_session_of_a_paused_run_goes_back_to_the_log_unplayed() -> None:
    async with scene("never asked") as here:
        await here.control.tell(RunPaused.create(run="run-1", reason="the key is refused", cause="k", by="w"))
        await here.handler.play(ready())
        assert here.server.requests == []
    ((retry,),) = here.published.batches
    assert isinstance(retry, RetryScheduled)
    assert (retry.failures, retry.next_try, retry.cause.kind) == (0, 1, "run_paused")


async def test_steps_made_before_a_failure_stay_in_the_log(turns: type[Turns]) -> None:
    turns.act = two_calls
    async with scene(in_turn(Text("It is 2."), Status(503))) as here:
        await here.fail(ready("turns"), ModelFailure)
    assert [step.message["content"] for step in here.published.steps] == ["It is 2."]
    assert turns.closed == 1


async def test_a_session_that_was_taken_away_is_closed_and_its_steps_stay(turns: type[Turns]) -> None:
    turns.act = two_calls
    async with scene(in_turn(Text("It is 2."), Hang())) as here:
        playing = asyncio.create_task(here.handler.play(ready("turns")))
        await here.server.wait_for_requests(2)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert [event.kind for batch in here.published.batches for event in batch] == ["AgentStepped"]
    assert turns.closed == 1


async def test_a_harness_that_does_not_hand_in_is_given_up(turns: type[Turns]) -> None:
    turns.act = two_calls
    turns.at_close = staticmethod(forever)
    async with scene("It is 2.") as here:
        error = await here.fail(ready("turns"), EpisodeTimeout)
    assert (error.stage, str(error)) == ("cleanup", "harness did not hand in within 0.3 s")
    assert (len(here.published.steps), turns.closed) == (2, 1)


async def test_a_harness_that_fails_to_close_does_not_hide_why_it_was_closed(turns: type[Turns]) -> None:
    async def broken() -> None:
        raise RuntimeError("in close")

    turns.act = two_calls
    turns.at_close = staticmethod(broken)
    async with scene(Status(503)) as here:
        assert (await here.fail(ready("turns"), ModelFailure)).kind == "model_unavailable"


async def test_a_bug_in_a_harness_is_no_outcome(turns: type[Turns]) -> None:
    async def stumble(agent: Turns, observation: Sequence[ChatMessage]) -> Turn:
        await agent.ask(*observation)
        raise TimeoutError("of its own")

    turns.act = stumble
    async with scene("It is 2.") as here:
        with pytest.raises(TimeoutError, match="of its own"):
            await here.handler.play(ready("turns"))
    assert (len(here.published.steps), turns.closed) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"composition": Composition(harness="swarm")}, "found 'swarm'"),
        ({"interaction": "agent_in_env"}, "asks for agent_in_env"),
        ({"placement": "separate"}, "placement separate takes a sandbox"),
        ({"composition": Composition(harness="oracle"), "reference": None}, "expected a reference solution"),
    ],
)
async def test_a_composition_that_cannot_play_is_refused_before_a_model_is_asked(
    changes: dict[str, object], sentence: str
) -> None:
    async with scene("never asked") as here:
        error = await here.fail(ready().model_copy(update=changes), Refused)
    assert sentence in str(error)
    assert (here.server.requests, here.published.batches) == ([], [])


async def test_the_reference_of_a_session_is_in_nothing_that_the_chat_harness_leaves() -> None:
    descriptor = Attempt().ready().model_copy(update={"composition": ready().composition, "ticket": "sealed"})
    assert descriptor.reference is not None
    async with scene("It is 2.") as here:
        await here.play(descriptor)
    assert CANARY.encode() not in b"".join(event.to_json() for event in here.published.batches[0])
