"""Agents' real programs over the real broker: from a task to its terminal record, with their steps in the log."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.blobs import BlobStore
from rollstream.environments import registry
from rollstream.settings import HarnessSettings, SandboxSettings, Settings
from rollstream.testing.model_server import Call, Held, Reply, Request, Script, ScriptedModelServer, Text, ToolCalls
from schemas.action import ActionRequested
from schemas.sandbox import SandboxLeased, SandboxReleased
from schemas.step import AgentStepped
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from tests.environments import load_anew
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.sandboxes.agents import BUG, fixes, tar
from tests.sandboxes.mending import MendEnvironment

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.usefixtures("topics", "mend")]

CHECK = "import sys; sys.path.insert(0, '.'); from calc import add; sys.exit(add(2, 3) != 5)"


@pytest.fixture
def mend() -> Iterator[None]:
    registry.ENVIRONMENTS["mend"] = MendEnvironment
    load_anew()
    yield
    registry.ENVIRONMENTS.pop("mend", None)
    load_anew()


def boxed(
    settings: Settings, server: ScriptedModelServer, harnesses: HarnessSettings, provider: str = "bubblewrap"
) -> Settings:
    section = SandboxSettings(provider=provider, reap_interval_seconds=0.5)
    return with_model(settings, server.base_url).model_copy(update={"sandboxes": section, "harnesses": harnesses})


async def task(settings: Settings, harness: str) -> TaskSubmitted:
    archive = await BlobStore.of(settings).put(tar({"calc.py": BUG}))
    return TaskSubmitted.create(
        run="r",
        environment="mend",
        task=TaskRef(id=harness),
        row={"archive": str(archive), "check": CHECK},
        composition=Composition(harness=harness, models={"policy": "default"}, sandbox="bubblewrap"),
    )


def at_first(script: Script, held: asyncio.Event) -> Script:
    """The script, whose first answer waits."""

    def answer(request: Request) -> Reply:
        reply = script(request)
        return Held(reply, held) if request.number == 0 else reply

    return answer


async def test_programs_mend_a_bug_and_a_fresh_box_says_so(
    settings: Settings, harnesses: HarnessSettings, bubblewrap: None
) -> None:
    async with ScriptedModelServer(fixes) as server:
        settings = boxed(settings, server, harnesses)
        submitted = [await task(settings, harness) for harness in ("claude_code", "codex", "noop")]
        async with pipeline(settings):
            await publish(settings, *submitted)
            scored = await terminal(settings, 3, deadline_s=120)
    told = {one.task.id: (one.status, one.reward, str(one.error)) for one in scored if one.task}
    assert told == {
        "claude_code": ("completed", 1.0, "None"),
        "codex": ("completed", 1.0, "None"),
        "noop": ("completed", 0.0, "None"),
    }
    steps = await read_events(settings, AgentStepped)
    for harness in ("claude_code", "codex"):
        own = [step for step in steps if step.task.id == harness]
        assert [bool(step.message.get("tool_calls")) for step in own] == [True, False]
    leased, released = await read_events(settings, SandboxLeased), await read_events(settings, SandboxReleased)
    assert {one.sandbox for one in leased} == {one.sandbox for one in released}
    assert len(leased) >= 6


async def test_a_program_answers_tasks_of_an_environment_that_knows_no_box(
    settings: Settings, harnesses: HarnessSettings, bubblewrap: None
) -> None:
    async with ScriptedModelServer(lambda request: Text(r"\boxed{4}")) as server:
        settings = boxed(settings, server, harnesses)
        math = TaskSubmitted.create(
            run="r",
            environment="math",
            task=TaskRef(id="sum"),
            row={"question": "2 + 2", "expected_answer": "4"},
            composition=Composition(harness="claude_code", models={"policy": "default"}, sandbox="bubblewrap"),
        )
        async with pipeline(settings):
            await publish(settings, math)
            (scored,) = await terminal(settings, 1, deadline_s=120)
    assert (scored.status, scored.reward, str(scored.error)) == ("completed", 1.0, "None")


def counts(request: Request) -> Reply:
    """A model that calls the environment's one tool, by whatever name it is offered, three times."""
    (tool,) = [name for name in request.tools if name.endswith("increment_counter")]
    if request.tool_results < 3:
        namespace, _, name = tool.rpartition(".")
        return ToolCalls([Call(name, {"count": 1}, f"call-{request.tool_results}", namespace)])
    return Text("It is three.")


@pytest.mark.parametrize("harness", ["claude_code", "codex"])
async def test_a_program_plays_an_environment_by_its_tools(
    harness: str, settings: Settings, harnesses: HarnessSettings, bubblewrap: None
) -> None:
    async with ScriptedModelServer(counts) as server:
        settings = boxed(settings, server, harnesses)
        counter = TaskSubmitted.create(
            run="r",
            environment="counter",
            task=TaskRef(id="three"),
            row={"expected_count": 3, "messages": [{"role": "user", "content": "Count to three."}]},
            composition=Composition(harness=harness, models={"policy": "default"}, sandbox="bubblewrap"),
        )
        async with pipeline(settings):
            await publish(settings, counter)
            (scored,) = await terminal(settings, 1, deadline_s=120)
    assert (scored.status, scored.reward, str(scored.error)) == ("completed", 1.0, "None")
    assert len(await read_events(settings, ActionRequested)) == 3
    assert [message["role"] for message in scored.messages].count("tool") == 3


async def test_a_session_whose_worker_was_killed_starts_again_in_a_box_of_its_own(
    settings: Settings, harnesses: HarnessSettings, bubblewrap: None
) -> None:
    held = asyncio.Event()
    async with ScriptedModelServer(at_first(fixes, held)) as server:
        settings = boxed(settings, server, harnesses)
        submitted = await task(settings, "claude_code")
        worker = await killable_worker(settings)
        try:
            async with pipeline(settings, ("env_worker", "verifier_worker")):
                await publish(settings, submitted)
                await server.wait_for_requests(1, timeout_s=90)
                worker.send_signal(signal.SIGKILL)
                await worker.wait()
                held.set()
                async with pipeline(settings, ("agent_worker",)):
                    (scored,) = await terminal(settings, 1, deadline_s=120)
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
    assert (scored.status, scored.reward, str(scored.error)) == ("completed", 1.0, "None")
    leased = [one for one in await read_events(settings, SandboxLeased) if one.holder.fence is not None and one.renewal == 0]
    released = {one.sandbox: one.how for one in await read_events(settings, SandboxReleased)}
    assert len({one.holder.session for one in leased}) == 1
    first, second = sorted(leased, key=lambda one: one.holder.fence or 0)
    assert (released[first.sandbox], released[second.sandbox]) == ("fenced", "closed")


async def killable_worker(settings: Settings) -> asyncio.subprocess.Process:
    """An agent_worker in a process of its own."""
    environment = os.environ | {
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        "ROLLSTREAM_KAFKA": settings.kafka.model_dump_json(),
        "ROLLSTREAM_MODELS": json.dumps({name: one.model_dump(mode="json") for name, one in settings.models.items()}),
        "ROLLSTREAM_SANDBOXES": settings.sandboxes.model_dump_json(exclude_none=True),
        "ROLLSTREAM_HARNESSES": settings.harnesses.model_dump_json(),
    }
    command = [sys.executable, "-m", "services", "agent_worker"]
    root = str(Path(__file__).parents[2])
    return await asyncio.create_subprocess_exec(*command, env=environment, cwd=root, stderr=subprocess.DEVNULL)
