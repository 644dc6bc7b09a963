"""The way from a box to the model: what passes, what does not, and what is kept of it when the model fails."""

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollstream.errors import ModelFailure, Refused
from rollstream.models.protocol import ContextOverflow
from rollstream.settings import ModelSettings, Settings
from rollstream.testing.model_server import (
    CONTEXT_OVERFLOW,
    Dropped,
    Hang,
    Raw,
    Reply,
    ScriptedModelServer,
    Slow,
    Status,
    Text,
    always,
)
from services.agent_worker import egress
from services.agent_worker.egress import Egress, Passage

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGRESS_TEST_KEY", KEY)


class Way:
    """A passage, and a client on the box's side of it."""

    def __init__(self, passage: Passage, client: aiohttp.ClientSession, server: ScriptedModelServer) -> None:
        self.passage, self.client, self.server = passage, client, server

    async def post(self, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        raw = json.dumps(body if body is not None else {"model": "whatever", "messages": []}).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(f"http://box{path}", data=raw, headers=given) as reply:
            return reply.status, await reply.read()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the path of a socket has 107 characters at most."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@asynccontextmanager
async def way(folder: Path, reply: Reply | str = "It is 2.", **model: Any) -> AsyncIterator[Way]:
    async with ScriptedModelServer(always(reply)) as server:
        settings = ModelSettings.model_validate(
            {"base_url": server.base_url, "model": "small-1b", "api_key_env": "EGRESS_TEST_KEY", **model}
        )
        gate = Egress(Settings(models={"small": settings}), folder / "e")
        try:
            async with (
                gate.passage("small") as passage,
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(passage.socket))) as client,
            ):
                yield Way(passage, client, server)
        finally:
            await gate.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages?beta=true"])
async def test_a_call_reaches_the_runs_model_with_the_workers_key(path: str, tmp_path: Path) -> None:
    async with way(tmp_path) as here:
        status, body = await here.post(path, authorization="Bearer made-up", x_secret="of the box")
    (request,) = here.server.requests
    assert (status, request.model) == (200, "small-1b")
    assert b"It is 2." in body
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert not {"x-api-key", "x-secret"} & set(request.headers)
    assert here.passage.failure is None


async def test_a_key_is_replaced_where_a_client_has_put_its_own(tmp_path: Path) -> None:
    async with way(tmp_path) as here:
        await here.post("/v1/messages", x_api_key="rollstream", anthropic_version="2023-06-01")
    (request,) = here.server.requests
    assert request.headers["x-api-key"] == KEY
    assert "authorization" not in request.headers
    assert request.headers["anthropic-version"] == "2023-06-01"


async def test_a_model_without_a_key_is_sent_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EGRESS_TEST_KEY")
    async with way(tmp_path) as here:
        await here.post("/v1/messages", x_api_key="rollstream", authorization="Bearer x")
    assert not {"x-api-key", "authorization"} & set(here.server.requests[0].headers)


async def test_an_answer_is_streamed_as_it_comes(tmp_path: Path) -> None:
    async with way(tmp_path) as here:
        status, body = await here.post("/v1/messages", {"model": "x", "stream": True, "messages": []})
    assert (status, here.passage.failure) == (200, None)
    names = [line.removeprefix("event: ") for line in body.decode().splitlines() if line.startswith("event: ")]
    assert (names[0], names[-1]) == ("message_start", "message_stop")


@pytest.mark.parametrize("path", ["/", "/v1/files", "/v1/models/../files", "/v1/embeddings", "/v1/chat/completions/x"])
async def test_no_other_path_passes(path: str, tmp_path: Path) -> None:
    async with way(tmp_path) as here:
        status, body = await here.post(path)
        async with here.client.get("http://box/v1/chat/completions") as reply:
            assert reply.status == 404
    assert status == 404
    assert b"expected one of" in body
    assert here.server.requests == []


async def test_the_only_model_that_a_box_sees_is_the_runs(tmp_path: Path) -> None:
    async with way(tmp_path) as here, here.client.get("http://box/v1/models") as reply:
        assert [one["id"] for one in (await reply.json())["data"]] == ["small-1b"]


@pytest.mark.parametrize(
    ("reply", "kind", "retryable"),
    [
        (Status(401), "model_unauthorized", False),
        (Status(402), "model_payment_required", False),
        (Status(403), "model_forbidden", False),
        (Status(404), "model_not_found", False),
        (Status(400), "model_rejected_request", False),
        (Status(429), "model_rate_limited", True),
        (Status(429, code="insufficient_quota"), "model_payment_required", False),
        (Status(503), "model_unavailable", True),
        (Raw(b"<html>", 500, "text/html"), "model_unavailable", True),
        (Dropped(), "model_unreachable", True),
        (Dropped(midway=True), "model_unreachable", True),
        (Raw(b'event: error\ndata: {"type": "error"}\n\n', content_type="text/event-stream"), "model_unavailable", True),
        (Raw(b"event: response.failed\ndata: {}\n\n", content_type="text/event-stream"), "model_unavailable", True),
    ],
    ids=str,
)
async def test_a_failing_model_is_known_by_the_names_that_our_own_calls_give_it(
    reply: Reply, kind: str, retryable: bool, tmp_path: Path
) -> None:
    async with way(tmp_path, reply) as here:
        try:
            await here.post("/v1/chat/completions")
        except aiohttp.ClientError:
            assert reply == Dropped(midway=True)
        failure = here.passage.failure
    assert isinstance(failure, ModelFailure)
    assert (failure.kind, failure.retryable) == (kind, retryable)
    assert "small-1b" in str(failure)


async def test_what_a_model_says_about_events_is_no_failure(tmp_path: Path) -> None:
    async with way(tmp_path, Text("say\nevent: error\nand go on")) as here:
        await here.post("/v1/messages", {"stream": True, "messages": []})
    assert here.passage.failure is None


async def test_a_context_that_is_full_is_told_apart(tmp_path: Path) -> None:
    async with way(tmp_path, CONTEXT_OVERFLOW) as here:
        await here.post("/v1/responses")
    assert isinstance(here.passage.failure, ContextOverflow)


async def test_a_later_call_that_goes_well_makes_up_for_a_failure(tmp_path: Path) -> None:
    async with way(tmp_path) as here:
        here.passage.note_status(500, b"{}")
        await here.post("/v1/chat/completions")
    assert here.passage.failure is None


async def test_a_server_that_repeats_the_key_is_not_quoted(tmp_path: Path) -> None:
    async with way(tmp_path, Status(401, f"the key {KEY} is wrong")) as here:
        await here.post("/v1/chat/completions")
    assert KEY not in str(here.passage.failure)
    assert "$EGRESS_TEST_KEY" in str(here.passage.failure)


async def test_a_program_is_told_not_to_ask_again_where_that_cannot_help(tmp_path: Path) -> None:
    for reply, told in ((Status(401), "false"), (Status(503), None)):
        async with way(tmp_path, reply) as here, here.client.post("http://box/v1/messages", data=b"{}") as answer:
            assert answer.headers.get("x-should-retry") == told


async def test_a_server_that_never_answers_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    async with way(tmp_path, Hang(), timeout_s=0.3) as here:
        status, _ = await here.post("/v1/chat/completions")
        failure = here.passage.failure
    assert status == 504
    assert isinstance(failure, ModelFailure)
    assert failure.kind == "model_timeout"


async def test_how_long_a_server_has_been_silent_is_known_also_once_the_caller_is_dead(tmp_path: Path) -> None:
    async with way(tmp_path, Hang()) as here:
        asking = asyncio.create_task(here.post("/v1/chat/completions"))
        await here.server.wait_for_requests(1)
        await asyncio.sleep(0.2)
        assert here.passage.waiting_s >= 0.2
        asking.cancel()
        await asyncio.wait([asking])
        await here.client.close()
        async with asyncio.timeout(5):
            while here.passage._waiting:
                await asyncio.sleep(0.01)
        assert here.passage.waiting_s >= 0.2


@pytest.mark.parametrize("raw", [b"", b"no json", b"[1]", b"\xff{}"])
async def test_a_request_that_is_no_object_does_not_pass(raw: bytes, tmp_path: Path) -> None:
    async with way(tmp_path) as here, here.client.post("http://box/v1/messages", data=raw) as reply:
        assert reply.status == 400
    assert here.server.requests == []
    assert here.passage.failure is None


async def test_a_request_beyond_all_reason_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "MAX_REQUEST_BYTES", 1_000)
    async with way(tmp_path) as here:
        status, _ = await here.post("/v1/messages", {"x": "y" * 2_000})
    assert status == 413


async def test_a_session_asks_only_so_much_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with way(tmp_path, Slow(Text("x"), 0.3)) as here:
        asking = [asyncio.create_task(here.post("/v1/messages")) for _ in range(egress.AT_ONCE + 4)]
        await here.server.wait_for_requests(egress.AT_ONCE)
        assert len(here.server.requests) == egress.AT_ONCE
        await asyncio.gather(*asking)
    assert len(here.server.requests) == egress.AT_ONCE + 4


async def test_a_way_ends_with_its_session_and_leaves_no_socket(tmp_path: Path) -> None:
    async with way(tmp_path) as here:
        path = here.passage.socket
        assert await asyncio.to_thread(path.is_socket)
    assert not await asyncio.to_thread(path.exists)


async def test_sockets_of_a_killed_worker_are_swept_and_those_in_use_are_not(tmp_path: Path) -> None:
    async with way(tmp_path) as here:
        dead = tmp_path / "e" / "dead.sock"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(dead))
        await asyncio.to_thread(egress._sweep, tmp_path / "e")
        assert not await asyncio.to_thread(dead.exists)
        assert (await here.post("/v1/messages"))[0] == 200


async def test_a_model_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="expected base_url"):
        async with way(tmp_path, base_url="nowhere"):
            raise AssertionError("opened")
