"""Agents in boxes: real programs, real boxes, a scripted model. What stands in the log, and what is handed in."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from rollstream.errors import EnvironmentFailure, ModelFailure, Refused, SandboxUnavailable
from rollstream.eventlog.following import Inbox
from rollstream.eventlog.lanes import fence
from rollstream.models.protocol import Completion
from rollstream.settings import CommandSettings, HarnessSettings
from rollstream.testing.harnesses import TOOL
from rollstream.testing.model_server import Hang, Reply, Request, Script, Status, always, in_turn
from schemas.episode import EpisodeCompleted
from schemas.sandbox import SandboxHolder, SandboxReleased, SandboxSpec
from schemas.session import Submission, Workspace
from schemas.step import Execution
from schemas.values import ChatMessage, text_of
from services.agent_worker.harnesses import registry
from services.agent_worker.harnesses.cli import AgentFailed
from tests.sandboxes.agents import BUG, FIX, KEY_ENV, SPEC, WORKER, Scene, agents, fixes, ready, runs, tar

EXECUTION = Execution(id="execution", worker=WORKER)
Open = Callable[..., AbstractAsyncContextManager[Scene]]
ASK = (
    'import json, os, urllib.request as u; b = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}]});'
    'r = u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b.encode(), {"content-type": "application/json"});'
    'print(json.load(u.urlopen(r))["choices"][0]["message"]["content"])'
)
"""Python: a program of an agent that asks its model once, and prints what it says."""


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker])])
def scene(request: pytest.FixtureRequest, harnesses: HarnessSettings, tmp_path: Path) -> Open:
    request.getfixturevalue("bubblewrap")
    image = request.getfixturevalue("sandbox_image") if request.param == "docker" else None

    def open_scene(script: Script, **model: object) -> AbstractAsyncContextManager[Scene]:
        return agents(request.param, script, tmp_path, harnesses=harnesses, image=image, **model)

    return open_scene


@pytest.fixture
def small(bubblewrap: None, harnesses: HarnessSettings, tmp_path: Path) -> Open:
    """A scene in bubblewrap, for what no provider has to do with."""

    def open_scene(script: Script, command: Mapping[str, object] | None = None, **model: object) -> object:
        own = harnesses.model_copy(update={"command": CommandSettings.model_validate(command or {})})
        return agents("bubblewrap", script, tmp_path, harnesses=own, **model)

    return open_scene  # type: ignore[return-value]


class Recorded:
    """`Models` that keep what is recorded, and are asked nothing."""

    def __init__(self) -> None:
        self.new: list[list[ChatMessage]] = []
        self.tokens: list[int] = []

    async def complete(self, messages: object, tools: object = (), role: str = "policy") -> Completion:
        raise AssertionError("asked")

    async def record(self, completion: Completion, new_messages: Sequence[ChatMessage] = (), role: str = "policy") -> None:
        self.new.append(list(new_messages))
        self.tokens.append(completion.usage.completion_tokens)


BOTH = pytest.mark.parametrize("harness", ["claude_code", "codex"])


# Programs at work.


@BOTH
async def test_a_program_mends_a_bug_in_its_box(harness: str, scene: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, "real-key")
    async with scene(fixes) as here:
        episode = await here.play(await here.repair(harness))
    assert "+    return a + b" in (episode.submission.artifact or "")
    assert (episode.stop_reason, episode.submission.text) == ("completed", "It is mended.")
    assert episode.steps == [step.event_id for step in here.log.steps]
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert sum(call.usage.completion_tokens for call in episode.calls) == 10
    assert {request.model for request in here.server.requests} == {"small-1b"}
    assert all("real-key" in str(request.headers) for request in here.server.requests)
    assert "real-key" not in b"".join(event.to_json() for event in here.log.events).decode()
    assert (here.log.events[0].kind, here.log.events[-1].kind) == ("SandboxLeased", "SandboxReleased")


async def test_neither_the_key_nor_any_other_variable_of_the_worker_is_in_the_box(
    small: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, "real-key")
    look = 'env; cat /proc/*/environ 2>/dev/null | tr "\\0" "\\n"'
    async with small(runs(look)) as here:
        episode = await here.play(await here.repair("claude_code"))
    (seen,) = [text_of(message) for message in episode.messages if message["role"] == "tool"]
    assert "ANTHROPIC_API_KEY=rollstream" in seen
    assert "real-key" not in seen


@BOTH
async def test_a_program_answers_a_question_in_a_box_of_the_settings(harness: str, small: Open) -> None:
    async with small(always("It is 2.")) as here:
        episode = await here.play(ready(harness, "bubblewrap", interaction="single_turn", sandbox=None))
    assert (episode.submission, episode.stop_reason) == (Submission(text="It is 2."), "completed")
    assert len(episode.steps) == 1


@BOTH
async def test_a_step_is_in_the_log_while_the_program_still_runs(harness: str, small: Open) -> None:
    seen: list[int] = []

    def script(request: Request) -> Reply:
        seen.append(len(here.log.steps))
        return fixes(request)

    async with small(script) as here:
        await here.play(await here.repair(harness))
    assert seen == [0, 1]


@BOTH
async def test_a_program_goes_on_from_its_own_session_when_it_is_activated_again(harness: str, small: Open) -> None:
    async with small(in_turn("First.", "Second.")) as here:
        descriptor = ready(harness, "bubblewrap", interaction="conversation", sandbox=None)
        async with here.boxes.of(descriptor, registry.load(harness), EXECUTION) as box:
            assert box is not None
            models = Recorded()
            session = await registry.load(harness).open(descriptor, models, box.box)
            first = await session.activate(descriptor.messages)
            second = await session.activate([{"role": "user", "content": "Are you sure?"}])
        assert [text_of(turn.messages[-1]) for turn in (first, second)] == ["First.", "Second."]
        assert "Mend calc.py" in here.server.requests[1].raw.decode()
        assert "First." in here.server.requests[1].raw.decode()
        assert models.new == [[], [{"role": "user", "content": "Are you sure?"}]]
        assert models.tokens == [5, 5]


# Programs that are stopped.


async def test_what_an_agent_leaves_running_is_dead_before_its_patch_is_taken(scene: Open) -> None:
    writes = "(setsid nohup sh -c 'while :; do date +%s%N > calc.py; sleep 0.01; done' >/dev/null 2>&1 &); sleep 0.2"
    async with scene(runs(f"{writes}; sleep 60")) as here:
        # The program has to start, ask and begin to write within it.
        descriptor = await here.repair("claude_code", limits={"agent_timeout_s": 15.0})
        episode = await here.play(descriptor)
    assert episode.stop_reason == "agent_timeout"
    assert "calc.py" in (episode.submission.artifact or "")
    assert "artifact" not in episode.submission.left_out
    assert len(episode.steps) == 1
    assert [message["role"] for message in episode.messages] == ["user", "assistant"]


async def test_a_program_that_passes_its_steps_is_ended_and_scored_for_what_it_has(small: Open) -> None:
    def restless(request: Request) -> Reply:
        call = runs(f"echo {request.number} >> log.txt")
        return call(Request(0, request.path, request.headers, b'{"tools": [{"name": "Bash"}]}'))

    async with small(restless) as here:
        episode = await here.play(await here.repair("claude_code", limits={"max_steps": 3}))
    assert (episode.stop_reason, len(episode.steps)) == ("max_steps", 3)
    assert "log.txt" in (episode.submission.artifact or "")


async def test_a_session_that_is_taken_away_closes_its_box(small: Open) -> None:
    async with small(always(Hang())) as here:
        playing = asyncio.create_task(here.handler.play(await here.repair("claude_code")))
        await here.server.wait_for_requests(1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        (released,) = here.log.of("SandboxReleased")
    assert isinstance(released, SandboxReleased)
    assert released.how == "closed"


async def test_a_session_that_is_taken_over_starts_again_and_the_box_of_before_is_removed_first(small: Open) -> None:
    async with small(fixes) as here:
        descriptor = await here.repair("claude_code")
        holder = SandboxHolder(worker=WORKER, run=descriptor.run, session=descriptor.session)
        group = here.boxes._group
        old = holder.model_copy(update={"consumer_group": group, "fence": 3})
        async with here.keeping.lease("bubblewrap", SPEC.model_copy(update={"network": "none"}), old) as left:
            token = fence.set(4)
            try:
                episode = await here.play(descriptor)
            finally:
                fence.reset(token)
            with pytest.raises(SandboxUnavailable):
                await left.exec(["true"])
    how = [event.how for event in here.log.events if isinstance(event, SandboxReleased)]
    assert how[0] == "fenced"
    assert episode.execution.fence == 4


async def test_steps_of_before_are_not_gone_on_from_because_what_they_did_is_gone(small: Open) -> None:
    async with small(fixes) as here:
        descriptor = await here.repair("claude_code")
        await here.handler.play(descriptor)
        before = list(here.log.steps)
        asked = len(here.server.requests)
        await here.handler.play(descriptor, Inbox(0, steps=[step.to_json() for step in before]))
        assert len(here.server.requests) == 2 * asked
        last = here.log.of("EpisodeCompleted")[-1]
    assert isinstance(last, EpisodeCompleted)
    assert last.steps == [step.event_id for step in here.log.steps[len(before) :]]
    assert not set(last.steps) & {step.event_id for step in before}
    assert "+    return a + b" in (last.submission.artifact or "")


# Models that fail.


@BOTH
async def test_a_refused_key_pauses_the_run_and_is_no_finished_episode(harness: str, small: Open) -> None:
    async with small(always(Status(401, "bad key"))) as here:
        with pytest.raises(ModelFailure) as caught:
            await here.handler.play(await here.repair(harness))
        assert (caught.value.kind, caught.value.retryable) == ("model_unauthorized", False)
        assert KEY_ENV in str(caught.value)
        assert here.log.of("RunPaused")
        assert not here.log.of("EpisodeCompleted")


@BOTH
async def test_a_server_that_fails_is_asked_again_by_the_program_and_then_is_a_retryable_failure(
    harness: str, small: Open
) -> None:
    async with small(always(Status(500, retry_after_s=0.001))) as here:
        with pytest.raises(ModelFailure) as caught:
            await here.handler.play(await here.repair(harness))
        assert (caught.value.kind, caught.value.retryable) == ("model_unavailable", True)
        assert len(here.server.requests) > 1


async def test_a_server_that_fails_once_fails_nobody(small: Open) -> None:
    async with small(in_turn(Status(503, retry_after_s=0.001), "It is 2.")) as here:
        episode = await here.play(ready("claude_code", "bubblewrap", interaction="single_turn", sandbox=None))
    assert episode.submission.text == "It is 2."


async def test_time_that_a_silent_server_took_is_not_held_against_the_agent(small: Open) -> None:
    # Half of the time is the program's, to start and ask.
    async with small(always(Hang())) as here:
        with pytest.raises(ModelFailure) as caught:
            await here.handler.play(await here.repair("codex", limits={"agent_timeout_s": 16.0}))
    assert caught.value.kind == "model_timeout"


async def test_a_context_that_is_full_is_an_outcome(small: Open) -> None:
    full = Status(400, "prompt is too long: 4096 tokens > 128 maximum", code="invalid_request_error")
    async with small(always(full)) as here:
        episode = await here.play(await here.repair("claude_code"))
    assert (episode.stop_reason, episode.submission.artifact) == ("context_overflow", "")


# Programs of one's own.


async def test_any_program_is_an_agent(small: Open) -> None:
    argv = ["sh", "-c", f'{FIX}; test "$(cat)" = "Mend calc.py: add must add." && echo noted > notes.txt && echo Done.']
    async with small(always("never asked"), {"argv": argv}) as here:
        episode = await here.play(await here.repair("command"))
    assert "+    return a + b" in (episode.submission.artifact or "")
    assert (episode.submission.text, episode.submission.files) == ("Done.", {"notes.txt": "noted\n"})
    assert episode.steps == []


async def test_any_program_finds_its_instruction_and_its_model_where_its_settings_say(small: Open) -> None:
    argv = ["sh", "-c", f"cat {{instruction_file}} > seen.txt; echo {{model}} >> seen.txt; python3 -c '{ASK}' > answer"]
    command = {"argv": argv, "instruction": "file", "answer_file": "answer"}
    async with small(always("It is 2."), command) as here:
        episode = await here.play(await here.repair("command"))
    assert episode.submission.text == "It is 2."
    assert "+Mend calc.py: add must add.small-1b" in (episode.submission.artifact or "")


async def test_any_program_may_tell_its_steps(small: Open) -> None:
    lines = (
        '{"role": "assistant", "content": "One."}\n{"role": "tool", "content": "2"}\n{"role": "assistant", "content": "Two."}'
    )
    async with small(always("never asked"), {"argv": ["printf", "%s\n", lines], "steps": "jsonl"}) as here:
        episode = await here.play(await here.repair("command"))
    assert [step.message["content"] for step in here.log.steps] == ["One.", "Two."]
    assert episode.submission.text == "Two."


async def test_a_program_of_ones_own_that_fails_is_no_zero(small: Open) -> None:
    async with small(always(Status(404)), {"argv": ["sh", "-c", f"python3 -c '{ASK}' 2>/dev/null"]}) as here:
        with pytest.raises(ModelFailure, match="check the model's id"):
            await here.handler.play(await here.repair("command"))
    async with small(always("x"), {"argv": ["sh", "-c", "echo oh >&2; exit 3"]}) as here:
        with pytest.raises(AgentFailed, match="exit code 3: oh"):
            await here.handler.play(await here.repair("command"))


# Boxes without a program.


async def test_the_oracle_works_in_a_box_and_noop_leaves_it_as_it_was(scene: Open) -> None:
    patch = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    async with scene(always("never asked")) as here:
        reference = Submission(text="mended", artifact=patch, files={"notes.txt": "so"})
        episode = await here.play(await here.repair("oracle", reference=reference))
    assert "+    return a + b" in (episode.submission.artifact or "")
    assert (episode.submission.text, episode.submission.files) == ("mended", {"notes.txt": "so"})
    async with scene(always("never asked")) as here:
        episode = await here.play(await here.repair("noop"))
    assert episode.submission.artifact == ""
    assert episode.submission.left_out == {"notes.txt": "there is no such file"}


async def test_a_workspace_that_cannot_be_prepared_is_the_environments_failure(small: Open) -> None:
    async with small(always("never asked")) as here:
        for workspace, sentence in (
            (Workspace(commands=[["sh", "-c", "echo oh no >&2; exit 3"]]), "oh no"),
            (Workspace(archive="elsewhere"), "expected the reference of a blob"),
            (Workspace(archive=str(await here.blobs.put(b"no tar"))), "archive"),
            (Workspace(base="HEAD"), "expected the revision HEAD"),
        ):
            with pytest.raises(EnvironmentFailure, match=sentence) as caught:
                await here.handler.play(ready("noop", "bubblewrap", workspace=workspace))
            assert (caught.value.kind, caught.value.stage) == ("workspace_failed", "agent")


async def test_an_archive_reaches_nothing_outside_of_the_box(small: Open) -> None:
    async with small(always("never asked")) as here:
        archive = await here.blobs.put(tar({"../../../../tmp/rollstream-escaped": "x", "a": "y"}))
        workspace = Workspace(archive=str(archive), files=["a"])
        try:
            episode = await here.play(ready("noop", "bubblewrap", workspace=workspace))
            assert episode.submission.files == {"a": "y"}
        except EnvironmentFailure:
            # tar itself may refuse such a name.
            assert not here.log.of("EpisodeCompleted")
    assert "rollstream-escaped" not in os.listdir("/tmp")


async def test_a_box_without_a_way_to_the_model_is_refused(small: Open) -> None:
    async with small(always("never asked")) as here:
        closed = ready("claude_code", "bubblewrap").sandbox
        assert closed is not None
        descriptor = ready("claude_code", "bubblewrap", sandbox=closed.model_copy(update={"network": "none"}))
        with pytest.raises(Refused, match="network gateway"):
            await here.handler.play(descriptor)


async def test_tools_that_nobody_would_carry_out_are_refused_instead_of_dropped(small: Open) -> None:
    async with small(always("never asked")) as here:
        descriptor = ready("codex", "bubblewrap", interaction="single_turn", tools=[TOOL])
        with pytest.raises(Refused, match="calls tools of a world that answers, found 1 with interaction single_turn"):
            await here.handler.play(descriptor)


async def test_a_program_that_is_not_there_is_refused_with_the_setting_to_correct(bubblewrap: None, tmp_path: Path) -> None:
    async with agents("bubblewrap", always("x"), tmp_path) as here:
        with pytest.raises(Refused, match=r"set harnesses\.claude_code\.path"):
            await here.handler.play(await here.repair("claude_code"))


async def test_an_engine_that_is_away_is_a_failure_that_a_retry_can_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    async with agents("docker", always("never asked"), tmp_path) as here:
        with pytest.raises(SandboxUnavailable) as caught:
            await here.handler.play(ready("noop", "docker"))
        assert (caught.value.stage, caught.value.retryable) == ("agent", True)
        assert here.log.events == []


async def test_a_program_that_needs_no_model_works_without_any_isolation_too(tmp_path: Path) -> None:
    command = CommandSettings(argv=["sh", "-c", f"{FIX}; rm -rf .git; echo Done."])
    spec = SandboxSpec(cpus=None, memory_mib=None, pids=None, disk_mib=None, network="public")
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "-q", "-m", "base"]
    commands = [["git", "init", "-q", "."], ["git", "add", "-A"], commit]
    async with agents("local", always("never asked"), tmp_path, harnesses=HarnessSettings(command=command)) as here:
        archive = await here.blobs.put(tar({"calc.py": BUG}))
        workspace = Workspace(archive=str(archive), commands=commands, base="HEAD")
        episode = await here.play(ready("command", "local", sandbox=spec, workspace=workspace))
    assert "+    return a + b" in (episode.submission.artifact or "")
    assert (episode.submission.text, episode.submission.left_out) == ("Done.", {})
