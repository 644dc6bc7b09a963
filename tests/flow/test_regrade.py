"""Verifying what agents handed in once more: rewards change, agents do not run, and the log says all of it."""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollstream.environments import registry
from rollstream.settings import RetrySettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, always
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.task import TaskSubmitted
from schemas.verdict import VerdictReached
from tests.environments import load_anew
from tests.events import run_published
from tests.flow.commands import command, until_nothing_is_open
from tests.flow.flows import PIPELINE, pipeline, publish, read_events, terminal, with_model
from tests.flow.test_spine import task
from tests.stores import answer

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(240)]

FOUR = always(r"\boxed{4}")
NEVER_AGAIN = RetrySettings(agent_attempts=1, verification_attempts=1)

PLUGIN = '''
from pathlib import Path

from rollstream.environments.math import MathEnvironment
from rollstream.environments.protocol import Verdict
from rollstream.errors import EnvironmentFailure


class GradedEnvironment(MathEnvironment):
    """`math` by version 1, the opposite by version 2, and no verdict at all by version `broken`."""

    name = "graded"
    version = Path(__file__).with_name("version.txt").read_text()

    async def verify(self, task, episode, services):
        if self.version == "broken":
            raise EnvironmentFailure("the grader cannot be reached", stage="verification", retryable=False)
        verdict = await super().verify(task, episode, services)
        return verdict if self.version == "1" else Verdict(reward=1.0 - verdict.reward)
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a version of the environment `graded`, as a plug-in for commands and in the workers of this process."""
    folder = tmp_path / "plugin"
    (folder / "graded-1.dist-info").mkdir(parents=True)
    (folder / "graded.py").write_text(PLUGIN)
    (folder / "graded-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: graded\nVersion: 1\n")
    (folder / "graded-1.dist-info" / "entry_points.txt").write_text(
        "[rollstream.environments]\ngraded = graded:GradedEnvironment\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def install(version: str, *, workers: bool = True) -> None:
        (folder / "version.txt").write_text(version)
        if workers:
            spec = importlib.util.spec_from_file_location("graded", folder / "graded.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            registry.ENVIRONMENTS["graded"] = module.GradedEnvironment
            load_anew()

    yield install
    registry.ENVIRONMENTS.pop("graded", None)
    load_anew()


def tasks(count: int, attempts: int = 1) -> list[TaskSubmitted]:
    """One is right with 4, all others are wrong."""
    return [task(f"{number} + 2", str(number + 2), attempts=attempts, environment="graded") for number in range(2, 2 + count)]


def served(settings: Settings, server: ScriptedModelServer, retries: RetrySettings = NEVER_AGAIN) -> Settings:
    return with_model(settings, server.base_url, max_retries=0, timeout_s=60).model_copy(update={"retries": retries})


async def records(settings: Settings) -> Counter[tuple[int, str, float | None, str | None]]:
    found = await read_events(settings, RolloutScored)
    return Counter((record.revision, record.status, record.reward, record.versions.environment) for record in found)


async def test_a_new_version_of_the_grading_changes_rewards_without_running_an_agent(
    settings: Settings, install: Callable[..., None]
) -> None:
    install("1")
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        settings = settings.model_copy(update={"store": settings.store.model_copy(update={"publish_interval_s": 0.3})})
        async with pipeline(settings, [*PIPELINE, "store_worker"]):
            await publish(settings, run_published("r", groups=3, attempts=2, environment="graded"), *tasks(3, attempts=2))
            await terminal(settings, 6)
            same = await command(settings, "regrade", "r")
            install("2")
            refused = await command(settings, "regrade", "r", "--environment-version", "3")
            regraded = await command(settings, "regrade", "r", "--environment-version", "2", "--wait", "--timeout", "60")
            again = await command(settings, "regrade", "r", "--wait")
            async with asyncio.timeout(30):
                while answer(settings.data_dir, "SELECT count(*) FROM rollouts WHERE revision = 1") != [(6,)]:
                    await asyncio.sleep(0.1)
            reported = await command(settings, "report", "r")
            one = await command(settings, "regrade", "r", "--where", "reward = 0", "--force", "--wait")
        assert len(server.requests) == 6
    assert same.out == "6 have a verdict of graded 1 already; --force verifies them all the same\n"
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "expected environment graded in version 3, found 2 installed here" in refused.err
    assert regraded.code == 0, regraded.said
    assert "run r: 6 attempts are verified again by graded 2, as revision 1" in regraded.out
    assert "verified again: 4 with a higher reward, 2 with a lower reward" in regraded.out
    assert again.out == "6 have a verdict of graded 2 already; --force verifies them all the same\n"
    assert "run r: 2 attempts are verified again by graded 2, as revision 2" in one.out, one.said
    assert await records(settings) == {
        (0, "completed", 1.0, "1"): 2,
        (0, "completed", 0.0, "1"): 4,
        (1, "completed", 0.0, "2"): 2,
        (1, "completed", 1.0, "2"): 4,
        (2, "completed", 0.0, "2"): 2,
    }
    assert Counter(verdict.revision for verdict in await read_events(settings, VerdictReached)) == {0: 6, 1: 6, 2: 2}
    assert "verdicts of graded that count: revision 1 (version 2) of 6 attempts" in reported.out
    assert "0.6667" in reported.out
    regrades = (
        "SELECT revision, reward_before, reward, waiting, count(*) FROM regrades WHERE revision = 1 GROUP BY ALL ORDER BY ALL"
    )
    assert answer(settings.data_dir, regrades) == [(1, 0.0, 1.0, False, 4), (1, 1.0, 0.0, False, 2)]
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said
    assert "clean: each of 6 attempts has exactly one terminal record that counts" in audited.out


async def test_a_regrade_that_was_interrupted_is_completed_and_nothing_is_asked_for_twice(
    settings: Settings, install: Callable[..., None]
) -> None:
    install("1")
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, *tasks(4))
            await terminal(settings, 4)
        install("2")
        first, second = await command(settings, "regrade", "r"), await command(settings, "regrade", "r")
        forced = await command(settings, "regrade", "r", "--force")
        asked = await read_events(settings, RetryScheduled)
        waited = await command(settings, "regrade", "r", "--wait", "--timeout", "6")
        async with pipeline(settings):
            await terminal(settings, 8)
        assert len(server.requests) == 4
    assert "4 attempts are verified again by graded 2, as revision 1" in first.out
    assert second.out == forced.out == "4 were asked for before, and are under way\n"
    assert len(asked) == len({retry.event_id for retry in asked}) == 4
    assert {(retry.cause.kind, retry.revision, retry.environment_version) for retry in asked} == {("regrade", 1, "2")}
    assert waited.code == 1
    assert "note: nobody verifies: start a verifier_worker (`rollstream up`)" in waited.err
    assert "run r: 4 attempts are not verified again after 6 s" in waited.err
    assert await records(settings) == {
        (0, "completed", 1.0, "1"): 1,
        (0, "completed", 0.0, "1"): 3,
        (1, "completed", 0.0, "2"): 1,
        (1, "completed", 1.0, "2"): 3,
    }


async def test_cancelling_during_a_regrade_keeps_every_verdict_and_it_can_be_asked_for_again(
    settings: Settings, install: Callable[..., None]
) -> None:
    install("1")
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, run_published("r", groups=3, environment="graded"), *tasks(3))
            await terminal(settings, 3)
        install("2")
        await command(settings, "regrade", "r")
        await command(settings, "cancel", "r")
        refused = await command(settings, "regrade", "r")
        async with pipeline(settings):
            await until_nothing_is_open(settings)
            kept = await records(settings)
            audited = await command(settings, "audit", "r")
            await command(settings, "resume", "r")
            again = await command(settings, "regrade", "r", "--wait", "--timeout", "60")
        assert len(server.requests) == 3
    assert (refused.code, "run r is cancelled" in refused.err) == (2, True)
    assert kept == {(0, "completed", 1.0, "1"): 1, (0, "completed", 0.0, "1"): 2}
    assert audited.code == 0, audited.said
    assert "3 attempts are verified again by graded 2, as revision 1" in again.out, again.said
    assert sum((await records(settings)).values()) == 6


async def test_what_could_not_be_verified_is_errored_in_its_revision_and_can_be_regraded(
    settings: Settings, install: Callable[..., None]
) -> None:
    install("1")
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, *tasks(2))
            await terminal(settings, 2)
            install("broken")
            broken = await command(settings, "regrade", "r", "--wait", "--timeout", "60")
            after = await records(settings)
            install("2")
            mended = await command(settings, "regrade", "r", "--wait", "--timeout", "60")
        assert len(server.requests) == 2
    assert broken.code == 1
    assert "verified again: 2 could not be scored" in broken.out
    assert after[1, "errored", None, None] == 2
    assert mended.code == 0, mended.said
    assert "as revision 2" in mended.out
    assert "verified again: 2 scored for the first time" in mended.out
    assert (await command(settings, "audit", "r")).code == 0


async def test_a_verification_that_failed_at_first_is_made_up_for(settings: Settings, install: Callable[..., None]) -> None:
    install("broken")
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, *tasks(1))
            (failed,) = await terminal(settings, 1)
            install("1")
            regraded = await command(settings, "regrade", "r", "--wait", "--timeout", "60")
        assert len(server.requests) == 1
    assert failed.status == "errored"
    assert "verified again: 1 scored for the first time" in regraded.out, regraded.said
    assert (await records(settings))[1, "completed", 1.0, "1"] == 1


async def test_a_worker_with_another_version_gives_no_verdict(settings: Settings, install: Callable[..., None]) -> None:
    install("1")
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, *tasks(1))
            await terminal(settings, 1)
            install("2", workers=False)
            regraded = await command(settings, "regrade", "r", "--wait", "--timeout", "60")
    assert regraded.code == 1
    (failed,) = [record for record in await read_events(settings, RolloutScored) if record.revision == 1]
    assert failed.error is not None
    assert failed.error.kind == "environment_version"
    assert "expected environment graded in version 2, found 1 in verifier_worker@" in failed.error.message


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nope"], "no run is named 'nope'"),
        (["r", "--environment", "math"], "run r has no environment 'math'; it has graded"),
        (["r"], "nothing to regrade in run r: 2 have not ended"),
    ],
)
async def test_what_cannot_be_regraded_is_told_in_one_line(
    settings: Settings, install: Callable[..., None], words: list[str], sentence: str
) -> None:
    install("1")
    await publish(settings, *tasks(2))
    refused = await command(settings, "regrade", *words)
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused.said
    assert sentence in refused.err
