"""The way from a box to the policy model, and to nothing else: a socket for each session, served here.

What comes out of a box is an agent's: only the paths of model APIs pass, the run's model is asked whatever was asked for, and
the key is put in here, so that it never enters a box. What the server refuses is kept for the harness: a program that stops
because its model is away looks from outside like one that has finished.
"""

import asyncio
import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import aiohttp
import orjson
from aiohttp import web

from rollstream.errors import ModelFailure, SandboxUnavailable
from rollstream.models.openai import (
    MAX_DETAIL,
    MAX_RESPONSE_BYTES,
    NO_KEY,
    endpoint_of,
    failure_of,
    key_of,
    public_url,
    resolve,
)
from rollstream.models.protocol import ContextOverflow
from rollstream.sandboxes.records import make_own
from rollstream.settings import ModelSettings, Settings
from schemas.values import JsonObject, clean_text
from services.agent_worker.mcp import ToolDesk

ASKING = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths of model calls; a failure there is the model's."""
PATHS = ASKING | {"/v1/messages/count_tokens"}
MODELS = "/v1/models"
MCP = "/mcp"
PASSED_ON = ("accept", "content-type", "anthropic-version", "anthropic-beta", "openai-beta", "user-agent")
PASSED_BACK = ("content-type", "cache-control", "retry-after", "request-id", "x-request-id")
MAX_REQUEST_BYTES = 32 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
AT_ONCE = 16
"""Requests of one session; more wait."""
CHUNK = 64 * 1024
BROKEN_OFF = re.compile(rb"(?:^|\n)event: ?(?:error|response\.failed)\b")
"""How a server says within a stream that began well that nothing will come of it. Data has no line breaks, so no text is it."""


def sockets_dir() -> Path:
    """Where sockets stand: others may pass through, and must know a name to get to one."""
    if os.geteuid() == 0:
        return Path("/run/rollstream/egress")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"rollstream-egress-{os.geteuid()}"


@dataclass(slots=True, eq=False)
class Passage:
    """One session's way to its model."""

    model: ModelSettings
    key: str
    socket: Path
    desk: ToolDesk | None = None
    failure: ModelFailure | ContextOverflow | None = None
    """Of the last call that ended, if it failed."""
    _waiting: dict[object, float] = field(default_factory=dict)
    _given_up_after_s: float = 0.0
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    @property
    def waiting_s(self) -> float:
        """How long the server has been silent in a call that is under way, or had been when the last one was given up."""
        return time.monotonic() - min(self._waiting.values()) if self._waiting else self._given_up_after_s

    @property
    def retryable(self) -> bool:
        """Whether asking again can help."""
        return isinstance(self.failure, ModelFailure) and self.failure.retryable

    @property
    def where(self) -> str:
        return f"model server {public_url(self.model.base_url)} (model {self.model.model})"

    def heard(self, call: object) -> None:
        self._waiting[call] = time.monotonic()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[object]:
        async with self._room:
            call = object()
            self.heard(call)
            self._given_up_after_s = 0.0
            try:
                yield call
            except asyncio.CancelledError:
                self._given_up_after_s = self.waiting_s
                raise
            finally:
                self._waiting.pop(call, None)

    def headers(self, given: web.BaseRequest) -> dict[str, str]:
        """What is sent on: what model servers understand, and our key where the agent has put what it takes for one."""
        headers = {name: given.headers[name] for name in PASSED_ON if name in given.headers}
        headers["accept-encoding"] = "identity"
        if self.key != NO_KEY:
            if "x-api-key" in given.headers:
                headers["x-api-key"] = self.key
            if "authorization" in given.headers or "x-api-key" not in given.headers:
                headers["authorization"] = f"Bearer {self.key}"
        return headers

    def note_status(self, status: int, body: bytes) -> None:
        detail, code = _words(body)
        shown = detail.replace(self.key, f"${self.model.api_key_env}") if self.key != NO_KEY else detail
        shown = clean_text(" ".join(shown.split()))[:MAX_DETAIL]
        self.failure = failure_of(self.where, self.model.api_key_env, status, shown, code, "by the agent's own program")

    def note_outage(self, what: str, kind: str = "model_unreachable") -> None:
        self.failure = ModelFailure(f"{self.where} {what}", kind=kind, retryable=True)


def _words(body: bytes) -> tuple[str, str | None]:
    """A server's own words in an error, and its code for it."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace"), None
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return str(error), None
    code = error.get("code")
    return str(error.get("message") or error.get("detail") or error), code if isinstance(code, str) else None


class Egress:
    """Opens passages. One per process; close it when the worker stops."""

    def __init__(self, settings: Settings, folder: Path | None = None) -> None:
        self._settings = settings
        self._folder = folder or sockets_dir()
        self._client: aiohttp.ClientSession | None = None
        self._swept = False

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    @asynccontextmanager
    async def passage(self, name: str, desk: ToolDesk | None = None) -> AsyncIterator[Passage]:
        """A way to the model called `name`, for the time of the `with`.

        Args:
            desk: that answers calls of the environment's tools, if it has any.

        Raises:
            Refused: its URL or its key cannot be one.
            SandboxUnavailable: no socket can be made.
        """
        model = resolve(self._settings, name)
        endpoint_of(model)
        passage = Passage(model, key_of(model), self._folder / f"{uuid4().hex[:20]}.sock", desk)
        server = web.Server(lambda request: self._serve(passage, request), handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        try:
            try:
                self._make_folder()
                await runner.setup()
                await web.UnixSite(runner, str(passage.socket)).start()
                passage.socket.chmod(0o666)
            except OSError as error:
                raise SandboxUnavailable(
                    f"no socket for a box can be made in {self._folder}: {error}", stage="agent"
                ) from error
            yield passage
        finally:
            await runner.cleanup()
            passage.socket.unlink(missing_ok=True)

    def _make_folder(self) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        make_own(self._folder)
        if not self._swept:
            self._swept = True
            _sweep(self._folder)

    async def _serve(self, passage: Passage, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == MODELS and request.method == "GET":
            entry: JsonObject = {"id": passage.model.model, "object": "model", "type": "model", "owned_by": "rollstream"}
            return web.json_response({"object": "list", "data": [entry], "models": [], "has_more": False})
        if request.path == MCP and passage.desk is not None:
            return await _at_desk(passage.desk, request)
        if request.path not in PATHS or request.method != "POST":
            return _error(404, f"expected one of {', '.join(sorted(PATHS))}, found {request.method} {request.path[:100]}")
        try:
            body = await _body(request)
        except ValueError as error:
            return _error(413 if isinstance(error, _TooLarge) else 400, str(error))
        asked = orjson.dumps({**body, "model": passage.model.model})
        async with passage.call() as call:
            return await self._pass_on(passage, request, asked, call)

    async def _pass_on(self, passage: Passage, request: web.BaseRequest, body: bytes, call: object) -> web.StreamResponse:
        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        asking = request.path in ASKING
        url = passage.model.base_url.rstrip("/") + request.path_qs.removeprefix("/v1")
        timeout = aiohttp.ClientTimeout(total=passage.model.timeout_s)
        response: web.StreamResponse | None = None
        try:
            async with self._client.post(url, data=body, headers=passage.headers(request), timeout=timeout) as reply:
                passage.heard(call)
                kept = {name: reply.headers[name] for name in PASSED_BACK if name in reply.headers}
                if reply.status >= 400:
                    words = await reply.content.read(MAX_ERROR_BYTES)
                    if asking:
                        passage.note_status(reply.status, words)
                        if not passage.retryable:
                            # Some programs ask ten times with a key that is refused.
                            kept["x-should-retry"] = "false"
                    return web.Response(status=reply.status, body=words, headers=kept)
                response = web.StreamResponse(status=reply.status, headers=kept)
                await response.prepare(request)
                fine = await _stream(reply, response, lambda: passage.heard(call))
                if asking and fine:
                    passage.failure = None
                elif asking:
                    passage.note_outage("broke off an answer with an error; look at its log", "model_unavailable")
                return response
        except TimeoutError:
            said = (
                f"gave no whole answer within {passage.model.timeout_s:g} s; look at its load, or raise the model's timeout_s"
            )
            return self._lost(passage, request, response, said, "model_timeout", 504, asking)
        except aiohttp.ClientError as error:
            said = f"cannot be reached ({type(error).__name__}: {error!s:.200}); start it, or correct the model's base_url"
            return self._lost(passage, request, response, said, "model_unreachable", 502, asking)

    @staticmethod
    def _lost(
        passage: Passage,
        request: web.BaseRequest,
        response: web.StreamResponse | None,
        said: str,
        kind: str,
        status: int,
        asking: bool,
    ) -> web.StreamResponse:
        if asking:
            passage.note_outage(said, kind)
        if response is None:
            return _error(status, f"the model server {said}")
        # What has begun as a good answer can only be cut off.
        if request.transport is not None:
            request.transport.abort()
        return response


async def _stream(reply: aiohttp.ClientResponse, response: web.StreamResponse, heard: Callable[[], None]) -> bool:
    """Pass an answer back as it comes. False if the server says in it that it failed, or goes on beyond all reason."""
    size, fine, last = 0, True, b""
    async for chunk in reply.content.iter_chunked(CHUNK):
        heard()
        size += len(chunk)
        if size > MAX_RESPONSE_BYTES:
            return False
        fine = fine and not BROKEN_OFF.search(last + chunk)
        last = chunk[-64:]
        await response.write(chunk)
    await response.write_eof()
    return fine


class _TooLarge(ValueError):
    """A request is larger than any model takes."""


async def _at_desk(desk: ToolDesk, request: web.BaseRequest) -> web.Response:
    """A message of the Model Context Protocol. Whoever wants to be told by itself of something (GET) is told nothing."""
    if request.method != "POST":
        return web.Response(status=405, headers={"allow": "POST"})
    try:
        answer = await desk.answer(await _body(request))
    except ValueError as error:
        return _error(413 if isinstance(error, _TooLarge) else 400, str(error))
    return web.Response(status=202) if answer is None else web.json_response(answer)


async def _body(request: web.BaseRequest) -> JsonObject:
    """The request's body.

    Raises:
        ValueError: it is no JSON object, or too large.
    """
    raw = bytearray()
    async for chunk in request.content.iter_chunked(CHUNK):
        raw += chunk
        if len(raw) > MAX_REQUEST_BYTES:
            raise _TooLarge(f"expected at most {MAX_REQUEST_BYTES} bytes, found more")
    try:
        body = orjson.loads(bytes(raw))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"expected JSON, found {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object, found a JSON {type(body).__name__}")
    return body


def _error(status: int, message: str) -> web.Response:
    """An error that both OpenAI's and Anthropic's clients understand."""
    error = {"type": "invalid_request_error" if status < 500 else "api_error", "message": message, "code": None}
    return web.json_response({"type": "error", "error": error}, status=status)


def _sweep(folder: Path) -> None:
    """Remove sockets that nobody listens on any more: their worker was killed."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.2)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError:
                continue
