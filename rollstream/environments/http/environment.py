"""The environment side of the contract: every method is one request to the server.

Nothing is kept between requests, not even a connection: instances are shared, and belong to no event loop.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import aiohttp
import orjson
from pydantic import ConfigDict, JsonValue, ValidationError

from rollstream.environments.http.contract import (
    CloseAnswer,
    CloseRequest,
    ReferenceAnswer,
    ReferenceRequest,
    SeedAnswer,
    SeedRequest,
    StepAnswer,
    StepRequest,
    VerifyAnswer,
    VerifyRequest,
)
from rollstream.environments.protocol import (
    Episode,
    OpenServices,
    Seeded,
    Services,
    StepResult,
    StepServices,
    Task,
    TaskLimits,
    Verdict,
    World,
)
from rollstream.errors import EnvironmentFailure, Refused, Stage
from rollstream.settings import HttpEnvironmentSettings
from schemas.action import ToolCall, Utterance
from schemas.events import describe
from schemas.session import Submission
from schemas.values import JsonObject, Value, clean, parse_json

A = TypeVar("A", bound=Value)

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_DETAIL = 300
ALWAYS_PUBLIC = frozenset({"messages", "tools"})
RETRYABLE = frozenset({408, 425, 429})
NOT_THERE = 404


class HttpTask(Task):
    """A row as it is: its schema is the server's business."""

    model_config = ConfigDict(extra="allow")

    def row(self) -> JsonObject:
        return self.model_dump(mode="json", exclude_unset=True)


class HttpWorld(World):
    """What the server returned last, to be given back to it."""

    state: JsonValue = None


class _NoSuchCall(Exception):
    """The server has no such path."""


class HttpEnvironment:
    """An environment called `name` on a server that the settings declare."""

    task_type = HttpTask
    world_type = HttpWorld
    seed_blocks = True
    verify_closes = True

    def __init__(self, name: str, settings: HttpEnvironmentSettings) -> None:
        self.name = name
        self.version = settings.version
        self.public_fields = frozenset(settings.public_fields)
        self.success_threshold = settings.success_threshold
        self._settings = settings

    def seed(self, task: HttpTask) -> Seeded:
        public = {name: value for name, value in task.row().items() if name in self.public_fields | ALWAYS_PUBLIC}
        answer = self._now("/seed", SeedRequest(task=public), SeedAnswer, "seed")
        acts = answer.interaction != "single_turn"
        return Seeded(
            messages=answer.messages,
            tools=answer.tools,
            interaction=answer.interaction,
            world=HttpWorld(state=answer.state) if acts else None,
            limits=TaskLimits(**answer.limits.model_dump()),
        )

    def reference(self, task: HttpTask) -> Submission | None:
        solution = self._solution(task)
        return None if solution is None else solution.submission

    def reference_actions(self, task: HttpTask) -> Sequence[ToolCall | Utterance]:
        solution = self._solution(task)
        return () if solution is None else solution.actions

    async def step(
        self, world: HttpWorld, action: ToolCall | Utterance, services: StepServices
    ) -> tuple[HttpWorld, StepResult]:
        asked = StepRequest(state=world.state, action=action, index=services.index)
        answer = await self._ask("/step", asked, StepAnswer, "agent")
        result = StepResult(
            answer.observation, answer.reward, answer.done, answer.truncated, info=answer.info, components=answer.components
        )
        return HttpWorld(state=answer.state), result

    async def open(self, world: HttpWorld, services: OpenServices) -> HttpWorld:
        """Nothing is said to the server: its first step opens what it needs."""
        return world

    async def resume(self, world: HttpWorld, services: OpenServices) -> HttpWorld:
        return world

    async def close(self, world: HttpWorld, services: OpenServices) -> None:
        await self._let_go(world.state)

    async def verify(self, task: HttpTask, episode: Episode, services: Services) -> Verdict:
        state = episode.world.state if isinstance(episode.world, HttpWorld) else None
        asked = VerifyRequest(
            task=task.row(),
            messages=episode.messages,
            submission=episode.submission,
            stop_reason=episode.stop_reason,
            state=state,
            steps=list(episode.steps),
        )
        answer = await self._ask("/verify", asked, VerifyAnswer, "verification")
        await self._let_go(state)
        return Verdict(answer.reward, answer.success, answer.components, answer.diagnostics)

    async def _let_go(self, state: JsonValue) -> None:
        try:
            await self._ask("/close", CloseRequest(state=state), CloseAnswer, "cleanup")
        except (_NoSuchCall, EnvironmentFailure, Refused) as error:
            # A courtesy: what a server holds it must be able to let go of by itself, and the verdict stands.
            if not isinstance(error, _NoSuchCall):
                log.warning("%s", error)

    def _solution(self, task: HttpTask) -> ReferenceAnswer | None:
        try:
            return self._now("/reference", ReferenceRequest(task=task.row()), ReferenceAnswer, "seed")
        except _NoSuchCall:
            return None

    def _now(self, path: str, asked: Value, answer: type[A], stage: Stage) -> A:
        """Ask and wait, also from within an event loop, which stands still meanwhile."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self._ask(path, asked, answer, stage))).result()

    async def _ask(self, path: str, asked: Value, answer: type[A], stage: Stage) -> A:
        """One request.

        Raises:
            EnvironmentFailure: no answer, or none that can be read.
            Refused: the server says that the task cannot be played.
            _NoSuchCall: a call that a server may leave out is not there.
        """
        where = f"environment {self.name} at {self._settings.url}{path}"
        status, raw = await self._exchange(path, asked, where, stage)
        if status == NOT_THERE and path in ("/reference", "/close"):
            raise _NoSuchCall
        if status != 200:
            raise _refusal(status, raw, where, stage)
        try:
            value, _ = parse_json(raw)
            return answer.model_validate(value)
        except ValidationError as error:
            found = describe(error)
        except ValueError as error:
            found = f"no JSON: {error}"
        raise EnvironmentFailure(
            f"{where}: expected {answer.__name__} (the contract has it), found {found}", stage=stage, kind="http_malformed"
        )

    async def _exchange(self, path: str, asked: Value, where: str, stage: Stage) -> tuple[int, bytes]:
        settings = self._settings
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=settings.timeout_s)) as session,
                session.post(
                    settings.url.rstrip("/") + path,
                    data=orjson.dumps(clean(asked.model_dump())[0]),
                    headers=self._headers(),
                    allow_redirects=False,
                ) as response,
            ):
                return response.status, await _bounded(response, where, stage)
        except TimeoutError:
            message = f"{where} did not answer within {settings.timeout_s:g} s"
            raise EnvironmentFailure(message, stage=stage, kind="http_timeout", retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            message = f"{where} cannot be reached: {str(error) or type(error).__name__}"
            raise EnvironmentFailure(message, stage=stage, kind="http_unreachable", retryable=True) from None

    def _headers(self) -> dict[str, str]:
        token = os.environ.get(self._settings.token_env, "") if self._settings.token_env else ""
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})


async def _bounded(response: aiohttp.ClientResponse, where: str, stage: Stage) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_chunked(65_536):
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            message = f"{where}: expected an answer of at most {MAX_ANSWER_BYTES} bytes, found more"
            raise EnvironmentFailure(message, stage=stage, kind="http_too_large")
        pieces.append(piece)
    return b"".join(pieces)


def _refusal(status: int, raw: bytes, where: str, stage: Stage) -> EnvironmentFailure | Refused:
    detail = _detail(raw)
    if status == 422:
        return Refused(f"{where} refuses: {detail or 'without a reason'}", stage=stage, kind="http_refused")
    retryable = status >= 500 or status in RETRYABLE
    message = f"{where}: expected 200, found {status}{f' ({detail})' if detail else ''}"
    return EnvironmentFailure(message, stage=stage, kind="http_status", retryable=retryable)


def _detail(raw: bytes) -> str:
    """What a server says of its refusal, as `{"detail": …}` or in its own way."""
    try:
        value: Any = parse_json(raw)[0]
    except ValueError:
        value = raw.decode("utf-8", "replace")
    told = value.get("detail", value) if isinstance(value, dict) else value
    return " ".join(str(told).split())[:MAX_DETAIL]
