"""Models behind OpenAI-compatible servers, through the `openai` SDK with its aiohttp transport.

One SDK client for each endpoint and process. Requests go through the SDK's raw `post`, which keeps its retries, back-off and
error types but skips building response objects: half the CPU per call.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import httpx2
import openai
from openai import AsyncOpenAI, DefaultAioHttpClient

from rollstream.errors import ModelFailure
from rollstream.models import formats
from rollstream.models.protocol import Completion, ContextOverflow, ModelClient
from rollstream.settings import ModelSettings, Settings
from schemas.envelope import now
from schemas.values import ChatMessage, JsonObject, Sampling, clean_text

_OVERFLOW = ("context length", "context_length", "context size", "context window", "maximum context", "too many tokens")
_REFUSED = {401: "model_unauthorized", 402: "model_payment_required", 403: "model_forbidden"}


class OpenAIModel:
    """`ModelClient` for one `[models.NAME]`."""

    def __init__(self, settings: ModelSettings, client: AsyncOpenAI, max_output_bytes: int) -> None:
        self._settings = settings
        self._client = client
        self._max_output_bytes = max_output_bytes

    async def complete(self, messages: Sequence[ChatMessage], tools: Sequence[JsonObject], sampling: Sampling) -> Completion:
        settings = self._settings
        merged = settings.sampling.model_copy(update=sampling.model_dump(exclude_none=True))
        if settings.api == "chat":
            path, body = "/chat/completions", formats.chat_request(settings.model, messages, tools, merged)
        else:
            path, body = "/responses", formats.responses_request(settings.model, messages, tools, merged)
        started_at, started = now(), time.monotonic()
        try:
            reply = await self._client.post(path, body=body, cast_to=httpx2.Response)
        except openai.APIError as error:
            raise self._failure(error) from None
        try:
            response, escaped = formats.parse_json(reply.content, self._max_output_bytes)
            read = formats.chat_answer if settings.api == "chat" else formats.responses_answer
            answer = read(response)
        except formats.Malformed as error:
            raise ModelFailure(
                f"model server {settings.base_url} answered {reply.status_code}, but {error}",
                kind="model_bad_response",
                retryable=True,
            ) from None
        return Completion(
            message=answer.message,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            response=response,
            model=answer.model or settings.model,
            started_at=started_at,
            duration_s=time.monotonic() - started,
            attempts=1 + int(reply.request.headers.get("x-stainless-retry-count", "0")),
            escaped=escaped,
        )

    def _failure(self, error: openai.APIError) -> Exception:
        where = f"model server {self._settings.base_url} (model {self._settings.model})"
        detail = clean_text(str(error))[:500]
        if isinstance(error, openai.APIStatusError):
            status = error.status_code
            if status in (400, 413) and any(word in detail.lower() for word in _OVERFLOW):
                return ContextOverflow(f"{where}: {detail}")
            if status in _REFUSED:
                remedy = f"check the key in {self._settings.api_key_env}"
                return ModelFailure(f"{where} answered {status}: {detail}; {remedy}", kind=_REFUSED[status], retryable=False)
            if status == 429:
                return ModelFailure(f"{where} answered 429: {detail}", kind="model_rate_limited", retryable=True)
            if status >= 500 or status in (408, 409):
                return ModelFailure(f"{where} answered {status}: {detail}", kind="model_unavailable", retryable=True)
            return ModelFailure(f"{where} answered {status}: {detail}", kind="model_rejected_request", retryable=False)
        if isinstance(error, openai.APITimeoutError):
            limit = f"{self._settings.timeout_s:g} s"
            return ModelFailure(f"{where} gave no answer within {limit}", kind="model_timeout", retryable=True)
        return ModelFailure(f"{where} cannot be reached: {detail}", kind="model_unreachable", retryable=True)


class ModelPool:
    """All models of the settings, by name, over one HTTP client. Close it when the worker stops."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models: dict[str, OpenAIModel] = {}
        self._http: Any = None

    def get(self, name: str) -> ModelClient:
        """The model called `name`: a section of the settings, else an id that the `default` endpoint serves."""
        if name not in self._models:
            self._models[name] = self._create(resolve(self._settings, name))
        return self._models[name]

    def _create(self, model: ModelSettings) -> OpenAIModel:
        if self._http is None:
            lanes = self._settings.limits.max_concurrent_episodes
            limits = httpx2.Limits(max_connections=max(100, lanes), max_keepalive_connections=max(100, lanes))
            self._http = DefaultAioHttpClient(limits=limits)
        client = AsyncOpenAI(
            base_url=model.base_url,
            # Local servers want no key, but the SDK insists on one.
            api_key=os.environ.get(model.api_key_env) or "none",
            timeout=model.timeout_s,
            max_retries=model.max_retries,
            http_client=self._http,
        )
        return OpenAIModel(model, client, self._settings.limits.max_output_bytes)

    async def close(self) -> None:
        self._models.clear()
        if self._http is not None:
            with contextlib.suppress(RuntimeError):
                await self._http.aclose()
            self._http = None


def resolve(settings: Settings, name: str) -> ModelSettings:
    """`[models.NAME]`, or the default endpoint asked for the id `name`."""
    found = settings.model_named(name)
    if found is not None:
        return found
    default = settings.model_named("default")
    assert default is not None, "`default` always resolves"
    return default.model_copy(update={"model": name})
