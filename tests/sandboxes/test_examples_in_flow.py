"""The projects with bugs, published by command and played by real workers: who mends them, who does not, and what SQL tells."""

import asyncio
import json
from pathlib import Path

import pytest

from rollstream.settings import HarnessSettings, SandboxSettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, Text
from tests.flow.commands import command
from tests.flow.flows import PIPELINE, pipeline, with_model
from tests.sandboxes.agents import runs

pytestmark = [
    pytest.mark.docker, pytest.mark.kafka, pytest.mark.slow, pytest.mark.usefixtures("topics"), pytest.mark.timeout(600)
]  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples/code_repair"
WORKERS = (*PIPELINE, "store_worker")
SCORES = (
    "SELECT reward, success, payload ->> '$.diagnostics.patch_exists' AS patch FROM rollouts "
    "JOIN events ON events.event_id = TRY_CAST(verdict_id AS UUID) WHERE rollouts.run_id = '{run}'"
)
STEPS = "SELECT message FROM steps WHERE run_id = '{run}' ORDER BY step_index"


def of(settings: Settings, image: str) -> Settings:
    return settings.model_copy(update={"sandboxes": SandboxSettings(image=image, reap_interval_seconds=0.5)})


async def published(settings: Settings, harness: str, sandbox: str, *options: str) -> None:
    """Publish the projects and wait for the end, as a user does."""
    words = (str(EXAMPLES / "tasks.jsonl"), "-e", "code_repair", "--harness", harness, "--sandbox", sandbox, "--run", harness)
    ran = await command(settings, "publish", *words, *options, "--wait", deadline_s=400)
    assert ran.code == 0, ran.said


async def rows(settings: Settings, question: str, count: int) -> list[dict[str, object]]:
    """What SQL answers, once the published copy has so many rows."""

    found: list[dict[str, object]] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            await asyncio.sleep(0.5)
            ran = await command(settings, "sql", question, "--format", "json")
            found = json.loads(ran.out) if ran.code == 0 else []
    return found


@pytest.mark.parametrize(("harness", "reward"), [("oracle", 1.0), ("noop", 0.0)])
@pytest.mark.parametrize("sandbox", ["docker", "bubblewrap"])
async def test_references_mend_every_project_and_doing_nothing_none(
    sandbox: str, harness: str, reward: float, settings: Settings, sandbox_image: str, bubblewrap: None
) -> None:
    settings = of(settings, sandbox_image)
    async with pipeline(settings, WORKERS):
        await published(settings, harness, sandbox)
        found = await rows(settings, SCORES.format(run=harness), 8)
    assert [(row["reward"], row["success"], row["patch"]) for row in found] == [
        (reward, bool(reward), str(bool(reward)).lower())
    ] * 8


@pytest.mark.parametrize("harness", ["claude_code", "codex"])
async def test_programs_mend_a_project_and_their_steps_are_in_sql(
    harness: str, settings: Settings, harnesses: HarnessSettings, sandbox_image: str
) -> None:
    patch = (EXAMPLES / "pagination/fix.patch").read_text()
    async with ScriptedModelServer(runs(f"git apply <<'END'\n{patch}\nEND", "The pages are right now.")) as server:
        settings = with_model(of(settings, sandbox_image), server.base_url).model_copy(update={"harnesses": harnesses})
        async with pipeline(settings, WORKERS):
            await published(settings, harness, "docker", "--limit", "1")
            (score,) = await rows(settings, SCORES.format(run=harness), 1)
            steps = await rows(settings, STEPS.format(run=harness), 2)
    assert (score["reward"], score["patch"]) == (1.0, "true")
    said = [json.dumps(step["message"]) for step in steps]
    assert "git apply" in said[0]
    assert "The pages are right now." in said[-1]


async def test_an_agent_that_only_talks_mends_nothing(
    settings: Settings, harnesses: HarnessSettings, sandbox_image: str
) -> None:
    async with ScriptedModelServer(lambda request: Text("All tests pass. Reward: 1.0")) as server:
        settings = with_model(of(settings, sandbox_image), server.base_url).model_copy(update={"harnesses": harnesses})
        async with pipeline(settings, WORKERS):
            await published(settings, "claude_code", "docker", "--limit", "1")
            (score,) = await rows(settings, SCORES.format(run="claude_code"), 1)
    assert (score["reward"], score["patch"]) == (0.0, "false")
