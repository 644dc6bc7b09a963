"""What every harness must do, as tests to inherit.

    class TestMine(HarnessConformance):
        def harness(self):
            return MyHarness()

The worker counts on all of it: that a session hands in after a limit or a failure, that a failure of the model passes through,
that one instance serves many sessions at once. Models are scripted: the same prompt gets the same answer. A harness that works
in a box says which one, and lets what runs there ask these models.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from pydantic import TypeAdapter

from rollstream.errors import ModelFailure
from rollstream.harnesses import Claims
from rollstream.models.protocol import Completion, ContextOverflow
from rollstream.testing.completions import AT, scripted
from schemas import identities
from schemas.episode import StopReason
from schemas.session import Interaction, SessionReady, Submission
from schemas.values import (
    ChatMessage,
    Composition,
    EpisodeLimits,
    GroupRef,
    JsonObject,
    TaskRef,
    text_of,
)

TOOL: JsonObject = {
    "type": "function",
    "function": {"name": "look", "description": "Look around.", "parameters": {"type": "object", "properties": {}}},
}
MAX_TURNS = 5
MAX_CALLS = 200
_MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


class Turn(Protocol):
    @property
    def messages(self) -> list[ChatMessage]: ...
    @property
    def stop_reason(self) -> StopReason | None: ...


class AgentSession(Protocol):
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn: ...
    async def close(self) -> Submission: ...


class Harness(Protocol):
    """A harness, seen from here: the protocol itself lives with the agent_worker."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def capabilities(self) -> Claims: ...
    async def open(self, descriptor: SessionReady, models: Any, box: Any) -> AgentSession: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of a model."""

    role: str
    messages: list[ChatMessage]
    tools: list[JsonObject]


Answer = ChatMessage | Exception | asyncio.Event
"""A message, a failure, or an event to wait for (and then nothing more): the model hangs."""


class ScriptedModels:
    """`Models` that answer as a function of the call, and remember what was asked."""

    def __init__(self, answer: Callable[[Asked], Answer], finish_reason: str = "stop") -> None:
        self._answer = answer
        self.finish_reason = finish_reason
        self.asked: list[Asked] = []
        self.recorded: list[Completion] = []
        """Calls that an agent has made by itself, as its harness tells of them."""
        self.waiting = asyncio.Event()

    def answer(self, asked: Asked) -> Answer:
        """What the model says to a prompt, for whoever carries it into a box."""
        self.asked.append(asked)
        assert len(self.asked) <= MAX_CALLS, f"asked more than {MAX_CALLS} times; only the worker's limits would end it"
        answer = self._answer(asked)
        if isinstance(answer, asyncio.Event):
            self.waiting.set()
        return answer

    async def complete(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject] = (), role: str = "policy"
    ) -> Completion:
        answer = self.answer(Asked(role, deepcopy(list(messages)), deepcopy(list(tools))))
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            raise AssertionError("a hanging model was woken")
        return scripted(answer, self.finish_reason)

    async def record(self, completion: Completion, new_messages: Sequence[ChatMessage] = (), role: str = "policy") -> None:
        self.recorded.append(completion)


@dataclass(frozen=True, slots=True)
class Played:
    """A session played to its end, or to its last turn."""

    turns: list[Turn]
    submission: Submission


class HarnessConformance:
    """Inherit, under a name that begins with `Test`, and say which harness."""

    reference: Submission | None = None
    """The environment's own solution, for a harness that plays it."""

    def harness(self) -> Harness:
        raise NotImplementedError("return the harness under test")

    @asynccontextmanager
    async def box(self, descriptor: SessionReady, models: ScriptedModels) -> AsyncIterator[Any]:
        """The agent's box, with a way to `models.answer`; overridden for a harness that works in one."""
        if self.harness().capabilities.needs_sandbox:
            raise NotImplementedError("return a box for the agent")
        yield None

    @asynccontextmanager
    async def opened(self, descriptor: SessionReady, models: ScriptedModels) -> AsyncIterator[AgentSession]:
        """A session, in its box if it has one."""
        async with self.box(descriptor, models) as box:
            yield await self.harness().open(descriptor, models, box)

    def descriptor(self, interaction: Interaction, text: str = "What is 1 + 1?") -> SessionReady:
        """A session that the harness claims to be able to play."""
        group = identities.group_id("conformance", "none", "none", text, 0)
        rollout = identities.rollout_id(group, 0)
        session = identities.session_id(rollout, 0, 0)
        return SessionReady(
            event_id=identities.event_id("SessionReady", session),
            occurred_at=AT,
            caused_at=AT,
            run="conformance",
            group=GroupRef(id=group, size=1, index=0),
            task=TaskRef(id=text),
            rollout=rollout,
            session=session,
            environment="none",
            composition=Composition(harness=self.harness().name, models={"policy": "scripted"}),
            environment_version="1",
            interaction=interaction,
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
            tools=[TOOL] if interaction == "tools" else [],
            limits=EpisodeLimits(),
            ticket="sealed",
            submitted_at=AT,
            reference=self.reference,
        )

    def test_name_version_and_claims_are_well_formed(self) -> None:
        harness = self.harness()
        assert re.fullmatch(r"[a-z][a-z0-9_]{0,63}", harness.name), f"name {harness.name!r} is no snake_case name"
        assert 1 <= len(harness.version) <= 512, "version is empty, or longer than 512 characters"
        claims = harness.capabilities.interactions
        assert isinstance(claims, frozenset), "capabilities.interactions must be a frozenset"
        assert claims, "a harness that plays nothing"
        assert claims <= set(get_args(Interaction)), f"unknown interactions {claims - set(get_args(Interaction))}"
        assert "tools" not in claims or harness.capabilities.tools, "plays tools, but capabilities.tools is False"

    def test_every_interaction_it_claims_is_played_to_a_submission(self) -> None:
        for interaction in self._claims():
            played = self._play(interaction, ScriptedModels(_echo))
            assert isinstance(played.submission, Submission), f"close handed in {played.submission!r} after {interaction}"
            for turn in played.turns:
                assert turn.stop_reason is None or turn.stop_reason in get_args(StopReason), f"stopped for {turn.stop_reason!r}"

    def test_what_it_adds_to_the_transcript_begins_with_the_agents_own_words(self) -> None:
        for interaction in self._claims():
            for turn in self._play(interaction, ScriptedModels(_echo)).turns:
                added = _MESSAGES.validate_python(turn.messages)
                assert added, f"a turn of {interaction} added nothing"
                assert added[0]["role"] == "assistant", f"a turn of {interaction} began with {added[0]}"

    def test_two_sessions_of_one_task_are_alike_under_a_deterministic_model(self) -> None:
        for interaction in self._claims():
            first, second = ScriptedModels(_echo), ScriptedModels(_echo)
            assert _shown(self._play(interaction, first)) == _shown(self._play(interaction, second)), "two plays differ"
            assert first.asked == second.asked, "two plays asked their models differently"

    def test_sessions_under_way_at_once_do_not_mix(self) -> None:
        async def both(interaction: Interaction) -> list[Submission]:
            texts = ("What is 1 + 1?", "Name a red stone.")
            async with AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(self.opened(self.descriptor(interaction, text), ScriptedModels(_echo)))
                    for text in texts
                ]
                for session, text in zip(sessions, texts, strict=True):
                    await session.activate(self.descriptor(interaction, text).messages)
                return [await session.close() for session in reversed(sessions)][::-1]

        for interaction in self._claims():
            alone = [
                self._play(interaction, ScriptedModels(_echo), text, turns=1).submission
                for text in ("What is 1 + 1?", "Name a red stone.")
            ]
            assert asyncio.run(both(interaction)) == alone, f"two sessions of {interaction} at once changed each other"

    def test_neither_descriptor_nor_observation_is_changed(self) -> None:
        for interaction in self._claims():
            descriptor = self.descriptor(interaction)
            before = deepcopy(descriptor)
            self._play_descriptor(descriptor, ScriptedModels(_echo), MAX_TURNS)
            assert descriptor == before, "the harness changed its descriptor or its observation"

    def test_an_observation_changed_later_does_not_change_what_the_models_are_asked(self) -> None:
        async def play(interaction: Interaction) -> list[Asked]:
            models = ScriptedModels(_echo)
            async with self.opened(self.descriptor(interaction), models) as session:
                observation = list(self.descriptor(interaction).messages)
                turn = await session.activate(observation)
                observation.clear()
                if not _over(interaction, turn):
                    await session.activate(_observation(turn))
                await session.close()
            return models.asked

        for interaction in self._claims():
            kept = ScriptedModels(_echo)
            self._play(interaction, kept, turns=2)
            assert asyncio.run(play(interaction)) == kept.asked, "the harness keeps the observation instead of a copy"

    def test_only_models_of_the_composition_are_asked(self) -> None:
        for interaction in self._claims():
            models = ScriptedModels(_echo)
            self._play(interaction, models)
            strangers = {asked.role for asked in models.asked} - {"policy"}
            assert not strangers, f"asked {strangers}, which the run has not"

    def test_tools_are_offered_to_the_model_if_the_environment_has_them(self) -> None:
        if "tools" in self._claims():
            models = ScriptedModels(_echo)
            self._play("tools", models)
            assert all(TOOL in asked.tools for asked in models.asked), "the environment's tools did not reach the model"

    def test_a_failing_model_is_not_the_agents_fault(self) -> None:
        failure = ModelFailure("scripted", kind="model_unavailable", retryable=True)
        for interaction in self._claims():
            models = ScriptedModels(lambda _: failure)
            error, submission = asyncio.run(self._interrupted(interaction, models))
            if models.asked:
                same = isinstance(error, ModelFailure) and (error.kind, error.retryable) == (failure.kind, failure.retryable)
                assert same, f"the model's failure became {error!r} instead of passing through"
            assert isinstance(submission, Submission), "no submission after a failure"

    def test_a_full_context_is_an_outcome(self) -> None:
        for interaction in self._claims():
            models = ScriptedModels(lambda _: ContextOverflow("scripted"))
            played = self._play(interaction, models, turns=1)
            if models.asked:
                assert played.turns[0].stop_reason == "context_overflow", f"stopped for {played.turns[0].stop_reason!r}"

    def test_an_answer_cut_short_says_so(self) -> None:
        for interaction in self._claims():
            for reason in ("length", "content_filter"):
                models = ScriptedModels(_echo, finish_reason=reason)
                played = self._play(interaction, models, turns=1)
                if models.asked and interaction in ("single_turn", "agent_in_env"):
                    assert played.turns[0].stop_reason == reason, f"{reason} became {played.turns[0].stop_reason!r}"

    def test_odd_answers_are_answers(self) -> None:
        parts: list[JsonObject] = [{"type": "text", "text": "2"}, {"type": "refusal", "refusal": "no"}]
        call: JsonObject = {"id": "c", "type": "function", "function": {"name": "nothing", "arguments": "{"}}
        odd: tuple[ChatMessage, ...] = (
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": parts},
            {"role": "assistant"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "content": "x\x00\\ud800" + "y" * 1_000_000},
        )
        for interaction in self._claims():
            for message in odd:
                played = self._play(interaction, ScriptedModels(lambda _, given=message: given), turns=1)  # type: ignore[misc]
                assert isinstance(played.submission, Submission), f"no submission after {message!s:.80}"

    def test_a_session_stopped_while_it_waits_still_hands_in(self) -> None:
        async def stopped(interaction: Interaction) -> Submission:
            models = ScriptedModels(lambda _: asyncio.Event())
            async with self.opened(self.descriptor(interaction), models) as session:
                turn = asyncio.ensure_future(session.activate(self.descriptor(interaction).messages))
                waiting = asyncio.ensure_future(models.waiting.wait())
                await asyncio.wait([turn, waiting], return_when=asyncio.FIRST_COMPLETED)
                was_waiting = waiting.done()
                waiting.cancel()
                turn.cancel()
                (result,) = await asyncio.gather(turn, return_exceptions=True)
                if was_waiting:
                    assert isinstance(result, asyncio.CancelledError), f"a cancelled turn went on, to {result!r}"
                return await session.close()

        for interaction in self._claims():
            assert isinstance(asyncio.run(stopped(interaction)), Submission), "no submission after the agent's time was over"

    def test_a_session_that_was_never_activated_hands_in_too(self) -> None:
        for interaction in self._claims():
            assert isinstance(self._play(interaction, ScriptedModels(_echo), turns=0).submission, Submission)

    def test_calls_that_an_agent_makes_by_itself_are_told(self) -> None:
        if self.harness().capabilities.needs_sandbox:
            for interaction in self._claims():
                models = ScriptedModels(_echo)
                played = self._play(interaction, models, turns=1)
                told = [text_of(completion.message) for completion in models.recorded]
                assert told, "the agent called its model, and its harness recorded nothing"
                assert told[-1] == text_of(played.turns[0].messages[-1]), "what was recorded is not what the agent said"

    def _claims(self) -> Collection[Interaction]:
        return sorted(self.harness().capabilities.interactions)

    def _play(
        self, interaction: Interaction, models: ScriptedModels, text: str = "What is 1 + 1?", turns: int = MAX_TURNS
    ) -> Played:
        return self._play_descriptor(self.descriptor(interaction, text), models, turns)

    def _play_descriptor(self, descriptor: SessionReady, models: ScriptedModels, turns: int) -> Played:
        async def play() -> Played:
            async with self.opened(descriptor, models) as session:
                taken: list[Turn] = []
                observation: Sequence[ChatMessage] = descriptor.messages
                while len(taken) < turns and not (taken and _over(descriptor.interaction, taken[-1])):
                    taken.append(await session.activate(observation))
                    observation = _observation(taken[-1])
                return Played(taken, await session.close())

        return asyncio.run(play())

    async def _interrupted(self, interaction: Interaction, models: ScriptedModels) -> tuple[Exception | None, Submission]:
        async with self.opened(self.descriptor(interaction), models) as session:
            failed: Exception | None = None
            try:
                await session.activate(self.descriptor(interaction).messages)
            except Exception as error:
                failed = error
            return failed, await session.close()


def _echo(asked: Asked) -> ChatMessage:
    """An answer that depends on the whole prompt, so that a mixed-up context shows."""
    texts = [str(message.get("content")) for message in asked.messages]
    return {"role": "assistant", "content": f"{len(texts)} messages: {' | '.join(texts)}"}


def _over(interaction: Interaction, turn: Turn) -> bool:
    return interaction in ("single_turn", "agent_in_env") or turn.stop_reason is not None


def _observation(turn: Turn) -> list[ChatMessage]:
    """What an environment might answer: a result for each tool call, else a word to go on."""
    calls = [call for message in turn.messages for call in message.get("tool_calls", [])]
    results: list[ChatMessage] = [{"role": "tool", "tool_call_id": str(call.get("id")), "content": "a room"} for call in calls]
    return results or [{"role": "user", "content": "Go on."}]


def _shown(played: Played) -> object:
    return [(turn.messages, turn.stop_reason) for turn in played.turns], played.submission
