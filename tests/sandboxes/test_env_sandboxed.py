"""Worlds in boxes through the real workers and the real log: steps that earn, workers that die, and nothing that is left."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollstream.sandboxes import registry
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.settings import RetrySettings, SandboxSettings, Settings
from rollstream.testing.model_server import Call, Hang, Held, Reply, Request, ScriptedModelServer, Status, Text, ToolCalls
from schemas.action import ActionRequested, ObservationReturned, StepRewarded
from schemas.sandbox import SandboxLeased, SandboxReleased
from schemas.session import SessionReady
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from tests.chaos.fleet import Fleet
from tests.flow.commands import command
from tests.flow.flows import pipeline, publish, read_events, terminal, with_model
from tests.flow.test_store_flow import eventually, projecting

pytestmark = [pytest.mark.docker, pytest.mark.kafka, pytest.mark.slow, pytest.mark.usefixtures("topics")]
WORKSHOP = Path(__file__).with_name("workshop.py")
DEADLINE_S = 150
REST = ("agent_worker", "verifier_worker")


@pytest.fixture(params=["docker", "bubblewrap"])
def sandboxed(request: pytest.FixtureRequest, settings: Settings, sandbox_image: str, bubblewrap: None) -> Settings:
    """An installation whose workers know the workshop, with leases that nobody is late to renew."""
    section = SandboxSettings(provider=request.param, image=sandbox_image, lease_seconds=60, reap_interval_seconds=0.5)
    plugins = settings.plugins.model_copy(update={"environments": {"workshop": f"{WORKSHOP}:WorkshopEnvironment"}})
    retries = RetrySettings(agent_attempts=3, verification_attempts=1, first_delay_s=0.1)
    return settings.model_copy(update={"sandboxes": section, "plugins": plugins, "retries": retries})


@pytest.fixture
async def provider(sandboxed: Settings) -> AsyncIterator[SandboxProvider]:
    provider = registry.load(sandboxed.sandboxes, "cleanup")
    yield provider
    await provider.close()


def task(settings: Settings, harness: str = "bash_agent") -> TaskSubmitted:
    return TaskSubmitted.create(
        run="r",
        environment="workshop",
        task=TaskRef(id="t", dataset="d"),
        row={},
        attempts=1,
        composition=Composition(harness=harness, sandbox=settings.sandboxes.provider),
    )


def bash(text: str) -> Reply:
    return ToolCalls([Call("bash", {"command": text}, f"c{len(text)}")])


MEND_ADD = bash("sed -i 's/a - b/a + b/' sums.py; echo x >> marks; cat marks")
MEND_TWICE = ToolCalls([Call("replace_in_file", {"path": "sums.py", "old": "return a\n", "new": "return 2 * a\n"}, "r")])
SUBMIT = ToolCalls([Call("submit", {}, "s")])
SCRIPT = (bash("ls; cat sums.py"), MEND_ADD, MEND_TWICE, SUBMIT)


def results(request: Request) -> list[str]:
    return [str(message["content"]) for message in request.body["messages"] if message["role"] == "tool"]


def mends(request: Request) -> Reply:
    return SCRIPT[len(results(request))]


class Waits:
    """Mends one bug, thinks until it is let go on, and mends the other."""

    def __init__(self, then: Reply | None = None) -> None:
        self.let_go = asyncio.Event()
        self._then = then

    def __call__(self, request: Request) -> Reply:
        seen = len(results(request))
        if seen < 2 or self.let_go.is_set():
            return SCRIPT[seen]
        return self._then or Held(SCRIPT[seen], self.let_go)


async def until_mended(settings: Settings, count: int = 2) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(await read_events(settings, ObservationReturned)) < count:
            await asyncio.sleep(0.3)


async def own(settings: Settings, provider: SandboxProvider) -> set[str]:
    """Boxes of this installation that exist."""
    leased = {event.sandbox for event in await read_events(settings, SandboxLeased)}
    return leased & {box.id for box in await provider.found()}


async def until_nothing_is_left(settings: Settings, provider: SandboxProvider) -> list[SandboxReleased]:
    """Wait until every box is gone, and said to be; returns what was said."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            leased = {event.sandbox for event in await read_events(settings, SandboxLeased)}
            released = await read_events(settings, SandboxReleased)
            if leased == {event.sandbox for event in released} and not await own(settings, provider):
                assert leased, "there was a box"
                return released
            await asyncio.sleep(0.3)


def leased_for(settings: Settings, lease_s: float) -> Settings:
    return settings.model_copy(update={"sandboxes": settings.sandboxes.model_copy(update={"lease_seconds": lease_s})})


def outlasting_a_death(settings: Settings) -> Settings:
    """With leases of which half is longer than it takes to learn that a worker is dead and to start another; where the box dies
    with its worker nobody waits for that."""
    return leased_for(settings, 60.0 if settings.sandboxes.provider == "docker" else 10.0)


def journals(settings: Settings) -> list[str]:
    folder = settings.data_dir / "journals"
    return os.listdir(folder) if folder.exists() else []


async def test_an_agent_at_an_environments_shell_mends_the_bugs_and_every_action_earns_its_part(
    sandboxed: Settings, provider: SandboxProvider
) -> None:
    async with ScriptedModelServer(mends) as server:
        settings = with_model(sandboxed, server.base_url)
        settings = settings.model_copy(update={"store": settings.store.model_copy(update={"publish_interval_s": 0.2})})
        async with pipeline(settings), projecting(settings):
            await publish(settings, task(settings))
            (scored,) = await terminal(settings, 1)
            released = await until_nothing_is_left(settings, provider)
            await eventually(
                settings, "SELECT step, reward FROM step_rewards ORDER BY step", (0, 0.0), (1, 0.5), (2, 0.5), (3, 0.0)
            )
    assert (scored.reward, scored.status, scored.try_) == (1.0, "completed", 0)
    assert [step.reward for step in scored.steps] == [0.0, 0.5, 0.5, 0.0]
    assert scored.reward_components == {"terminal": 1.0, "steps": 1.0}
    (ready,) = await read_events(settings, SessionReady)
    assert ready.placement == "env_sandboxed"
    rewarded = await read_events(settings, StepRewarded)
    assert [(event.index, event.reward, event.components) for event in rewarded] == [
        (0, 0.0, {"tests": 0.0}), (1, 0.5, {"tests": 1.0}), (2, 0.5, {"tests": 2.0}), (3, 0.0, {"tests": 2.0}),
    ]  # fmt: skip
    assert "def twice(a):" in results(server.requests[1])[0]
    assert [event.how for event in released] == ["closed"]
    assert journals(settings) == []


async def test_a_worker_that_is_killed_while_the_agent_thinks_costs_no_more_than_its_box(
    sandboxed: Settings, provider: SandboxProvider, tmp_path: Path
) -> None:
    script = Waits()
    async with ScriptedModelServer(script) as server:
        settings = with_model(outlasting_a_death(sandboxed), server.base_url, timeout_s=120)
        fleet = Fleet(environment_of(settings), tmp_path / "logs")
        try:
            fleet.start("env_worker", "services", "env_worker")
            await fleet.ready("env_worker")
            async with pipeline(settings, REST):
                await publish(settings, task(settings))
                await until_mended(settings)
                fleet.kill("env_worker")
                script.let_go.set()
                fleet.start("env_worker", "services", "env_worker")
                (scored,) = await terminal(settings, 1, DEADLINE_S)
                await until_nothing_is_left(settings, provider)
        finally:
            await fleet.stop()
    assert (scored.reward, scored.status) == (1.0, "completed")
    assert [step.reward for step in scored.steps] == [0.0, 0.5, 0.5, 0.0]
    boxes = {event.sandbox for event in await read_events(settings, SandboxLeased)}
    # A container is found again; a box of namespaces has died with its worker, and the attempt is tried again.
    assert (scored.try_, len(boxes)) == ((0, 1) if settings.sandboxes.provider == "docker" else (1, 2))
    assert results(server.requests[-1])[1] == "x\n[exit code 0]"
    assert journals(settings) == [] or settings.sandboxes.provider == "bubblewrap"


async def test_a_worker_that_is_killed_in_the_middle_of_a_command_has_it_done_at_most_once(
    sandboxed: Settings, provider: SandboxProvider, tmp_path: Path
) -> None:
    def script(request: Request) -> Reply:
        if "mended" in str(request.body["messages"]) or killed.is_set():
            return SCRIPT[len(results(request))]
        return SCRIPT[0] if not results(request) else bash("echo mended; sleep 20")

    killed = asyncio.Event()
    async with ScriptedModelServer(script) as server:
        settings = with_model(outlasting_a_death(sandboxed), server.base_url, timeout_s=120)
        fleet = Fleet(environment_of(settings), tmp_path / "logs")
        try:
            fleet.start("env_worker", "services", "env_worker")
            await fleet.ready("env_worker")
            async with pipeline(settings, REST):
                await publish(settings, task(settings))
                async with asyncio.timeout(DEADLINE_S):
                    while not any("begun" in line for line in journal_lines(settings, 2)):
                        await asyncio.sleep(0.05)
                fleet.kill("env_worker")
                killed.set()
                fleet.start("env_worker", "services", "env_worker")
                (scored,) = await terminal(settings, 1, DEADLINE_S)
                await until_nothing_is_left(settings, provider)
        finally:
            await fleet.stop()
    assert (scored.reward, scored.try_) == (1.0, 1)
    (failed,) = [event.failure for event in await read_events(settings, ObservationReturned) if event.failure]
    assert failed.kind == ("action_unknown" if settings.sandboxes.provider == "docker" else "world_elsewhere")


async def test_an_action_that_is_delivered_again_is_carried_out_once(sandboxed: Settings, provider: SandboxProvider) -> None:
    script = Waits()
    async with ScriptedModelServer(script) as server:
        settings = with_model(sandboxed, server.base_url, timeout_s=120)
        async with pipeline(settings):
            await publish(settings, task(settings))
            await until_mended(settings)
            await publish(settings, *await read_events(settings, ActionRequested))
            await asyncio.sleep(1)
            script.let_go.set()
            (scored,) = await terminal(settings, 1, DEADLINE_S)
            await until_nothing_is_left(settings, provider)
    assert (scored.reward, scored.try_) == (1.0, 0)
    assert results(server.requests[-1])[1] == "x\n[exit code 0]"
    assert [step.reward for step in scored.steps] == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("ending", ["model fails", "agent's time is over", "run is cancelled", "agent gives up"])
async def test_however_a_session_ends_its_box_is_gone(sandboxed: Settings, provider: SandboxProvider, ending: str) -> None:
    then: Reply = {"model fails": Status(401), "agent gives up": Text("No.")}.get(ending, Hang())
    async with ScriptedModelServer(Waits(then)) as server:
        settings = with_model(sandboxed, server.base_url, timeout_s=120, max_retries=0)
        limits = settings.limits.model_copy(update={"agent_timeout_seconds": 8.0 if "time" in ending else 100.0})
        settings = settings.model_copy(update={"limits": limits})
        async with pipeline(settings):
            submitted = task(settings)
            await publish(settings, submitted.model_copy(update={"limits": limits.for_episode()}))
            await until_mended(settings)
            if "cancelled" in ending:
                await command(settings, "cancel", "r")
            (scored,) = await terminal(settings, 1, DEADLINE_S)
            released = await until_nothing_is_left(settings, provider)
    assert {event.how for event in released} == {"closed"}
    expected = {"model fails": "errored", "run is cancelled": "cancelled", "agent gives up": "completed"}
    assert scored.status == expected.get(ending, scored.status)
    if ending == "agent gives up":
        assert scored.reward == 0.5


async def test_a_lease_is_renewed_while_the_agent_thinks_longer_than_it_lasts(
    sandboxed: Settings, provider: SandboxProvider
) -> None:
    script = Waits()
    async with ScriptedModelServer(script) as server:
        settings = with_model(leased_for(sandboxed, 6.0), server.base_url, timeout_s=120)
        async with pipeline(settings):
            await publish(settings, task(settings))
            await until_mended(settings)
            await asyncio.sleep(2 * settings.sandboxes.lease_seconds)
            script.let_go.set()
            (scored,) = await terminal(settings, 1, DEADLINE_S)
    assert (scored.reward, scored.try_) == (1.0, 0)
    assert max(event.renewal for event in await read_events(settings, SandboxLeased)) >= 2


def environment_of(settings: Settings) -> dict[str, str]:
    """What a worker process is told."""
    sections = ("kafka", "sandboxes", "plugins", "retries", "models")
    return os.environ | {
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers or "",
        "ROLLSTREAM_DATA_DIR": str(settings.data_dir),
        **{f"ROLLSTREAM_{name.upper()}": section_json(settings, name) for name in sections},
    }


def section_json(settings: Settings, name: str) -> str:
    dumped = settings.model_dump(mode="json", exclude_none=True, include={name})[name]
    return json.dumps(dumped)


def journal_lines(settings: Settings, number: int) -> list[str]:
    """The last line of each journal that has at least `number` actions."""
    lines = [path.read_text().splitlines() for path in (settings.data_dir / "journals").glob("*.journal")]
    return [found[-1] for found in lines if sum('"begun"' in line for line in found) >= number]
