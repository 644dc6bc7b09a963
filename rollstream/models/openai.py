"""Models behind OpenAI-compatible servers, through the `openai` SDK with its aiohttp transport.

One SDK client for each endpoint and process. Requests go through the SDK's raw `post`, which keeps its retries, back-off and
error types but skips building response objects: half the CPU per call.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx2
import openai
from openai import AsyncOpenAI, DefaultAioHttpClient

from rollstream.errors import CircuitOpen, ModelFailure, Refused
from rollstream.models import formats
from rollstream.models.breaker import CircuitBreaker
from rollstream.models.protocol import Completion, ContextOverflow, ModelClient
from rollstream.settings import ModelSettings, Settings
from schemas.envelope import now
from schemas.values import ChatMessage, JsonObject, Sampling, clean_text

MAX_RESPONSE_BYTES = 64 * 1024 * 1024
"""Nothing that a model says is longer; a server that goes on is cut off before it fills the memory."""
MAX_DETAIL = 500
"""Characters of a server's own words in our sentences."""
NO_KEY = "none"
"""Local servers want no key, but the SDK insists on one."""

_OVERFLOW = (
    "context length",
    "context_length",
    "context size",
    "context window",
    "maximum context",
    "too many tokens",
    "maximum number of tokens",
    "prompt is too long",
)
_OUTAGES = frozenset({"model_unreachable", "model_unavailable", "model_timeout"})
"""Failures that say that the endpoint is down, whoever asks."""
_REFUSED = {
    401: ("model_unauthorized", "check the key in {key}"),
    402: ("model_payment_required", "check the credit of the key in {key}"),
    403: ("model_forbidden", "check what the key in {key} may do"),
    404: ("model_not_found", "check the model's id and that base_url ends where its API begins, usually in /v1"),
}


class OpenAIModel:
    """`ModelClient` for one `[models.NAME]`."""

    def __init__(self, settings: ModelSettings, client: AsyncOpenAI, breaker: CircuitBreaker | None = None) -> None:
        self._settings = settings
        self._client = client
        self._breaker = breaker or CircuitBreaker()
        self._where = f"model server {public_url(settings.base_url)} (model {settings.model})"

    async def complete(
        self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], sampling: Sampling, max_output_bytes: int
    ) -> Completion:
        settings = self._settings
        merged = Sampling.model_validate(
            {**settings.sampling.model_dump(exclude_none=True), **sampling.model_dump(exclude_none=True)}
        )
        if settings.api == "chat":
            path, body = "/chat/completions", formats.chat_request(settings.model, messages, tools, merged)
        else:
            self._require_sendable(merged)
            path, body = "/responses", formats.responses_request(settings.model, messages, tools, merged)
        started_at, started = now(), time.monotonic()
        reply = await self._post(path, body)
        try:
            response, escaped = formats.parse_json(reply.content, max_output_bytes)
            read = formats.chat_answer if settings.api == "chat" else formats.responses_answer
            answer = read(response)
        except formats.Malformed as error:
            raise ModelFailure(
                f"{self._where} answered {reply.status_code}, but {self._quoted(str(error))}; check that base_url ends where "
                f"its API begins, and that it speaks the {settings.api} API",
                kind="model_bad_response",
                retryable=True,
            ) from None
        return Completion(
            message=answer.message,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            response=response,
            model=answer.model or settings.model,
            sampling=merged,
            started_at=started_at,
            duration_s=time.monotonic() - started,
            attempts=_attempts(reply.request),
            escaped=escaped,
        )

    def _require_sendable(self, sampling: Sampling) -> None:
        """Refuse what the Responses API would drop without a word."""
        unknown = [name for name in ("seed", "stop") if getattr(sampling, name) is not None]
        if unknown:
            raise Refused(
                f"{self._where} speaks the responses API, which takes no {' and no '.join(unknown)}: leave it out, or set "
                "the model's api to chat",
                stage="agent",
            )

    async def _post(self, path: str, body: JsonObject) -> httpx2.Response:
        """Send one request, unless the endpoint has failed so often that it is left alone for a while."""
        wait_s = self._breaker.wait_s()
        if wait_s > 0:
            raise CircuitOpen(f"{self._where} keeps failing; it is asked again in {wait_s:.0f} s", wait_s)
        try:
            reply = await self._send(path, body)
        except ModelFailure as error:
            if error.kind in _OUTAGES:
                self._breaker.failed()
            else:
                self._breaker.succeeded()
            raise
        except ContextOverflow:
            self._breaker.succeeded()
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return reply

    async def _send(self, path: str, body: JsonObject) -> httpx2.Response:
        timeout_s = self._settings.timeout_s
        try:
            # Ours is the only deadline: the SDK's are between two bytes, and it would begin again after each.
            async with asyncio.timeout(timeout_s):
                return await self._client.post(path, body=body, cast_to=httpx2.Response)
        except TimeoutError:
            raise ModelFailure(
                f"{self._where} gave no answer within {timeout_s:g} s; look at its load, or raise the model's timeout_s",
                kind="model_timeout",
                retryable=True,
            ) from None
        except openai.APIError as error:
            raise self._failure(error) from None

    def _failure(self, error: openai.APIError) -> Exception:
        if isinstance(error, openai.APIStatusError):
            return self._refused(error)
        # The transport reports a closed port as a timeout, but we give the SDK none that could pass.
        cause = self._quoted(str(error.__cause__ or error) or type(error.__cause__).__name__)
        return ModelFailure(
            f"{self._where} cannot be reached ({cause}), tried {_times(error.request)}; "
            "start it, or correct the model's base_url",
            kind="model_unreachable",
            retryable=True,
        )

    def _refused(self, error: openai.APIStatusError) -> Exception:
        """What a status of 400 or more means."""
        detail, tried = self._quoted(_words(error)), _times(error.request)
        return failure_of(self._where, self._settings.api_key_env, error.status_code, detail, error.code, tried)

    def _quoted(self, text: str) -> str:
        """A server's own words in one line, fit for the log, without the key that some servers repeat."""
        key = self._client.api_key
        shown = text.replace(key, f"${self._settings.api_key_env}") if key != NO_KEY else text
        return clean_text(" ".join(shown.split()))[:MAX_DETAIL]


def failure_of(
    where: str, key_env: str, status: int, detail: str, code: str | None, tried: str
) -> ModelFailure | ContextOverflow:
    """What a status of 400 or more means.

    Args:
        where: the server, for the sentence.
        detail: the server's own words, fit for the log.
        code: its own code of the error, if it has one.
        tried: how often it was asked, in words.
    """
    words = f"{detail} {code or ''}".lower()
    if status in (400, 413, 422) and any(word in words for word in _OVERFLOW):
        return ContextOverflow(f"{where}: {detail}")
    said = f"{where} answered {status}: {detail}"
    if status in _REFUSED:
        kind, remedy = _REFUSED[status]
        return ModelFailure(f"{said}; {remedy.format(key=key_env)}", kind=kind, retryable=False)
    if status == 429 and code == "insufficient_quota":
        return ModelFailure(f"{said}; check the credit of the key in {key_env}", kind=_REFUSED[402][0], retryable=False)
    if status == 429:
        remedy = "lower limits.max_concurrent_episodes, or raise the model's max_retries"
        return ModelFailure(f"{said} (tried {tried}); {remedy}", kind="model_rate_limited", retryable=True)
    if status >= 500 or status in (408, 409):
        return ModelFailure(f"{said} (tried {tried}); look at its log", kind="model_unavailable", retryable=True)
    return ModelFailure(f"{said}; check the model's id and sampling", kind="model_rejected_request", retryable=False)


def _words(error: openai.APIStatusError) -> str:
    """What the server said, without what the SDK puts around it."""
    found = error.body
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return str(found or error.response.text or error.response.reason_phrase)


def _attempts(request: httpx2.Request) -> int:
    """How often a request was sent; the SDK counts in a header."""
    return 1 + int(request.headers.get("x-stainless-retry-count", "0"))


def _times(request: httpx2.Request) -> str:
    attempts = _attempts(request)
    return "once" if attempts == 1 else f"{attempts} times"


def public_url(base_url: str) -> str:
    """A URL without what may be secret in it: user, password and query."""
    parts = urlsplit(base_url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class _BoundedBody(httpx2.AsyncByteStream):
    """A response body that breaks off when it grows beyond all reason."""

    def __init__(self, body: httpx2.AsyncByteStream, url: httpx2.URL) -> None:
        self._body = body
        self._url = url

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for chunk in self._body:
            seen += len(chunk)
            if seen > MAX_RESPONSE_BYTES:
                raise ModelFailure(
                    f"model server {public_url(str(self._url))} answered more than {MAX_RESPONSE_BYTES} bytes; set max_tokens",
                    kind="model_bad_response",
                    retryable=False,
                )
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()


async def _bound(response: httpx2.Response) -> None:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedBody(response.stream, response.request.url)


class ModelPool:
    """All models of the settings, by name, over one HTTP client. Close it when the worker stops."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models: dict[str, OpenAIModel] = {}
        self._breakers: dict[str, CircuitBreaker] = {}
        self._http: Any = None

    def get(self, name: str) -> ModelClient:
        """The model called `name`: a section of the settings, else an id that the `default` endpoint serves.

        Raises:
            Refused: its URL or its key cannot be one.
        """
        if name not in self._models:
            self._models[name] = self._create(resolve(self._settings, name))
        return self._models[name]

    def _create(self, model: ModelSettings) -> OpenAIModel:
        if self._http is None:
            lanes = self._settings.limits.max_concurrent_episodes
            limits = httpx2.Limits(max_connections=max(100, lanes), max_keepalive_connections=max(100, lanes))
            self._http = DefaultAioHttpClient(limits=limits, event_hooks={"response": [_bound]})
        client = AsyncOpenAI(
            base_url=endpoint_of(model),
            api_key=key_of(model),
            timeout=None,
            max_retries=model.max_retries,
            http_client=self._http,
        )
        return OpenAIModel(model, client, self._breakers.setdefault(model.base_url, CircuitBreaker()))

    async def close(self) -> None:
        self._models.clear()
        if self._http is not None:
            with contextlib.suppress(RuntimeError):
                await self._http.aclose()
            self._http = None


def endpoint_of(model: ModelSettings) -> str:
    """The URL of a model.

    Raises:
        Refused: no client could use it. The sentence does not quote a password.
    """
    parts = urlsplit(model.base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused(f"expected base_url of model {model.model} as http://HOST:PORT/v1, found {public_url(model.base_url)!r}")
    if parts.username is not None or parts.query:
        raise Refused(f"base_url of model {model.model} holds a password or a query; put the key in {model.api_key_env}")
    return model.base_url


def key_of(model: ModelSettings) -> str:
    """The key of a model, or `NO_KEY`.

    Raises:
        Refused: what is in the variable can be no key. It would otherwise be quoted by whatever stumbles over it.
    """
    key = os.environ.get(model.api_key_env, "").strip()
    if not key.isascii() or not key.isprintable():
        message = f"expected a key of printable ASCII in {model.api_key_env}, found other characters; set it again"
        raise Refused(message, stage="agent", kind="model_unauthorized")
    return key or NO_KEY


def resolve(settings: Settings, name: str) -> ModelSettings:
    """`[models.NAME]`, or the default endpoint asked for the id `name`."""
    found = settings.model_named(name)
    if found is not None:
        return found
    default = settings.model_named("default")
    assert default is not None, "`default` always resolves"
    return default.model_copy(update={"model": name})
