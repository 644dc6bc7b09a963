"""An environment on a server: what it is asked and what not, and what every failure of it becomes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollstream.environments import registry
from rollstream.environments.http.contract import CALLS, rendered
from rollstream.environments.http.environment import HttpEnvironment, HttpTask, HttpWorld
from rollstream.environments.protocol import Environment, StepServices, TaskLimits
from rollstream.errors import BoundaryFailure, Refused, UsageError
from rollstream.eventlog.endings import Ending
from rollstream.settings import HttpEnvironmentSettings, Settings
from rollstream.testing.playing import ScriptedRoles, play, play_oracle, succeeds
from rollstream.testing.stepped import SteppedEnvironmentConformance
from schemas.action import ObservationReturned, Utterance
from schemas.session import Submission
from tests.servers import example_server
from tests.unit.test_open_sessions import Worker
from tests.unit.test_step_handler import Bench

ROOT = Path(__file__).parents[2]
LIFT = {"public_fields": ["start", "wish"]}
ROWS = [json.loads(line) for line in (ROOT / "examples" / "lift.jsonl").read_text().splitlines()]
SEED = {"messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture(scope="module")
def lift() -> Iterator[str]:
    with example_server() as url:
        yield url


def environment(url: str, **changes: object) -> HttpEnvironment:
    return HttpEnvironment("lift", HttpEnvironmentSettings.model_validate({"url": url, **LIFT, **changes}))


@contextmanager
def declared(**servers: dict[str, object]) -> Iterator[None]:
    registry.declare(Settings.model_validate({"environments": {"http": servers}}))
    try:
        yield
    finally:
        registry.declare(Settings())


class TestTheExampleServer(SteppedEnvironmentConformance):
    """The 40 lines that the documentation shows, held to what every environment promises."""

    url = ""

    @pytest.fixture(autouse=True)
    def _running(self, lift: str) -> None:
        type(self).url = lift

    def environment(self) -> Environment[Any]:
        found: Any = environment(self.url)
        return found

    def acts_on_any_world(self) -> bool:
        return True

    def fresh_environment(self) -> Environment[Any]:
        return self.environment()

    def rows(self) -> list[dict[str, object]]:
        return [{name: row[name] for name in ("start", "wish", "floor")} for row in ROWS]


def test_a_declared_server_is_an_environment_under_its_name(lift: str) -> None:
    with declared(lift={"url": lift, **LIFT}):
        found = registry.load("lift")
        assert (found.name, registry.origin("lift")) == ("lift", lift)
        for row in ROWS:
            played = asyncio.run(play_oracle(found, registry.admit(found, row)))
            assert played is not None
            assert succeeds(found, played.verdict)
    with pytest.raises(Refused):
        registry.load("lift")


def test_a_servers_name_must_be_free() -> None:
    with pytest.raises(UsageError, match="environment math needs another name"), declared(math={"url": "http://x"}):
        pass


Handler = Callable[[str, Any], Awaitable[web.Response] | web.Response]


@asynccontextmanager
async def server(answer: Handler) -> AsyncIterator[str]:
    """A server in this loop whose answer is a function of path and body."""

    async def handle(request: web.Request) -> web.Response:
        given = answer(request.path, await request.json())
        return given if isinstance(given, web.Response) else await given

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{call}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_grading_data_goes_to_verify_alone() -> None:
    asked: list[tuple[str, Any]] = []

    def answer(path: str, body: Any) -> web.Response:
        asked.append((path, body))
        answers = {"/seed": SEED, "/verify": {"reward": 0.5}}
        return web.json_response(answers.get(path, {}), status=200 if path in answers else 404)

    async with server(answer) as url:
        task = HttpTask.model_validate({"start": 1, "wish": "Up.", "floor": 3, "messages": [{"role": "user", "content": "x"}]})
        found: Any = environment(url)
        played = await asyncio.to_thread(asyncio.run, play(found, task, submission=Submission(text="done")))
    assert played.verdict.reward == 0.5
    by_path = dict(asked)
    assert by_path["/seed"]["task"] == {"start": 1, "wish": "Up.", "messages": [{"role": "user", "content": "x"}]}
    assert by_path["/verify"]["task"]["floor"] == 3
    assert by_path["/verify"]["submission"]["text"] == "done"
    assert [path for path, _ in asked] == ["/seed", "/verify", "/close"]


async def failure(answer: Handler, **changes: object) -> BoundaryFailure:
    """What a step becomes when the server answers so."""
    async with server(answer) as url:
        with pytest.raises(BoundaryFailure) as failed:
            await environment(url, **changes).step(HttpWorld(), Utterance(text="x"), StepServices(ScriptedRoles(), 0))
    return failed.value


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (500, "http_status", True),
        (503, "http_status", True),
        (429, "http_status", True),
        (408, "http_status", True),
        (400, "http_status", False),
        (401, "http_status", False),
        (404, "http_status", False),
        (302, "http_status", False),
        (201, "http_status", False),
        (422, "http_refused", False),
    ],
)
async def test_another_status_than_200_is_no_reward_and_is_tried_again_where_that_helps(
    status: int, kind: str, retryable: bool
) -> None:
    found = await failure(lambda path, body: web.json_response({"detail": "the lift is\nstuck"}, status=status))
    assert (found.kind, found.retryable) == (kind, retryable)
    assert "the lift is stuck" in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"state": 1, "observation": 5}',
        b'{"state": 1, "observation": "x", "reward": NaN}',
        b'{"state": 1, "observation": "x", "reward": "1"}',
        b'{"state": 1, "observation": "x", "done": "perhaps"}',
        b'{"state": 1, "observation": "\xff"}',
        b'{"state": 1, "observation": [{"role": "stranger"}]}',
        b"[" * 100_000,
    ],
)
async def test_an_answer_that_is_not_the_contracts_is_terminal(body: bytes) -> None:
    found = await failure(lambda path, _: web.Response(body=body))
    assert (found.kind, found.retryable) == ("http_malformed", False)
    assert "expected StepAnswer" in str(found)


async def test_an_answer_without_end_is_cut_off() -> None:
    found = await failure(lambda path, _: web.Response(body=b" " * (17 * 2**20)))
    assert (found.kind, found.retryable) == ("http_too_large", False)


async def test_a_server_that_hangs_or_is_away_is_tried_again() -> None:
    hanging = asyncio.Event()

    async def hang(path: str, body: Any) -> web.Response:
        await hanging.wait()
        return web.json_response({})

    async def release() -> None:
        async with server(hang) as url:
            with pytest.raises(BoundaryFailure, match=r"did not answer within 0\.2 s") as slow:
                await environment(url, timeout_s=0.2).step(HttpWorld(), Utterance(text="x"), StepServices(ScriptedRoles(), 0))
            hanging.set()
            assert (slow.value.kind, slow.value.retryable) == ("http_timeout", True)

    await release()
    with pytest.raises(BoundaryFailure, match="cannot be reached") as away:
        await environment("http://127.0.0.1:9").step(HttpWorld(), Utterance(text="x"), StepServices(ScriptedRoles(), 0))
    assert (away.value.kind, away.value.retryable) == ("http_unreachable", True)


async def test_lone_surrogates_of_a_server_arrive_escaped() -> None:
    body = b'{"state": "\\ud800", "observation": "\\ud800"}'
    async with server(lambda path, _: web.Response(body=body)) as url:
        world, result = await environment(url).step(HttpWorld(), Utterance(text="x"), StepServices(ScriptedRoles(), 0))
    assert (world.state, result.observation) == ("\\ud800", "\\ud800")


async def test_a_token_is_sent_from_the_variable_that_the_settings_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIFT_TOKEN", "secret-1")
    seen: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"state": 1, "observation": "x"})

    app = web.Application()
    app.router.add_post("/step", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        for token_env in ("LIFT_TOKEN", ""):
            lift = environment(url, token_env=token_env)
            await lift.step(HttpWorld(), Utterance(text="x"), StepServices(ScriptedRoles(), 0))
    finally:
        await runner.cleanup()
    assert seen == ["Bearer secret-1", None]


async def test_a_server_says_what_limits_a_task_has() -> None:
    async with server(lambda path, _: web.json_response({**SEED, "limits": {"max_steps": 7}})) as url:
        seeded = await asyncio.to_thread(environment(url).seed, HttpTask.model_validate({"start": 1}))
    assert seeded.limits == TaskLimits(max_steps=7)


async def test_seeding_in_a_worker_does_not_stop_its_loop() -> None:
    """The server answers from this very loop: it could not if the loop stood still."""

    async def answer(path: str, body: Any) -> web.Response:
        return web.json_response(SEED)

    async with server(answer) as url:
        found: Any = environment(url)
        seeded = await registry.apart(found, registry.seed, found, HttpTask.model_validate({"start": 1}))
    assert seeded.messages == SEED["messages"]


def test_the_contract_in_the_documentation_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "http-environment.openapi.json").read_text(encoding="utf-8") == rendered()
    assert {path for path, *_ in CALLS} == set(json.loads(rendered())["paths"])


def test_the_example_server_needs_nothing_but_the_standard_library_and_forty_lines() -> None:
    lines = (ROOT / "examples" / "http_environment.py").read_text().splitlines()
    imports = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"json", "sys", "http"}
    begins = next(number for number, line in enumerate(lines) if line.startswith("TOOLS"))
    assert len([line for line in lines[begins:] if line.strip()]) <= 40


CLOSED = {"state": 5}


def steps(path: str, body: Any) -> web.Response:
    """A server that fails at its third step."""
    if path == "/seed":
        return web.json_response({**SEED, "interaction": "conversation", "state": 5})
    if path == "/step" and body["index"] == 2:
        return web.json_response({"detail": "stuck"}, status=500)
    if path == "/step":
        return web.json_response({"state": 5, "observation": "x"})
    return web.json_response({"reward": 0.5} if path == "/verify" else {})


@pytest.mark.parametrize("end", ["a step that fails", "a retry of the agent", "a cancelled run", "a hand-in", "a verdict"])
async def test_a_server_is_told_of_every_session_that_ends_without_a_verdict(end: str) -> None:
    asked: list[tuple[str, Any]] = []

    def answer(path: str, body: Any) -> web.Response:
        asked.append((path, body))
        return steps(path, body)

    async with server(answer) as url:
        with declared(lift={"url": url, **LIFT}):
            bench = Bench()
            worker = Worker(bench)
            session = await bench.session()
            session.environment = "lift"
            receipt = None
            for index in range(3 if end == "a step that fails" else 2):
                before = len(bench.published.events)
                says = session.asks(index, receipt, "x").model_copy(update={"action": Utterance(text="up")})
                await worker.handler.step(says)
                (observed,) = [one for one in bench.published.events[before:] if isinstance(one, ObservationReturned)]
                receipt = observed.receipt
            name = session.attempt.session
            if end == "a cancelled run":
                worker.sessions.cancelled(session.attempt.task.run)
            elif end != "a step that fails":
                hows: dict[str, Ending] = {"a retry of the agent": "failed", "a hand-in": "handed_in", "a verdict": "verified"}
                worker.sessions.ended(name, hows[end])
            if end != "a hand-in":
                await worker.closed()
    told = [body for path, body in asked if path == "/close"]
    assert told == ([] if end in ("a hand-in", "a verdict") else [CLOSED])
