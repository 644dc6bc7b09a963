"""Repositories mended with tools of the environment, through the real workers: what actions earn, and the score."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.blobs import BlobStore
from rollstream.environments import registry
from rollstream.environments.code.code_repair_tools import CodeRepairToolsEnvironment, progress_of
from rollstream.environments.protocol import Verdict
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.provisioning import ensure
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.settings import Settings
from rollstream.testing.model_server import Call, Reply, Request, ScriptedModelServer, Text, ToolCalls
from schemas.action import StepRewarded
from schemas.rollout import RolloutScored
from schemas.session import SessionReady
from schemas.task import TaskSubmitted
from schemas.values import Composition, JsonObject, TaskRef
from schemas.verdict import VerdictReached
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.flow.test_store_flow import eventually, projecting
from tests.sandboxes.test_env_sandboxed import bash, provider, results, sandboxed, until_nothing_is_left
from tests.unit.test_cli import rollstream_command

__all__ = ["provider", "sandboxed"]
pytestmark = [pytest.mark.docker, pytest.mark.kafka, pytest.mark.slow, pytest.mark.usefixtures("topics")]

FILES = {
    "lib.py": "def double(number):\n    return number + 2\n\n\ndef half(number):\n    return number // 2\n",
    "tests/test_lib.py": "from lib import half\n\n\ndef test_half():\n    assert half(4) == 2\n",
}
HIDDEN = """\
from lib import double, half


def test_double():
    assert double(3) == 6


def test_half_of_an_odd_number():
    assert half(3) == 1.5
"""
FIX = "\n".join(
    [
        "--- a/lib.py", "+++ b/lib.py", "@@ -1,6 +1,6 @@",
        " def double(number):", "-    return number + 2", "+    return number * 2", " ", " ",
        " def half(number):", "-    return number // 2", "+    return number / 2", "",
    ]
)  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples" / "code_repair"
SUBMIT = ToolCalls([Call("submit", {}, "s")])


def row(settings: Settings, folder: Path, **changes: Any) -> JsonObject:
    """A task as publishing makes it of a folder."""
    for path, text in FILES.items():
        (folder / "repo" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "repo" / path).write_text(text)
    written: JsonObject = {
        "instruction": "double does not double, and half of an odd number is wrong",
        "repo": "repo",
        "tests": {"tests/test_hidden.py": HIDDEN},
        "patch": FIX,
        "box": {"memory_mib": 256, "disk_mib": 64, "pids": 64},
        "fail_to_pass": ["tests/test_hidden.py::test_double", "tests/test_hidden.py::test_half_of_an_odd_number"],
        "pass_to_pass": ["tests/test_lib.py::test_half"],
        "test_timeout_s": 60,
        **changes,
    }
    return CodeRepairToolsEnvironment().localise(written, folder, BlobStore.of(settings).keep)


async def played(settings: Settings, row: JsonObject, harness: str, script: Any) -> RolloutScored:
    async with ScriptedModelServer(script) as server:
        settings = with_model(settings, server.base_url, timeout_s=120)
        settings = settings.model_copy(update={"store": settings.store.model_copy(update={"publish_interval_s": 0.2})})
        composition = Composition(harness=harness, sandbox=settings.sandboxes.provider)
        task = TaskSubmitted.create(
            run="r",
            environment="code_repair_tools",
            task=TaskRef(id="t", dataset="d"),
            row=row,
            attempts=1,
            composition=composition,
        )
        async with pipeline(settings), projecting(settings):
            await publish(settings, task)
            (scored,) = await terminal(settings, 1, 120)
            rewards = [(step.index, step.reward) for step in scored.steps if step.reward is not None]
            if rewards:
                await eventually(settings, "SELECT step, reward FROM step_rewards ORDER BY step", *rewards)
    return scored


async def test_an_agent_at_the_shell_mends_a_bug_and_every_action_earns_what_it_mends(
    sandboxed: Settings, provider: SandboxProvider, tmp_path: Path
) -> None:
    steps = (
        bash("ls; cat lib.py"),
        bash("sed -i 's/number + 2/number * 2/' lib.py && rm -rf .git && python3 -m pytest -q tests"),
        bash(r"sed -i 's/number \* 2/number * 3/' lib.py"),
        ToolCalls([Call("read_file", {"path": "lib.py"}, "r")]),
        bash(r"sed -i 's/number \* 3/number * 2/; s#number // 2#number / 2#' lib.py; echo 'def test_x(): 1' > tests/test_x.py"),
        SUBMIT,
    )

    def script(request: Request) -> Reply:
        return steps[len(results(request))]

    scored = await played(sandboxed, row(sandboxed, tmp_path), "bash_agent", script)
    assert (scored.reward, scored.success, scored.status) == (1.0, True, "completed"), scored.error
    assert [step.reward for step in scored.steps] == [0.0, 0.5, -0.5, None, 1.0, 0.0]
    assert scored.reward_components == {"terminal": 1.0, "steps": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0}
    (ready,) = await read_events(sandboxed, SessionReady)
    assert (ready.placement, ready.interaction) == ("env_sandboxed", "tools")
    assert "test_half_of_an_odd_number" not in ready.model_dump_json()
    assert [one.components.get("progress") for one in await read_events(sandboxed, StepRewarded)] == [0.0, 0.5, 0.0, 1.0, 1.0]
    released = await until_nothing_is_left(sandboxed, provider)
    assert {event.how for event in released} == {"closed"}
    # The agent's, one for each patch that was measured, and that of the verdict.
    assert len(released) == 1 + 3 + 1


async def test_what_the_agent_says_it_has_done_is_worth_nothing(
    sandboxed: Settings, provider: SandboxProvider, tmp_path: Path
) -> None:
    def script(request: Request) -> Reply:
        return Text(f"The bug is mended:\n{FIX}") if results(request) else bash("true")

    scored = await played(sandboxed, row(sandboxed, tmp_path), "bash_agent", script)
    assert (scored.reward, scored.status) == (0.0, "completed")
    (verdict,) = await read_events(sandboxed, VerdictReached)
    assert verdict.diagnostics["patch_exists"] is False


async def test_the_reference_earns_everything_and_doing_nothing_earns_nothing(
    sandboxed: Settings, provider: SandboxProvider, tmp_path: Path
) -> None:
    given = row(sandboxed, tmp_path)
    best = await played(sandboxed, given, "oracle", lambda request: Text("unused"))
    assert (best.reward, [step.reward for step in best.steps]) == (1.0, [0.0, 1.0, 0.0])
    idle = sandboxed.model_copy(
        update={"kafka": sandboxed.kafka.model_copy(update={"topic_prefix": f"{sandboxed.kafka.topic_prefix}idle."})}
    )
    admin = await connect_admin(str(idle.bootstrap_servers))
    await ensure(admin, idle.kafka)
    await admin.close()
    nothing = await played(idle, given, "noop", lambda request: Text("unused"))
    assert (nothing.reward, nothing.status) == (0.0, "completed")


@pytest.mark.parametrize(
    ("verdict", "progress"),
    [
        (Verdict(1.0, components={"fail_to_pass": 1.0, "pass_to_pass": 1.0}), 1.0),
        (Verdict(0.0, components={"fail_to_pass": 0.5, "pass_to_pass": 1.0}), 0.5),
        (Verdict(0.0, components={"fail_to_pass": 1.0, "pass_to_pass": 0.0}), 0.0),
        (Verdict(0.0), 0.0),
    ],
)
def test_what_a_patch_breaks_counts_against_what_it_mends(verdict: Verdict, progress: float) -> None:
    assert progress_of(verdict) == progress


def test_the_tools_environment_is_shipped() -> None:
    assert registry.load("code_repair_tools").name == "code_repair_tools"


def test_every_example_is_solved_by_its_reference_and_not_by_doing_nothing(bubblewrap: None) -> None:
    tasks = str(EXAMPLES / "tasks.jsonl")
    done = rollstream_command("env", "check", tasks, "-e", "code_repair_tools", "--sandbox", "bubblewrap", timeout_s=200)
    assert (done.returncode, done.stdout.strip()) == (0, "8 tasks of code_repair_tools: 8 good"), done.stderr
