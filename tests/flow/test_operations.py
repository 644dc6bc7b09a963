"""What people do to runs while they go on: audit, repair, cancel, resume, and dead letters."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from rollstream.cli.progress import Snapshot
from rollstream.cli.watch import follow
from rollstream.environments import registry
from rollstream.environments.math import MathEnvironment, MathTask
from rollstream.environments.protocol import Episode, Services, Verdict
from rollstream.eventlog.producer import EventProducer
from rollstream.settings import RetrySettings, Settings
from rollstream.testing.model_server import Hang, Reply, Request, ScriptedModelServer, Status, always
from schemas.envelope import Headers
from schemas.failure import DeadLettered, DeadLetterSettled, ErrorInfo
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored, terminal_event_id
from schemas.run import RunCancelled, RunPaused, RunResumed
from schemas.session import SessionReady
from schemas.task import TaskSubmitted
from tests.events import Attempt, run_published
from tests.flow.commands import command, commit, until_nothing_is_open
from tests.flow.flows import pipeline, publish, publish_bare, read_events, terminal, with_model
from tests.flow.test_spine import task
from topics.catalogue import SESSIONS_READY, TASKS_IN

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("topics"), pytest.mark.timeout(240)]

FOUR = always(r"\boxed{4}")
NEVER_AGAIN = RetrySettings(agent_attempts=1, verification_attempts=1)


def tasks(count: int, attempts: int = 1, **changes: str) -> list[TaskSubmitted]:
    return [task(f"{number} + 2", "4", attempts=attempts, **changes) for number in range(count)]


def served(settings: Settings, server: ScriptedModelServer, retries: RetrySettings = NEVER_AGAIN) -> Settings:
    return with_model(settings, server.base_url, max_retries=0, timeout_s=300).model_copy(update={"retries": retries})


async def records(settings: Settings, status: str = "", round_: int | None = None) -> list[RolloutScored]:
    """Terminal records in the log now, chosen by status and round."""
    found = await read_events(settings, RolloutScored)
    return [record for record in found if status in ("", record.status) and round_ in (None, record.round)]


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)


# Audit.


async def test_a_healthy_run_is_proved_clean_from_the_log_alone(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, run_published("r", groups=3, attempts=2), *tasks(3, attempts=2))
            await terminal(settings, 6)
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said
    assert "clean: each of 6 attempts has exactly one terminal record that counts" in audited.out
    found = json.loads((await command(settings, "audit", "r", "--json")).out)
    assert (found["clean"], found["attempts"], found["counting"]) == (True, 6, {"completed": 6})


async def test_a_doctored_log_is_found_out_with_every_finding_named(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, run_published("r", groups=3), *tasks(2))
            first, _ = await terminal(settings, 2)
        other = Attempt(task("nobody published this", "4"))
        rival = first.model_copy(update={"session": "another", "event_id": terminal_event_id("another"), "try_": 7})
        await publish(settings, rival, first, other.failed())
    audited = await command(settings, "audit", "r")
    assert audited.code == 1
    assert "1 groups were promised and never published" in audited.out
    assert f"ended twice: rollout {first.rollout}" in audited.out
    assert f"rollout {other.rollout}" in audited.out
    assert audited.out.splitlines()[-1] == "not clean"
    found = json.loads((await command(settings, "audit", "r", "--json")).out)
    assert (found["missing_groups"], len(found["double"]), len(found["strays"]), found["repeated"]) == (1, 1, 1, 1)


async def test_what_a_worker_still_has_before_it_is_late_and_not_lost(settings: Settings) -> None:
    async with pipeline(settings, ["env_worker"]):
        await publish(settings, *tasks(3))
        await until_sessions(settings, 3)
    audited = await command(settings, "audit", "r", "--repair")
    assert audited.code == 1
    assert "not finished: workers still have every attempt before them" in audited.out
    assert "nothing to repair: 3 attempts have not ended" in audited.err
    assert await read_events(settings, RetryScheduled) == []


async def until_sessions(settings: Settings, count: int) -> None:
    async with asyncio.timeout(30):
        while len(await read_events(settings, SessionReady)) < count:
            await asyncio.sleep(0.1)


async def test_what_was_lost_after_its_seeding_is_driven_again_from_its_session(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings, ["env_worker"]):
            await publish(settings, *tasks(4))
            await until_sessions(settings, 4)
        await commit(settings, "agent_worker", SESSIONS_READY, at_end=True)
        lost = await command(settings, "audit", "r", "--repair")
        assert lost.code == 1
        assert "driven again: 4 from their sessions, 0 from their tasks" in lost.err
        async with pipeline(settings):
            scored = await terminal(settings, 4)
        assert len(server.requests) == 4
    assert {(record.round, record.try_, record.status) for record in scored} == {(0, 1, "completed")}
    assert (await command(settings, "audit", "r")).code == 0


async def test_what_was_lost_before_its_seeding_is_driven_again_from_its_task_and_nothing_finished_is(
    settings: Settings,
) -> None:
    lost = task("2 + 2", "4", attempts=3)
    error = ErrorInfo(kind="k", stage="seed", message="m", retryable=False)
    (ended,) = [ids for ids in lost.sessions() if ids.group.index == 1]
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, lost, RolloutScored.of_failure(ended, error, lost.occurred_at))
        await publish_bare(settings, {"question": "1 + 3", "answer": "4", "run": "bare", "environment": "math"})
        await commit(settings, "env_worker", TASKS_IN, at_end=True)
        for run, count in (("r", 2), ("bare", 1)):
            repaired = await command(settings, "audit", run, "--repair")
            assert f"driven again: 0 from their sessions, {count} from their tasks" in repaired.err, repaired.said
        async with pipeline(settings):
            scored = await terminal(settings, 4)
        assert len(server.requests) == 3
    assert sorted((record.run, record.group.index, record.status) for record in scored) == [
        ("bare", 0, "completed"),
        ("r", 0, "completed"),
        ("r", 1, "errored"),
        ("r", 2, "completed"),
    ]
    for run in ("r", "bare"):
        audited = await command(settings, "audit", run)
        assert audited.code == 0, audited.said


async def test_a_run_that_nobody_knows_is_told_in_one_line(settings: Settings) -> None:
    await publish(settings, run_published("nightly"))
    for name in ("audit", "cancel", "resume"):
        done = await command(settings, name, "nigthly")
        assert (done.code, done.out) == (2, "")
        assert done.err == "error: no run is named 'nigthly'; recent runs: nightly\n"


# Cancel.


async def test_a_run_with_a_backlog_of_thousands_ends_within_seconds(settings: Settings) -> None:
    def script(request: Request) -> Reply:
        return Hang() if "wait" in request.last_text else FOUR(request)

    async with ScriptedModelServer(script) as server:
        settings = served(settings, server)
        limits = settings.limits.model_copy(update={"max_concurrent_episodes": 8})
        settings = settings.model_copy(update={"limits": limits})
        ended, endless = tasks(5), [task(f"wait {number}", "4") for number in range(3_000)]
        async with pipeline(settings):
            await publish(settings, *ended)
            await terminal(settings, 5)
            await publish(settings, *endless)
            await server.wait_for_requests(5 + 8)
            begun = time.monotonic()
            cancelled = await command(settings, "cancel", "r")
            took_s = time.monotonic() - begun
            assert cancelled.code == 0, cancelled.said
            assert "3000 of 3005 attempts had not ended, and are recorded as cancelled" in cancelled.out
            assert Counter(record.status for record in await records(settings)) == {"completed": 5, "cancelled": 3_000}
            await publish(settings, task("2 + 2", "4", run="other"))
            async with asyncio.timeout(30):
                while not [record for record in await records(settings) if record.run == "other"]:
                    await asyncio.sleep(0.1)
            await until_nothing_is_open(settings)
        # A lane that frees itself while the cancellation is on its way takes another episode.
        assert len(server.requests) <= 5 + 8 + 8 + 1
    assert took_s < 20
    again = await command(settings, "cancel", "r")
    assert "all 3005 attempts had ended before" in again.out
    assert len(await records(settings)) == 3_006
    assert len(await read_events(settings, RunCancelled)) == 1
    audited = await command(settings, "audit", "r")
    assert audited.code == 0, audited.said
    one = next(iter(await records(settings, "cancelled")))
    assert (one.reward, one.success, one.mask.loss, one.mask.baseline) == (None, None, True, True)


async def test_a_cancelled_attempt_stays_so_until_somebody_asks_for_another_round(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, *tasks(4))
        assert "4 of 4 attempts" in (await command(settings, "cancel", "r")).out
        too_soon = asyncio.create_task(command(settings, "resume", "r"))
        async with pipeline(settings):
            resumed = await too_soon
            assert resumed.code == 0, resumed.said
            assert "goes on (it was cancelled)" in resumed.out
            assert "4 attempts stay cancelled" in resumed.out
            assert len(server.requests) == 0
            again = await command(settings, "resume", "r", "--cancelled")
            assert "4 attempts are driven again in a new round, 4 of them from their tasks" in again.out
            scored = await terminal(settings, 8)
    assert Counter((record.round, record.status) for record in scored) == {(0, "cancelled"): 4, (1, "completed"): 4}
    assert (await command(settings, "audit", "r")).code == 0


async def test_a_cancelled_run_is_not_resumed_over_a_backlog_that_would_then_run(settings: Settings) -> None:
    await publish(settings, *tasks(2))
    await command(settings, "cancel", "r")
    resumed = await command(settings, "resume", "r")
    assert resumed.code == 2
    assert "workers have not yet passed what it left behind (2 records)" in resumed.err
    assert await read_events(settings, RunResumed) == []


async def test_a_resumed_attempt_that_is_cancelled_ends_in_its_new_round(settings: Settings) -> None:
    async with ScriptedModelServer(always(Status(500))) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4"))
            await terminal(settings, 1)
    await command(settings, "resume", "r")
    assert "1 of 1 attempts" in (await command(settings, "cancel", "r")).out
    assert [(record.round, record.status) for record in await records(settings)] == [(0, "errored"), (1, "cancelled")]
    assert (await command(settings, "audit", "r")).code == 0


# Resume.


async def test_errored_attempts_get_another_round_and_scored_ones_are_left_alone(settings: Settings) -> None:
    broken = True

    def script(request: Request) -> Reply:
        return Status(500) if broken and request.last_text.startswith(("0", "1")) else FOUR(request)

    async with ScriptedModelServer(script) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, *tasks(5))
            await terminal(settings, 5)
        asked, broken = len(server.requests), False
        first, second = await command(settings, "resume", "r"), await command(settings, "resume", "r")
        assert first.out == "2 attempts are driven again in a new round\n"
        assert second.out == "2 were driven again before, and are under way\n"
        async with pipeline(settings):
            scored = await terminal(settings, 7)
        assert len(server.requests) == asked + 2
    assert Counter((record.round, record.try_, record.status) for record in scored) == {
        (0, 0, "completed"): 3,
        (0, 0, "errored"): 2,
        (1, 0, "completed"): 2,
    }
    assert {(retry.cause.kind, retry.failures) for retry in await read_events(settings, RetryScheduled)} == {("resumed", 0)}
    third = await command(settings, "resume", "r")
    assert third.out == "no attempt is errored\n"
    assert (await command(settings, "audit", "r")).code == 0


class LateEnvironment(MathEnvironment):
    """`math`, installed only after its tasks were published, and with a bug in its first verdict."""

    name = "late"
    bugs = 0

    async def verify(self, task: MathTask, episode: Episode, services: Services) -> Verdict:
        if LateEnvironment.bugs > 0:
            LateEnvironment.bugs -= 1
            raise RuntimeError("a bug in the environment")
        return await super().verify(task, episode, services)


@pytest.fixture
def late() -> Iterator[Callable[[], None]]:
    def install() -> None:
        registry.ENVIRONMENTS["late"] = LateEnvironment
        registry.load.cache_clear()

    LateEnvironment.bugs = 0
    yield install
    registry.ENVIRONMENTS.pop("late", None)
    registry.load.cache_clear()


async def test_attempts_that_were_refused_before_they_had_a_session_are_resumed_from_their_task(
    settings: Settings, late: Callable[[], None]
) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4", attempts=2, environment="late"))
            refused = await terminal(settings, 2)
        late()
        assert {record.error.kind for record in refused if record.error} == {"unknown_environment"}
        resumed = await command(settings, "resume", "r")
        assert resumed.out == "2 attempts are driven again in a new round, 2 of them from their tasks\n"
        assert "2 were driven again before" in (await command(settings, "resume", "r")).out
        async with pipeline(settings):
            scored = await terminal(settings, 4)
    assert [(record.round, record.status) for record in scored[2:]] == [(1, "completed")] * 2


async def test_a_paused_run_goes_on_where_it_was(settings: Settings) -> None:
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, RunPaused.create(run="r", reason="the key is refused", cause="model_unauthorized", by="w"))
        async with pipeline(settings):
            await publish(settings, *tasks(3))
            async with asyncio.timeout(30):
                while len(await read_events(settings, RetryScheduled)) < 3:
                    await asyncio.sleep(0.1)
            assert server.requests == []
            resumed = await command(settings, "resume", "r")
            scored = await terminal(settings, 3)
    assert "run r goes on (it was paused: the key is refused)" in resumed.out
    assert {(record.status, record.round, record.reward) for record in scored} == {("completed", 0, 1.0)}


# Watching.


async def test_whoever_watches_is_told_within_seconds_that_a_run_is_paused_and_why(settings: Settings) -> None:
    assert settings.bootstrap_servers is not None
    told: list[tuple[Snapshot, Sequence[str]]] = []
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, *tasks(2))
        watching = asyncio.create_task(
            follow(str(settings.bootstrap_servers), settings, "r", lambda snapshot, lines: told.append((snapshot, lines)))
        )
        await until(lambda: bool(told))
        await publish(settings, RunPaused.create(run="r", reason="the key is refused", cause="k", by="w"))
        await until(lambda: "run r is paused: the key is refused" in told[-1][1], 5)
        async with pipeline(settings):
            await until(lambda: told[-1][0].waiting == 2)
            doctor = await command(settings, "doctor")
            await publish(settings, RunResumed.create(run="r"))
            async with asyncio.timeout(30):
                final = await watching
    assert (final.done, final.waiting) == (2, 0)
    assert "paused: the key is refused" in doctor.out
    assert "rollstream resume r" in doctor.out
    assert "2 retries waiting or under way" in doctor.out


# Dead letters.


def headers_of(record: TaskSubmitted, index: int = 0) -> Headers:
    return Attempt(record, index=index).ready().headers()


async def raw(settings: Settings, topic: str, value: bytes | None, key: bytes | None, headers: Headers) -> None:
    async with EventProducer(settings.bootstrap_servers, settings.kafka) as producer:
        await producer.publish_raw(topic, key, value, headers)


async def letters(settings: Settings, count: int) -> list[DeadLettered]:
    async with asyncio.timeout(30):
        while len(found := await read_events(settings, DeadLettered)) < count:
            await asyncio.sleep(0.1)
    return found


async def test_a_bug_is_listed_shown_and_replayed_as_another_round(settings: Settings, late: Callable[[], None]) -> None:
    late()
    LateEnvironment.bugs = 1
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        async with pipeline(settings):
            await publish(settings, task("2 + 2", "4", environment="late"))
            (failed,) = await terminal(settings, 1)
            (letter,) = await letters(settings, 1)
            listed = await command(settings, "dead-letters", "list")
            shown = await command(settings, "dead-letters", "show", "0")
            replayed = await command(settings, "dead-letters", "replay", "0")
            _, scored = await terminal(settings, 2)
    assert failed.status == "errored"
    assert letter.subject() in listed.out
    assert "RuntimeError: a bug in the environment" in listed.out
    assert "Traceback (most recent call last)" in shown.out
    assert '"kind":"EpisodeCompleted"' in shown.out
    assert f"header rollout_id: {failed.rollout}" in shown.out
    assert replayed.out == "0: 1 attempts that ended with it are driven again in a new round\n", replayed.said
    assert (scored.status, scored.round, scored.reward) == ("completed", 1, 1.0)
    assert (await command(settings, "dead-letters", "list")).out == "no dead letter waits for a decision\n"
    assert "replayed" in (await command(settings, "dead-letters", "list", "--settled")).out
    assert "has been scored since" in (await command(settings, "dead-letters", "replay", "0")).out
    assert (await command(settings, "audit", "r")).code == 0


async def test_garbage_in_place_of_a_session_is_replayed_from_the_task(settings: Settings) -> None:
    lost = task("2 + 2", "4", attempts=2)
    async with ScriptedModelServer(FOUR) as server:
        settings = served(settings, server)
        await publish(settings, lost)
        await commit(settings, "env_worker", TASKS_IN, at_end=True)
        await raw(settings, "sessions.ready", b"\xff\x00 garbage", b"k", headers_of(lost, 1))
        async with pipeline(settings):
            (failed,) = await terminal(settings, 1)
            await letters(settings, 1)
            shown = await command(settings, "dead-letters", "show", "0")
            await command(settings, "dead-letters", "replay", "--run", "r")
            _, scored = await terminal(settings, 2)
    assert (failed.group.index, failed.status) == (1, "errored")
    assert "value: hex ff 00 20 67" in shown.out
    assert (scored.group.index, scored.round, scored.status) == (1, 1, "completed")


async def test_a_record_of_nobodys_attempt_is_published_again_as_it_was_however_long(settings: Settings) -> None:
    long = b"\xff" * 300_000
    async with pipeline(settings, ["env_worker"]):
        await raw(settings, "tasks.in", long, b"the key", [("a", b"\x80"), ("a", b"2")])
        (first,) = await letters(settings, 1)
        assert first.omitted_bytes == len(long)
        replayed = await command(settings, "dead-letters", "replay", "--all")
        assert replayed.out == "0: published again on tasks.in\n"
        _, second = await letters(settings, 2)
        listed = await command(settings, "dead-letters", "list")
    assert (second.omitted_bytes, second.key(), second.original_headers) == (len(long), b"the key", first.original_headers)
    assert second.offset != first.offset or second.partition != first.partition
    assert second.subject() in listed.out
    assert first.subject() not in listed.out


async def test_what_is_discarded_is_off_the_list_and_stays_in_the_log(settings: Settings) -> None:
    async with pipeline(settings, ["env_worker"]):
        await publish_bare(settings, b"not json", b"[]")
        await letters(settings, 2)
    assert (await command(settings, "dead-letters", "discard", "0")).out == "1 discarded\n"
    assert (await command(settings, "dead-letters", "list")).out.count("tasks.in/") == 1
    assert (await command(settings, "dead-letters", "discard", "--all")).out == "1 discarded\n"
    assert (await command(settings, "dead-letters", "list")).out == "no dead letter waits for a decision\n"
    assert {event.how for event in await read_events(settings, DeadLetterSettled)} == {"discarded"}
    assert len(await read_events(settings, DeadLettered)) == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "7"], "no dead letter has the number 7"),
        (["replay"], "expected numbers of dead letters"),
        (["discard", "1", "2"], "no dead letter has the number 1, 2"),
    ],
)
async def test_a_dead_letter_that_is_not_there_is_told_in_one_line(settings: Settings, words: list[str], sentence: str) -> None:
    done = await command(settings, "dead-letters", *words)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
