"""Model servers from our side: every answer kept as it came, every failure named, retried or not, and told in one sentence."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx2
import pytest

from rollstream.errors import ModelFailure, Refused
from rollstream.models import openai
from rollstream.models.openai import ModelPool
from rollstream.models.protocol import Completion, ContextOverflow
from rollstream.settings import Limits, ModelSettings, Settings
from rollstream.testing.model_server import (
    CONTEXT_OVERFLOW,
    EMPTY_CHOICES,
    INVALID_UTF8,
    LONE_SURROGATE,
    NAN,
    NOT_JSON,
    Dropped,
    Hang,
    Held,
    Raw,
    Reply,
    Request,
    Script,
    ScriptedModelServer,
    Slow,
    Status,
    Text,
    always,
    big_text,
    in_turn,
    tool_call,
)
from schemas.values import ChatMessage, JsonObject, Sampling, Usage

QUESTION: list[ChatMessage] = [{"role": "user", "content": "1 + 1?"}]
DEFAULT = Sampling()
KEY = "sk-canary-4711"
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture(autouse=True, scope="module")
def _one_ssl_context() -> Iterator[None]:
    """Reading the system's certificates takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        context = httpx2.create_ssl_context()
        patch.setattr(httpx2, "create_ssl_context", lambda **_: context)
        yield


@asynccontextmanager
async def serving(
    script: Script | Reply | str, **changes: object
) -> AsyncIterator[tuple[ScriptedModelServer, Callable[..., Any]]]:
    """A scripted server, and a function that asks the model behind it."""
    async with ScriptedModelServer(script if callable(script) else always(script)) as server:
        model = ModelSettings.model_validate({"base_url": server.base_url, "model": "m-1", "max_retries": 2, **changes})
        pool = ModelPool(Settings(models={"m": model}))

        async def ask(
            messages: Sequence[ChatMessage] = QUESTION,
            tools: Sequence[JsonObject] = (),
            sampling: Sampling = DEFAULT,
            max_output_bytes: int = 1_000_000,
        ) -> Completion:
            return await pool.get("m").complete(messages, tools, sampling, max_output_bytes)

        yield server, ask
        await pool.close()


async def failure(ask: Callable[..., Any]) -> ModelFailure:
    with pytest.raises(ModelFailure) as caught:
        await ask()
    return caught.value


async def all_closed(server: ScriptedModelServer) -> None:
    """Give the loop time to notice."""
    async with asyncio.timeout(5):
        while server.connections():
            await asyncio.sleep(0)


# Answers.


@APIS
async def test_an_answer_comes_with_usage_and_the_response_as_the_server_gave_it(api: str) -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2, reasoning_tokens=1)
    async with serving(Text("It is 2.", usage=usage, extra={"system_fingerprint": "fp"}), api=api) as (server, ask):
        completion = await ask()
        async with aiohttp.ClientSession() as http:
            path = {"chat": "/chat/completions", "responses": "/responses"}[api]
            async with http.post(server.base_url + path, json={"model": "m-1"}) as again:
                expected = await again.json()
    assert completion.message == {"role": "assistant", "content": "It is 2."}
    assert (completion.finish_reason, completion.usage, completion.model) == ("stop", usage, "m-1")
    assert {**completion.response, "id": None} == {**expected, "id": None}
    assert (completion.attempts, completion.escaped) == (1, False)
    assert 0 < completion.duration_s < 30


@APIS
@pytest.mark.parametrize("finish", ["stop", "length", "content_filter"])
async def test_the_finish_reason_is_the_same_word_through_both_apis(api: str, finish: str) -> None:
    async with serving(Text("It is", finish_reason=finish), api=api) as (_, ask):
        assert (await ask()).finish_reason == finish


@APIS
async def test_a_tool_call_arrives_in_chat_form_and_its_tools_were_offered(api: str) -> None:
    tool: JsonObject = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    async with serving(tool_call("add", a=1, b=1), api=api) as (server, ask):
        completion = await ask(tools=[tool])
    function = {"name": "add", "arguments": '{"a": 1, "b": 1}'}
    assert completion.message["tool_calls"] == [{"id": "call-1", "type": "function", "function": function}]
    assert completion.finish_reason == "tool_calls"
    assert "add" in json.dumps(server.requests[0].body["tools"])


async def test_the_calls_sampling_wins_over_the_models_and_the_completion_tells_what_was_sent() -> None:
    async with serving("2", sampling={"temperature": 0.7, "top_p": 0.9, "seed": 1}) as (server, ask):
        completion = await ask(sampling=Sampling(temperature=0.0, max_tokens=8))
    sent = {"temperature": 0.0, "top_p": 0.9, "seed": 1, "max_tokens": 8}
    body = server.requests[0].body
    assert {name: body[name] for name in sent} == sent
    assert "stop" not in body
    assert completion.sampling == Sampling.model_validate(sent)


async def test_sampling_that_the_responses_api_cannot_carry_is_refused_instead_of_dropped() -> None:
    async with serving("2", api="responses") as (server, ask):
        with pytest.raises(Refused, match="takes no seed and no stop"):
            await ask(sampling=Sampling(seed=1, stop=["\n"]))
    assert server.requests == []


async def test_an_undeclared_name_is_an_id_that_the_default_endpoint_serves() -> None:
    async with ScriptedModelServer(always("2")) as server:
        pool = ModelPool(Settings(models={"default": ModelSettings(base_url=server.base_url)}))
        await pool.get("qwen-0.5b").complete(QUESTION, [], Sampling(), 1_000)
        await pool.close()
    assert server.requests[0].model == "qwen-0.5b"


# Answers that the log cannot carry as they are.


@APIS
@pytest.mark.parametrize(
    ("reply", "text"), [(LONE_SURROGATE, "half a pair: \\ud800."), (INVALID_UTF8, "caf\\xe9")], ids=["surrogate", "bytes"]
)
async def test_text_that_is_no_unicode_is_spelled_out_and_marked(api: str, reply: Reply, text: str) -> None:
    async with serving(reply, api=api) as (_, ask):
        completion = await ask()
    assert (completion.message["content"], completion.escaped) == (text, True)


async def test_a_nan_in_the_response_is_spelled_out_and_marked() -> None:
    async with serving(NAN) as (_, ask):
        completion = await ask()
    assert (completion.response["score"], completion.escaped) == ("nan", True)


@APIS
async def test_text_over_the_episodes_limit_is_cut_with_its_original_size(api: str) -> None:
    async with serving(big_text(5_000_000), api=api) as (_, ask):
        completion = await ask(max_output_bytes=2_000)
    assert completion.message["content"].startswith("x" * 2_000 + "\n[truncated by rollstream: 5000000 bytes in all")
    assert completion.escaped
    assert len(json.dumps(completion.response)) < 4_000


async def test_a_server_that_never_stops_talking_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "MAX_RESPONSE_BYTES", 100_000)
    async with serving(big_text(1_000_000)) as (server, ask):
        error = await failure(ask)
    assert (error.kind, error.retryable) == ("model_bad_response", False)
    assert "more than 100000 bytes" in str(error)
    assert len(server.requests) == 1


# Failures.


@APIS
@pytest.mark.parametrize(
    ("status", "kind", "remedy"),
    [
        (400, "model_rejected_request", "check the model's id"),
        (401, "model_unauthorized", "check the key in TEST_KEY"),
        (402, "model_payment_required", "check the credit of the key in TEST_KEY"),
        (403, "model_forbidden", "check what the key in TEST_KEY may do"),
        (404, "model_not_found", "check the model's id and that base_url ends"),
    ],
)
async def test_a_refusal_ends_at_once_and_names_server_cause_and_remedy(api: str, status: int, kind: str, remedy: str) -> None:
    async with serving(Status(status, "no,\nnever"), api=api, api_key_env="TEST_KEY") as (server, ask):
        error = await failure(ask)
    assert (error.kind, error.retryable, error.stage) == (kind, False, "agent")
    assert str(error).startswith(f"model server {server.base_url} (model m-1) answered {status}: no, never")
    assert remedy in str(error)
    assert "\n" not in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Status(429), "model_rate_limited"),
        (Status(500), "model_unavailable"),
        (Status(503), "model_unavailable"),
        (Status(408), "model_unavailable"),
    ],
    ids=lambda value: str(getattr(value, "status", value)),
)
async def test_a_server_in_trouble_is_asked_again_and_then_told_of_as_retryable(reply: Reply, kind: str) -> None:
    async with serving(reply) as (server, ask):
        error = await failure(ask)
    assert (error.kind, error.retryable) == (kind, True)
    assert "tried 3 times" in str(error)
    assert [request.retry_count for request in server.requests] == [0, 1, 2]


@pytest.mark.parametrize("trouble", [Status(429), Status(500), Dropped(), Dropped(midway=True)], ids=repr)
async def test_a_call_that_is_answered_at_the_second_try_says_so(trouble: Reply) -> None:
    async with serving(in_turn(trouble, Text("2"))) as (server, ask):
        completion = await ask()
    assert (completion.message["content"], completion.attempts) == ("2", 2)
    assert len(server.requests) == 2


async def test_a_server_that_says_when_to_come_back_is_believed() -> None:
    async with serving(in_turn(Status(429, retry_after_s=0.8), Text("2"))) as (_, ask):
        started = time.monotonic()
        await ask()
    assert time.monotonic() - started >= 0.8


async def test_an_empty_purse_is_no_rate_limit() -> None:
    async with serving(Status(429, code="insufficient_quota"), max_retries=0) as (_, ask):
        error = await failure(ask)
    assert (error.kind, error.retryable) == ("model_payment_required", False)


async def test_a_dropped_connection_is_a_server_out_of_reach_and_not_a_timeout() -> None:
    async with serving(Dropped(), max_retries=0) as (_, ask):
        error = await failure(ask)
    assert (error.kind, error.retryable) == ("model_unreachable", True)


async def test_a_closed_port_is_told_with_its_cause_and_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening, so that nobody else can be there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        pool = ModelPool(Settings(models={"m": ModelSettings(base_url=url, max_retries=0)}))
        remedy = r"Connect call failed.*tried once; start it, or correct the model's base_url"
        with pytest.raises(ModelFailure, match=remedy) as caught:
            await pool.get("m").complete(QUESTION, [], Sampling(), 1_000)
        await pool.close()
    assert (caught.value.kind, caught.value.retryable) == ("model_unreachable", True)


async def test_a_server_that_hangs_is_given_up_after_its_time_in_all() -> None:
    async with serving(Hang(), timeout_s=0.2) as (server, ask):
        started = time.monotonic()
        error = await failure(ask)
    assert (error.kind, error.retryable) == ("model_timeout", True)
    assert "gave no answer within 0.2 s" in str(error)
    assert time.monotonic() - started < 2
    assert len(server.requests) == 1


async def test_a_slow_answer_within_its_time_is_an_answer() -> None:
    async with serving(Slow(Text("2"), 0.2), timeout_s=20) as (_, ask):
        assert (await ask()).duration_s >= 0.2


@pytest.mark.parametrize("reply", [EMPTY_CHOICES, NOT_JSON, Raw(b'{"object": "error", "message": "busy"}')], ids=repr)
@APIS
async def test_an_answer_that_is_none_is_a_retryable_failure_that_shows_what_came(api: str, reply: Raw) -> None:
    async with serving(reply, api=api) as (server, ask):
        error = await failure(ask)
    assert (error.kind, error.retryable) == ("model_bad_response", True)
    assert f"speaks the {api} API" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "reply",
    [
        CONTEXT_OVERFLOW,
        Status(400, "too long", code="context_length_exceeded"),
        Status(400, "the request exceeds the available context size"),
        Status(413, "prompt is too long: 9000 tokens"),
    ],
    ids=lambda reply: reply.message[:20],
)
@APIS
async def test_a_prompt_that_does_not_fit_is_no_failure_but_an_outcome(api: str, reply: Status) -> None:
    async with serving(reply, api=api) as (server, ask):
        with pytest.raises(ContextOverflow):
            await ask()
    assert len(server.requests) == 1


async def test_an_error_page_of_megabytes_is_quoted_in_a_few_hundred_characters() -> None:
    async with serving(Raw(b"<html>" + b"x" * 3_000_000, status=500, content_type="text/html"), max_retries=0) as (_, ask):
        assert len(str(await failure(ask))) < 1_000


# Keys.


async def test_the_key_comes_from_the_variable_that_the_model_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", f"{KEY}\n")
    async with serving("2", api_key_env="TEST_KEY") as (server, ask):
        completion = await ask()
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(completion)


@pytest.mark.parametrize("status", [400, 401, 429, 500])
async def test_a_server_that_repeats_the_key_does_not_bring_it_into_the_log(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    async with serving(Status(status, f"bad key: {KEY}"), api_key_env="TEST_KEY", max_retries=0) as (_, ask):
        error = await failure(ask)
    assert "bad key: $TEST_KEY" in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__


@pytest.mark.parametrize("key", [f"{KEY}\u20ac", f"{KEY}\n{KEY}"])
async def test_a_key_that_no_header_can_carry_is_refused_without_being_quoted(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", key)
    async with serving("2", api_key_env="TEST_KEY") as (_, ask):
        with pytest.raises(Refused, match="printable ASCII in TEST_KEY") as caught:
            await ask()
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", [f"http://user:{KEY}@127.0.0.1:8000/v1", f"http://127.0.0.1:8000/v1?key={KEY}"])
def test_a_url_that_holds_a_secret_is_refused_without_being_quoted(url: str) -> None:
    pool = ModelPool(Settings(models={"m": ModelSettings(base_url=url)}))
    with pytest.raises(Refused, match="put the key in OPENAI_API_KEY") as caught:
        pool.get("m")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000/v1", "localhost:8000/v1", "ftp://127.0.0.1/v1", "http:///v1"])
def test_a_url_that_is_none_is_refused_and_shown(url: str) -> None:
    pool = ModelPool(Settings(models={"m": ModelSettings(base_url=url)}))
    with pytest.raises(Refused, match=f"as http://HOST:PORT/v1, found '{url}'"):
        pool.get("m")


# Connections.


async def test_many_calls_at_once_share_one_client_and_none_of_its_connections_survives_the_pool() -> None:
    gate = asyncio.Event()
    async with ScriptedModelServer(always(Held(Text("2"), gate))) as server:
        models = {name: ModelSettings(base_url=server.base_url) for name in ("a", "b")}
        pool = ModelPool(Settings(models=models, limits=Limits(max_concurrent_episodes=300)))
        calls = [asyncio.create_task(pool.get("ab"[i % 2]).complete(QUESTION, [], Sampling(), 1_000)) for i in range(150)]
        await server.wait_for_requests(150)
        assert server.connections() == 150
        gate.set()
        await asyncio.gather(*calls)
        await pool.close()
        await pool.close()
        await all_closed(server)


async def test_a_cancelled_call_lets_its_connection_go() -> None:
    async with serving(Hang()) as (server, ask):
        call = asyncio.create_task(ask())
        await server.wait_for_requests(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await all_closed(server)


# The server itself.


async def test_a_mistake_in_a_script_fails_the_test_that_wrote_it() -> None:
    def script(request: Request) -> Reply:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        async with serving(script) as (_, ask):
            await failure(ask)


def test_the_instant_server_answers_both_apis_and_ends_on_sigterm() -> None:
    command = [sys.executable, "-m", "rollstream.testing.instant_model", "--answer", "It is 2."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["base_url"]
            assert url.startswith("http://127.0.0.1:")
            models = {api: ModelSettings.model_validate({"base_url": url, "api": api}) for api in ("chat", "responses")}

            async def ask_both() -> list[Completion]:
                pool = ModelPool(Settings(models=models))
                long: list[ChatMessage] = [{"role": "user", "content": "x" * 300_000}]
                given = [await pool.get(api).complete(long, [], Sampling(), 1_000) for api in models for _ in range(2)]
                await pool.close()
                return given

            answers = asyncio.run(ask_both())
        finally:
            process.terminate()
    assert [answer.message["content"] for answer in answers] == ["It is 2."] * 4
    assert process.returncode == 0
