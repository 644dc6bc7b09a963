"""A model server for tests that answers, or fails, as a script says. Listens on 127.0.0.1 only.

    async with ScriptedModelServer(in_turn(Status(503), Text("42"))) as server:
        ... ModelSettings(base_url=server.base_url) ...
        assert len(server.requests) == 2

It speaks OpenAI's Chat Completions and Responses and Anthropic's Messages, so that any agent's program can be played with it.
The *instant* server of benchmarks is another one: `rollstream.testing.instant_model`.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any

from aiohttp import web

from rollstream.testing.model_apis import body_of, events_of
from rollstream.testing.replies import (
    CONTEXT_OVERFLOW,
    CREATED,
    EMPTY_CHOICES,
    ENDPOINTS,
    INVALID_UTF8,
    LONE_SURROGATE,
    NAN,
    NOT_JSON,
    USAGE,
    Call,
    Dropped,
    Hang,
    Held,
    Raw,
    RawText,
    Reply,
    Request,
    Script,
    Slow,
    Status,
    Text,
    ToolCalls,
    always,
    big_text,
    in_turn,
    tool_call,
)

__all__ = [
    "CONTEXT_OVERFLOW",
    "EMPTY_CHOICES",
    "INVALID_UTF8",
    "LONE_SURROGATE",
    "NAN",
    "NOT_JSON",
    "USAGE",
    "Call",
    "Dropped",
    "Hang",
    "Held",
    "Raw",
    "RawText",
    "Reply",
    "Request",
    "Script",
    "ScriptedModelServer",
    "Slow",
    "Status",
    "Text",
    "ToolCalls",
    "always",
    "big_text",
    "in_turn",
    "tool_call",
]

HOST = "127.0.0.1"


class ScriptedModelServer:
    """Serves `/v1/chat/completions`, `/v1/responses`, `/v1/messages` and `/v1/models` on a free port of 127.0.0.1 inside the
    running loop; streamed, where it is asked to.

    Attributes:
        requests: every completion request so far, oldest first; `/v1/models` and counts of tokens are not counted.

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
        if http.path not in ENDPOINTS:
            return _error(Status(404, f"no such path here: {http.path}"))
        if ENDPOINTS[http.path] == "models":
            data = [{"id": model, "object": "model", "created": CREATED, "owned_by": "script"} for model in self._models]
            return web.json_response({"object": "list", "data": data})
        headers = {name.lower(): value for name, value in http.headers.items()}
        raw = await http.read()
        if ENDPOINTS[http.path] == "count_tokens":
            return web.json_response({"input_tokens": max(1, len(raw) // 4)})
        async with self._arrived:
            request = Request(len(self.requests), http.path, headers, raw)
            self.requests.append(request)
            self._arrived.notify_all()
        try:
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
                return await _drop_midway(http, body_of(Text("never told in full"), request))
            case Status():
                return _error(reply)
            case Raw(body, status, content_type):
                return web.Response(body=body, status=status, content_type=content_type)
            case Text() | ToolCalls() if request.body.get("stream"):
                return await _stream(http, events_of(reply, request))
            case _:
                return web.Response(body=body_of(reply, request), content_type="application/json")

    async def _closed_or(self, wait: Coroutine[Any, Any, object]) -> None:
        """Wait, but not longer than the server lives."""
        tasks = [asyncio.create_task(wait), asyncio.create_task(self._closing.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()


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


async def _stream(http: web.BaseRequest, events: Iterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(http)
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response
