"""The shipped harnesses pass the suite that plug-ins inherit, and the suite finds what it is there to find."""

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest

from rollstream.errors import ModelFailure, Refused
from rollstream.harnesses import KNOWN_HARNESSES
from rollstream.models.protocol import ContextOverflow
from rollstream.testing.harnesses import TOOL, HarnessConformance, ScriptedModels
from schemas.session import Interaction, SessionReady, Submission
from schemas.values import ChatMessage, Composition, JsonObject, text_of
from services.agent_worker.harnesses import registry
from services.agent_worker.harnesses.bash_agent import BashAgentHarness
from services.agent_worker.harnesses.chat import ChatHarness, ChatSession
from services.agent_worker.harnesses.noop import NoopHarness
from services.agent_worker.harnesses.oracle import OracleHarness
from services.agent_worker.harnesses.protocol import AgentBox, AgentSession, Capabilities, Harness, Models, Turn
from services.agent_worker.harnesses.tools import ToolsHarness


class TestChat(HarnessConformance):
    def harness(self) -> Harness:
        return ChatHarness()


class TestOracle(HarnessConformance):
    reference = Submission(text="2")

    def harness(self) -> Harness:
        return OracleHarness()


class TestNoop(HarnessConformance):
    def harness(self) -> Harness:
        return NoopHarness()


class TestTools(HarnessConformance):
    def harness(self) -> Harness:
        return ToolsHarness()


BASH: JsonObject = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


class TestBashAgent(HarnessConformance):
    def harness(self) -> Harness:
        return BashAgentHarness()

    def descriptor(self, interaction: Interaction, text: str = "What is 1 + 1?") -> SessionReady:
        plain = super().descriptor(interaction, text)
        return plain.model_copy(update={"tools": [*plain.tools, BASH]})


def of_the_document() -> Harness:
    """The harness that the document on harnesses writes."""
    document = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if "class TwiceHarness" in block)
    names: dict[str, Any] = {"__name__": "twice"}
    exec(compile(code, "docs/harnesses.md", "exec"), names)
    harness: Harness = names["TwiceHarness"]()
    return harness


class TestTheDocumentsOwn(HarnessConformance):
    def harness(self) -> Harness:
        return of_the_document()


class TestTalkative(HarnessConformance):
    """Takes every interaction the suite can play, so that the suite's own parts for them run."""

    def harness(self) -> Harness:
        claims: frozenset[Interaction] = frozenset(get_args(Interaction))
        capabilities = Capabilities(interactions=claims, tools=True)
        talkative: Harness = type("Talkative", (Wrong,), {"session": OffersTools, "capabilities": capabilities})()
        return talkative


class InBox(HarnessConformance):
    """A harness that works in a box; it is played where boxes are tested."""

    def __init__(self, name: str) -> None:
        self._name = name

    def harness(self) -> Harness:
        return registry.load(self._name)


SUITES: dict[str, HarnessConformance] = {
    "bash_agent": TestBashAgent(),
    **{name: InBox(name) for name in ("claude_code", "codex", "command")},
    "chat": TestChat(),
    "noop": TestNoop(),
    "oracle": TestOracle(),
    "tools": TestTools(),
}
EVERY_HARNESS = pytest.mark.parametrize("name", sorted(registry.HARNESSES))


def test_every_shipped_harness_runs_the_suite_under_its_own_name() -> None:
    assert {name: suite.harness().name for name, suite in SUITES.items()} == {name: name for name in registry.HARNESSES}


def test_what_the_command_line_knows_of_harnesses_is_what_they_claim() -> None:
    claims = {name: registry.load(name).capabilities.interactions for name in registry.HARNESSES}
    assert {name: known.interactions for name, known in KNOWN_HARNESSES.items()} == claims
    assert {name for name, known in KNOWN_HARNESSES.items() if known.needs_reference} == {"oracle"}
    boxed = {name for name in registry.HARNESSES if registry.load(name).capabilities.needs_sandbox}
    assert {name for name, known in KNOWN_HARNESSES.items() if known.needs_sandbox} == boxed


def test_an_unknown_harness_is_refused_with_the_names_there_are() -> None:
    known = "bash_agent, chat, claude_code, codex, command, noop, oracle, tools"
    with pytest.raises(Refused, match=f"expected one of the harnesses {known}, found 'swarm'"):
        registry.load("swarm")


@EVERY_HARNESS
@pytest.mark.parametrize("interaction", get_args(Interaction))
def test_an_interaction_that_a_harness_does_not_claim_is_refused(name: str, interaction: Interaction) -> None:
    harness = registry.load(name)
    changes = {"tools": [], "composition": Composition(harness=name, sandbox="bubblewrap")}
    descriptor = SUITES[name].descriptor(interaction).model_copy(update=changes)
    if interaction in harness.capabilities.interactions:
        registry.check(harness, descriptor)
        return
    with pytest.raises(Refused, match=f"harness {name} plays .* environment none asks for {interaction}"):
        registry.check(harness, descriptor)


@EVERY_HARNESS
def test_a_sandbox_is_refused_by_a_harness_that_works_without_one(name: str) -> None:
    played = min(registry.load(name).capabilities.interactions)
    descriptor = SUITES[name].descriptor(played).model_copy(update={"placement": "agent_in_env", "tools": []})
    with pytest.raises(Refused, match="in placement agent_in_env takes a sandbox, and the run names no backend"):
        registry.check(registry.load(name), descriptor)


def test_tools_that_a_harness_would_not_show_its_model_are_refused_instead_of_dropped() -> None:
    descriptor = TestChat().descriptor("single_turn").model_copy(update={"tools": [TOOL]})
    with pytest.raises(Refused, match="harness chat calls no tools, but environment none offers 1"):
        registry.check(ChatHarness(), descriptor)


def test_the_oracle_without_a_reference_is_refused_and_with_one_asks_nobody() -> None:
    models = ScriptedModels(lambda _: AssertionError("asked"))
    bare = TestOracle().descriptor("single_turn").model_copy(update={"reference": None})
    with pytest.raises(Refused, match="expected a reference solution"):
        asyncio.run(OracleHarness().open(bare, models, None))
    played = TestOracle()._play("single_turn", models)
    assert played.submission == Submission(text="2")
    assert models.asked == []


# Harnesses that are wrong in one way each.


class Wrong(ChatHarness):
    """`chat`, with another session."""

    name: ClassVar[str] = "wrong"
    session: ClassVar[Callable[[Models], AgentSession]] = ChatSession

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> Any:
        return type(self).session(models)


class OffersTools(ChatSession):
    """Not wrong: it shows the model the one tool that the suite has."""

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        self._context += observation
        try:
            completion = await self._models.complete(self._context, [TOOL])
        except ContextOverflow:
            return Turn([], "context_overflow")
        self._context.append(completion.message)
        self._answer = text_of(completion.message)
        reason = completion.finish_reason
        return Turn([completion.message], "length" if reason == "length" else "content_filter" if reason != "stop" else None)


class ChangesTheObservation(ChatSession):
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        observation[-1]["content"] = "Ignore the question."
        return await super().activate(observation)


class AsksAJudge(ChatSession):
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        await self._models.complete(observation, role="judge")
        return await super().activate(observation)


class SwallowsFailures(ChatSession):
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        try:
            return await super().activate(observation)
        except ModelFailure:
            return Turn([{"role": "assistant", "content": "I give up."}], "completed")


class SwallowsCancellation(ChatSession):
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        try:
            return await super().activate(observation)
        except asyncio.CancelledError:
            return Turn([{"role": "assistant", "content": "A moment."}], None)


class HandsInOnlyAnswers(ChatSession):
    async def close(self) -> Submission:
        assert self._answer, "no answer"
        return await super().close()


class ForgetsWhyItStopped(ChatSession):
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        turn = await super().activate(observation)
        return Turn(turn.messages, None)


class Repeats(ChatSession):
    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        turn = await super().activate(observation)
        return Turn([*observation, *turn.messages], turn.stop_reason)


class RemembersEverybody(ChatSession):
    everything: ClassVar[list[ChatMessage]] = []

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        self._context = self.everything


@pytest.mark.parametrize(
    ("session", "finding"),
    [
        (ChangesTheObservation, "neither_descriptor_nor_observation_is_changed"),
        (AsksAJudge, "only_models_of_the_composition_are_asked"),
        (SwallowsFailures, "a_failing_model_is_not_the_agents_fault"),
        (SwallowsCancellation, "a_session_stopped_while_it_waits_still_hands_in"),
        (HandsInOnlyAnswers, "a_session_that_was_never_activated_hands_in_too"),
        (ForgetsWhyItStopped, "an_answer_cut_short_says_so"),
        (ForgetsWhyItStopped, "a_full_context_is_an_outcome"),
        (Repeats, "what_it_adds_to_the_transcript_begins_with_the_agents_own_words"),
        (RemembersEverybody, "two_sessions_of_one_task_are_alike_under_a_deterministic_model"),
        (RemembersEverybody, "sessions_under_way_at_once_do_not_mix"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_finds_a_harness_that(session: type[ChatSession], finding: str) -> None:
    class Suite(HarnessConformance):
        def harness(self) -> Harness:
            wrong: Harness = type("WrongHere", (Wrong,), {"session": session})()
            return wrong

    with pytest.raises(AssertionError):
        getattr(Suite(), f"test_{finding}")()


def test_the_suite_finds_a_harness_that_claims_what_nobody_knows() -> None:
    class Suite(HarnessConformance):
        def harness(self) -> Harness:
            claims: Any = frozenset({"telepathy"})
            boaster: Harness = type("Boaster", (Wrong,), {"capabilities": Capabilities(interactions=claims)})()
            return boaster

    with pytest.raises(AssertionError, match="unknown interactions"):
        Suite().test_name_version_and_claims_are_well_formed()
