"""An OpenAI-compatible model server for tests that answers, or fails, as a script says. Listens on 127.0.0.1 only.

A script is called once a *request*, not once a call: a client that retries is answered from the script again.

    async with ScriptedModelServer(in_turn(Status(503), Text("42"))) as server:
        ... ModelSettings(base_url=server.base_url) ...
        assert len(server.requests) == 2

`python -m rollstream.testing.model_server --answer TEXT` is another thing: the *instant* server of benchmarks, which gives
every request the same prebuilt bytes and keeps nothing.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, cast

import uvloop
from aiohttp import web

from schemas.values import ChatMessage, JsonObject, Usage

HOST = "127.0.0.1"
CREATED = 1_767_225_600
"""All answers were created at the same time, so that a scripted response is known to the byte."""

Api = Literal["chat", "responses", "models"]
_ENDPOINTS: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/models": "models"}


@dataclass(frozen=True)
class Request:
    """One request as it arrived. Header names are in lower case; `number` counts from 0."""

    number: int
    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def api(self) -> Api:
        return _ENDPOINTS[self.path]

    @cached_property
    def body(self) -> JsonObject:
        body: JsonObject = json.loads(self.raw) if self.raw else {}
        return body

    @property
    def model(self) -> str:
        return str(self.body.get("model", "scripted"))

    @property
    def messages(self) -> list[ChatMessage]:
        """`messages` of a chat request, or `input` of a responses request."""
        found = self.body.get("messages", self.body.get("input", []))
        return found if isinstance(found, list) else [{"role": "user", "content": str(found)}]

    @property
    def last_text(self) -> str:
        """Text of the last message, which is what most scripts decide by."""
        content = self.messages[-1].get("content") if self.messages else None
        if isinstance(content, list):
            return "".join(str(part.get("text", "")) for part in content)
        return content or ""

    @property
    def retry_count(self) -> int:
        """How often the SDK says it has sent this call before."""
        return int(self.headers.get("x-stainless-retry-count", "0"))


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. `arguments` as text is sent as it is, so that it may be malformed."""

    name: str
    arguments: JsonObject | str = field(default_factory=dict)
    id: str = "call-1"

    def arguments_text(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


USAGE = Usage(prompt_tokens=10, completion_tokens=5)


@dataclass(frozen=True, slots=True)
class Text:
    """A good answer.

    Attributes:
        extra: more keys of the response; NaN and lone surrogates go out the way a careless server writes them.
    """

    text: str
    finish_reason: str = "stop"
    usage: Usage = USAGE
    extra: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """An answer that calls tools, with or without text."""

    calls: Sequence[Call]
    text: str | None = None
    usage: Usage = USAGE


@dataclass(frozen=True, slots=True)
class RawText:
    """A good answer whose text is exactly these bytes between the quotes, whether JSON allows them or not."""

    raw: bytes


@dataclass(frozen=True, slots=True)
class Raw:
    """Any body at all."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Status:
    """An error in OpenAI's shape."""

    status: int
    message: str = "scripted failure"
    code: str | None = None
    retry_after_s: float | None = 0.001
    """Of statuses that clients retry. The default keeps tests fast; null leaves the client to its own back-off."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A reply that takes a while."""

    reply: "Reply"
    delay_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """A reply that is given once the test sets `until`."""

    reply: "Reply"
    until: asyncio.Event


@dataclass(frozen=True, slots=True)
class Hang:
    """Nothing, until the server is closed."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The connection is closed before the first byte, or in the middle of the body."""

    midway: bool = False


Reply = Text | ToolCalls | RawText | Raw | Status | Slow | Held | Hang | Dropped
Script = Callable[[Request], Reply]

EMPTY_CHOICES = Raw(b'{"object": "chat.completion", "model": "scripted", "choices": [], "output": []}')
NOT_JSON = Raw(b"<html><body>502 Bad Gateway</body></html>", content_type="text/html")
LONE_SURROGATE = RawText(rb"half a pair: \ud800.")
INVALID_UTF8 = RawText(b"caf\xe9")
NAN = Text("42", extra={"score": float("nan")})
CONTEXT_OVERFLOW = Status(
    400, "This model's maximum context length is 128 tokens, but 4096 were requested.", code="context_length_exceeded"
)


def tool_call(name: str, **arguments: object) -> ToolCalls:
    """An answer that calls one tool."""
    return ToolCalls([Call(name, arguments)])


def big_text(size_bytes: int = 5_000_000) -> Text:
    """A good answer of that many bytes of ASCII."""
    return Text("x" * size_bytes)


def always(reply: Reply | str) -> Script:
    """The same reply to everything."""
    given = Text(reply) if isinstance(reply, str) else reply
    return lambda _: given


def in_turn(*replies: Reply | str) -> Script:
    """One reply after the other, by the order in which requests arrive; the last one repeats."""
    given = [Text(reply) if isinstance(reply, str) else reply for reply in replies]
    return lambda request: given[min(request.number, len(given) - 1)]


class ScriptedModelServer:
    """Serves `/v1/chat/completions`, `/v1/responses` and `/v1/models` on a free port of 127.0.0.1 inside the running loop.

    Attributes:
        requests: every completion request so far, oldest first; `/v1/models` is not counted.

    Raises:
        Whatever the script raised, when the context ends.
    """

    def __init__(self, script: Script, models: Sequence[str] = ("scripted",)) -> None:
        self._script = script
        self._models = models
        self.requests: list[Request] = []
        self._arrived = asyncio.Condition()
        self._closing = asyncio.Event()
        self._mistake: Exception | None = None
        self._runner = web.ServerRunner(
            web.Server(self._serve, handler_cancellation=True, access_log=None), shutdown_timeout=1.0
        )
        self._port = 0

    @property
    def base_url(self) -> str:
        """What a client is configured with; ends in `/v1`."""
        return f"http://{HOST}:{self._port}/v1"

    async def wait_for_requests(self, count: int, timeout_s: float = 10.0) -> None:
        """Return once `count` completion requests have arrived.

        Raises:
            TimeoutError: they did not.
        """
        async with asyncio.timeout(timeout_s), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    def connections(self) -> int:
        """How many connections clients hold open, as far as the loop has come to notice."""
        server = self._runner.server
        return len(server.connections) if server is not None else 0

    async def __aenter__(self) -> "ScriptedModelServer":
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        await self._runner.cleanup()
        if self._mistake is not None and error is None:
            raise self._mistake

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        if http.path not in _ENDPOINTS:
            return _error(Status(404, f"no such path here: {http.path}"))
        if _ENDPOINTS[http.path] == "models":
            data = [{"id": model, "object": "model", "created": CREATED, "owned_by": "script"} for model in self._models]
            return web.json_response({"object": "list", "data": data})
        headers = {name.lower(): value for name, value in http.headers.items()}
        raw = await http.read()
        async with self._arrived:
            request = Request(len(self.requests), http.path, headers, raw)
            self.requests.append(request)
            self._arrived.notify_all()
        try:
            if request.body.get("stream"):
                raise NotImplementedError("the scripted model server does not stream")
            reply = self._script(request)
        except Exception as mistake:
            # Not 500: the client would repeat the call, and the test would wait for its back-off.
            self._mistake = self._mistake or mistake
            return _error(Status(400, f"the script raised {mistake!r}"))
        return await self._give(reply, request, http)

    async def _give(self, reply: Reply, request: Request, http: web.BaseRequest) -> web.StreamResponse:
        match reply:
            case Slow(later, delay_s):
                await self._closed_or(asyncio.sleep(delay_s))
                return await self._give(later, request, http)
            case Held(later, until):
                await self._closed_or(until.wait())
                return await self._give(later, request, http)
            case Hang():
                await self._closing.wait()
                return _drop(http)
            case Dropped(midway=False):
                return _drop(http)
            case Dropped():
                return await _drop_midway(http, _body(Text("never told in full"), request))
            case Status():
                return _error(reply)
            case Raw(body, status, content_type):
                return web.Response(body=body, status=status, content_type=content_type)
            case _:
                return web.Response(body=_body(reply, request), content_type="application/json")

    async def _closed_or(self, wait: Coroutine[Any, Any, object]) -> None:
        """Wait, but not longer than the server lives."""
        tasks = [asyncio.create_task(wait), asyncio.create_task(self._closing.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()


def _body(reply: Text | ToolCalls | RawText, request: Request) -> bytes:
    """A whole response in the shape of the API that was asked."""
    make = _chat_body if request.api == "chat" else _responses_body
    if isinstance(reply, RawText):
        return json.dumps(make(Text(_PLACE), request)).encode().replace(_PLACE.encode(), reply.raw)
    # The standard library writes what strict JSON forbids: NaN, and escapes of lone surrogates.
    return json.dumps(make(reply, request)).encode()


_PLACE = "PLACE-OF-RAW-TEXT"


def _chat_body(reply: Text | ToolCalls, request: Request) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": reply.text, "refusal": None}
    finish_reason, extra = ("tool_calls", {}) if isinstance(reply, ToolCalls) else (reply.finish_reason, reply.extra)
    if isinstance(reply, ToolCalls):
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text()}}
            for call in reply.calls
        ]
    usage = reply.usage
    return {
        "id": f"chatcmpl-{request.number}",
        "object": "chat.completion",
        "created": CREATED,
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
        **extra,
    }


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def _responses_body(reply: Text | ToolCalls, request: Request) -> JsonObject:
    output: list[JsonObject] = []
    if reply.text is not None:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        output.append({"type": "message", "id": "msg-0", "role": "assistant", "status": "completed", "content": [part]})
    reason, extra = (None, {}) if isinstance(reply, ToolCalls) else (_INCOMPLETE.get(reply.finish_reason), reply.extra)
    if isinstance(reply, ToolCalls):
        output += [
            {
                "type": "function_call",
                "id": f"fc-{index}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments_text(),
                "status": "completed",
            }
            for index, call in enumerate(reply.calls)
        ]
    usage = reply.usage
    return {
        "id": f"resp-{request.number}",
        "object": "response",
        "created_at": CREATED,
        "model": request.model,
        "status": "completed" if reason is None else "incomplete",
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        **extra,
    }


def _error(reply: Status) -> web.Response:
    error = {"message": reply.message, "type": "scripted_error", "param": None, "code": reply.code}
    retried = reply.status in (408, 409, 429) or reply.status >= 500
    headers = {"retry-after": f"{reply.retry_after_s:g}"} if retried and reply.retry_after_s is not None else {}
    return web.json_response({"error": error}, status=reply.status, headers=headers)


def _drop(http: web.BaseRequest) -> web.Response:
    if http.transport is not None:
        http.transport.abort()
    return web.Response()


async def _drop_midway(http: web.BaseRequest, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(body))})
    await response.prepare(http)
    await response.write(body[: len(body) // 2])
    if http.transport is not None:
        http.transport.close()
    return response


class _Instant(asyncio.Protocol):
    """Just enough HTTP/1.1 to answer a well-behaved client: one prebuilt response a request, in order."""

    def __init__(self, answers: Mapping[bytes, bytes], latency_s: float) -> None:
        self._answers = answers
        self._latency_s = latency_s
        self._pending = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own does not derive from it

    def data_received(self, data: bytes) -> None:
        pending = self._pending + data if self._pending else data
        while (head_end := pending.find(b"\r\n\r\n")) >= 0:
            head = pending[:head_end].lower()
            end = head_end + 4 + _content_length(head)
            if len(pending) < end:
                break
            pending = pending[end:]
            self._answer(self._answers.get(head.split(b" ", 2)[1], _NOT_FOUND))
        self._pending = pending

    def _answer(self, answer: bytes) -> None:
        assert self._transport is not None
        if self._latency_s:
            asyncio.get_running_loop().call_later(self._latency_s, self._transport.write, answer)
        else:
            self._transport.write(answer)


def _content_length(head: bytes) -> int:
    start = head.find(b"\r\ncontent-length:")
    if start < 0:
        return 0
    end = head.find(b"\r\n", start + 2)
    return int(head[start + 17 : end if end >= 0 else None])


def _http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status.encode(),
        len(body),
        body,
    )


_NOT_FOUND = _http("404 Not Found", b'{"error": {"message": "no such path here"}}')


async def serve_instantly(answer: str, port: int, latency_s: float) -> None:
    """Run the instant server until SIGTERM or Ctrl-C; prints its URL as one line of JSON once it listens."""
    request = Request(0, "/v1/chat/completions", {}, b'{"model": "instant"}')
    models = json.dumps({"object": "list", "data": [{"id": "instant", "object": "model"}]}).encode()
    answers = {
        b"/v1/chat/completions": _http("200 OK", json.dumps(_chat_body(Text(answer), request)).encode()),
        b"/v1/responses": _http("200 OK", json.dumps(_responses_body(Text(answer), request)).encode()),
        b"/v1/models": _http("200 OK", models),
    }
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: _Instant(answers, latency_s), HOST, port, backlog=4096)
    print(json.dumps({"base_url": f"http://{HOST}:{server.sockets[0].getsockname()[1]}/v1"}), flush=True)
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rollstream.testing.model_server",
        description="Give every request the same answer, as fast as possible, on 127.0.0.1. For benchmarks.",
    )
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--answer", required=True, metavar="TEXT", help="text of every answer")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="how long every answer takes")
    given = parser.parse_args()
    uvloop.run(serve_instantly(given.answer, given.port, given.latency_ms / 1000))


if __name__ == "__main__":
    main()
