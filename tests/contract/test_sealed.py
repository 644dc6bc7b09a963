"""Grading data reaches the verifier inside a sealed ticket, and reaches nobody else: no agent, no header, no other session."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from rollstream.blobs import BlobStore
from rollstream.environments.tickets import Tickets
from rollstream.eventlog.failures import Boundary, Settler, TaskFailure
from rollstream.eventlog.reading import Record
from rollstream.eventlog.retries import policy_of
from rollstream.models.openai import ModelPool
from rollstream.sealing import Sealer, TicketRefused
from rollstream.settings import Defaults, Limits, ModelSettings, RetrySettings, Settings
from rollstream.testing.model_server import ScriptedModelServer, always
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted
from schemas.rollout import RolloutScored
from schemas.session import SessionReady
from schemas.step import AgentStepped
from schemas.task import TaskSubmitted
from schemas.values import JsonObject
from schemas.verdict import VerdictReached
from services.agent_worker.handler import PlayHandler
from services.agent_worker.pauses import Pauses
from services.env_worker.handler import SeedHandler
from services.verifier_worker.handler import VerifyHandler
from tests.controls import unheard
from tests.events import START

KEY, OLD_KEY, FOREIGN_KEY = b"k" * 32, b"o" * 32, b"f" * 32
CANARY = "canary-73591"
CANARY_NUMBER = 73591
ROWS = {
    "math": {"question": "How many?", "answer": f"... so many.\n#### {CANARY_NUMBER}", "id": "m1", "rationale": CANARY},
    "math, as NeMo Gym has it": {
        "responses_create_params": {"input": [{"role": "user", "content": "How many?"}]},
        "verifier_metadata": {"expected_answer": str(CANARY_NUMBER), "note": CANARY},
        "agent_ref": {"name": "math_simple_agent"},
        "unheard_of": {"deep": [CANARY]},
    },
    "multiple_choice": {
        "question": "Which?",
        "options": [{"A": "One"}, {"B": "Two"}],
        "expected_answer": "B",
        "explanation": CANARY,
        "metadata": {"source": CANARY, "number": CANARY_NUMBER},
    },
}
CASES = pytest.mark.parametrize("case", ROWS)


ENV = Settler(Boundary("env_worker", "seed"), policy_of(RetrySettings()), 100)
R = TypeVar("R")


class Published:
    """A `Publisher` on a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def publish(self, events: Iterable[Event]) -> None:
        self.events += events


class NoGraders:
    """`Graders` that are never asked: the tests hand in what needs none, or do not verify."""

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        raise AssertionError("a grader was asked")


def tickets(*keys: bytes) -> Tickets:
    """Tickets short enough to need no blobs."""
    return Tickets(Sealer(keys), BlobStore("memory://"), 1_000_000)


def settings_for(case: str) -> Settings:
    environment = case.split(",")[0]
    return Settings(defaults=Defaults(environment=environment, agent_ref={"math_simple_agent": "math"}, run="r", attempts=2))


def record(row: object) -> Record:
    return Record("tasks.in", 0, 0, round(START.timestamp() * 1000), None, json.dumps(row).encode(), ())


async def seeded(case: str, keys: tuple[bytes, ...] = (KEY,)) -> list[SessionReady]:
    published = Published()
    await SeedHandler(settings_for(case), tickets(*keys), published, unheard()).seed(record(ROWS[case]))
    return [event for event in published.events if isinstance(event, SessionReady)]


async def played(descriptor: SessionReady) -> list[Event]:
    async with ScriptedModelServer(always("I do not know.")) as server:
        models = ModelPool(Settings(models={"default": ModelSettings(base_url=server.base_url)}))
        published = Published()
        await PlayHandler(models, published, Pauses(unheard(), published, "test"), "agent_worker@test:1", 5).play(descriptor)
        await models.close()
    return published.events


def verifier(published: Published, *keys: bytes) -> VerifyHandler:
    models = ModelPool(Settings())
    return VerifyHandler(Limits(), tickets(*keys), NoGraders(), models, published, "verifier_worker@test:1")


def assert_clean(events: Iterable[Event]) -> None:
    """No canary anywhere that the agent side or a bystander could read."""
    for event in events:
        seen = event.to_json() + event.key() + b"".join(name.encode() + value for name, value in event.headers())
        for canary in (CANARY, str(CANARY_NUMBER)):
            assert canary.encode() not in seen, f"{event.kind} shows {canary}"


# What the agent side sees.


@CASES
async def test_grading_data_is_in_nothing_that_the_agent_side_reads_or_writes(case: str) -> None:
    sessions = await seeded(case)
    assert len(sessions) == 2
    events = await played(sessions[0])
    assert [type(event) for event in events] == [AgentStepped, EpisodeCompleted]
    assert_clean([*sessions, *events])


@CASES
async def test_the_ticket_holds_the_whole_row_and_travels_unopened(case: str) -> None:
    session, _ = await seeded(case)
    episode = (await played(session))[-1]
    assert isinstance(episode, EpisodeCompleted)
    assert episode.ticket == session.ticket
    assert CANARY in json.dumps(await tickets(KEY).open_task(episode.ticket, episode.session))


PATCH = f"--- a/lib.py\n+++ b/lib.py\n@@ -1 +1 @@\n-x\n+{CANARY}\n"
REPAIRS: dict[str, JsonObject] = {
    "code_repair": {
        "instruction": "Mend it.",
        "archive": f"blob.{'0' * 64}.10240",
        "base": "0" * 40,
        "tests": {f"tests/test_{CANARY}.py": CANARY},
        "patch": PATCH,
        "fail_to_pass": [CANARY],
        "pass_to_pass": [CANARY],
        "test_command": f"pytest {CANARY}",
        "protected": [CANARY],
    },
    "swe_bench": {
        "instance_id": "us__shapes-1",
        "repo": "us/shapes",
        "base_commit": "0" * 40,
        "problem_statement": "Mend it.",
        "hints_text": CANARY,
        "patch": PATCH,
        "test_patch": PATCH,
        "FAIL_TO_PASS": [CANARY],
        "PASS_TO_PASS": [CANARY],
        "eval_script": f"pytest {CANARY}",
    },
}


@pytest.mark.parametrize("case", REPAIRS)
async def test_a_box_is_described_without_what_grades(case: str) -> None:
    published = Published()
    settings = settings_for(case)
    settings = settings.model_copy(update={"defaults": settings.defaults.model_copy(update={"harness": "noop"})})
    await SeedHandler(settings, tickets(KEY), published, unheard()).seed(record(REPAIRS[case]))
    sessions = [event for event in published.events if isinstance(event, SessionReady)]
    assert [(one.placement, one.sandbox is None, one.workspace is None) for one in sessions] == [
        ("agent_in_env", False, False)
    ] * 2
    assert_clean(published.events)
    assert CANARY in json.dumps(await tickets(KEY).open_task(sessions[0].ticket, sessions[0].session))


async def test_every_attempt_has_a_ticket_of_its_own() -> None:
    one, two = await seeded("math")
    assert one.ticket != two.ticket


@pytest.mark.parametrize(
    ("case", "row"),
    [
        ("math", {"answer": CANARY, "solution": CANARY}),
        ("math", {"question": 7, "answer": CANARY}),
        ("math", {"question": "How many?", "answer": [CANARY]}),
        ("math", {"question": "How many?", "answer": {"value": CANARY_NUMBER}}),
        ("multiple_choice", {"question": "Which?", "options": ["One", "Two"], "expected_answer": CANARY}),
        ("multiple_choice", {"question": "Which?", "options": CANARY, "expected_answer": CANARY}),
        ("multiple_choice", {"question": "Which?", "options": ["One", "Two"], "answer": CANARY_NUMBER}),
        ("code_repair", {"instruction": "Mend it.", "image": "x:1", "tests": {f"../{CANARY}": CANARY}}),
        ("code_repair", {"instruction": "Mend it.", "image": "x:1", "patch": CANARY}),
        ("code_repair", {"instruction": "Mend it.", "repo": "here", "patch": CANARY, "tests": CANARY}),
        ("code_repair", {"instruction": "Mend it.", "image": "x:1", "log_parser": CANARY, "fail_to_pass": CANARY}),
    ],
)
async def test_a_task_that_is_refused_shows_no_grading_data_in_what_is_said_of_it(case: str, row: JsonObject) -> None:
    published = Published()
    with pytest.raises(TaskFailure) as caught:
        await SeedHandler(settings_for(case), tickets(KEY), published, unheard()).seed(record(row))
    assert_clean(
        event for event in ENV.settle(record(row), caught.value, (TaskSubmitted,), START) if isinstance(event, RolloutScored)
    )
    assert published.events == []


@pytest.mark.parametrize("module", ["services.agent_worker.app", "services.agent_worker.handler"])
def test_the_agent_worker_imports_neither_environments_nor_the_key(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(name for name in sys.modules if name.startswith('rollstream.')))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert "rollstream.models.openai" in loaded
    forbidden = ("rollstream.environments", "rollstream.sealing", "rollstream.testing", "rollstream.cli", "rollstream.store")
    assert [name for name in loaded if name.startswith(forbidden)] == []


# What the verifier accepts.


async def episode_of(session: SessionReady) -> EpisodeCompleted:
    episode = (await played(session))[-1]
    assert isinstance(episode, EpisodeCompleted)
    return episode


@pytest.mark.parametrize("change", ["another session", "altered", "foreign key", "cut short"])
async def test_a_ticket_that_is_not_this_sessions_own_is_refused_and_nothing_is_scored(change: str) -> None:
    session, other = await seeded("multiple_choice")
    ticket = {
        "another session": other.ticket,
        "altered": session.ticket[:-6] + ("A" if session.ticket[-6] != "A" else "B") + session.ticket[-5:],
        "foreign key": (await seeded("multiple_choice", (FOREIGN_KEY,)))[0].ticket,
        "cut short": session.ticket[: len(session.ticket) // 2],
    }[change]
    episode = (await episode_of(session)).model_copy(update={"ticket": ticket})
    published = Published()
    with pytest.raises(TicketRefused) as caught:
        await verifier(published, KEY).verify(episode)
    assert published.events == []
    assert caught.value.retryable is False
    if change == "foreign key":
        assert "give every worker the same ROLLSTREAM_SEALING_KEY" in str(caught.value)


async def test_after_a_rotation_a_ticket_sealed_with_the_old_key_is_still_verified() -> None:
    session, _ = await seeded("multiple_choice", (OLD_KEY,))
    published = Published()
    await verifier(published, KEY, OLD_KEY).verify(await episode_of(session))
    verdict = published.events[0]
    assert isinstance(verdict, VerdictReached)
    assert verdict.reward == 0.0


async def test_a_verdict_repeats_no_more_of_the_row_than_what_was_compared() -> None:
    session, _ = await seeded("multiple_choice")
    published = Published()
    await verifier(published, KEY).verify(await episode_of(session))
    assert [event.kind for event in published.events] == ["VerdictReached", "RolloutScored"]
    assert_clean(published.events)
