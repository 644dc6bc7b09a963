"""The harnesses that work in boxes pass the suite of all harnesses: real programs, in bubblewrap, against scripted models."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from rollstream.models.protocol import ContextOverflow
from rollstream.settings import CommandSettings, HarnessSettings
from rollstream.testing.harnesses import Asked, HarnessConformance, ScriptedModels
from rollstream.testing.model_server import Hang, Reply, Request, Status, Text
from schemas.session import Interaction, SessionReady
from schemas.step import Execution
from schemas.values import text_of
from services.agent_worker.harnesses import registry
from services.agent_worker.harnesses.protocol import AgentBox, Harness
from tests.sandboxes.agents import WORKER, agents, ready

pytestmark = pytest.mark.slow

FULL = Status(400, "prompt is too long: 4096 tokens > 128 maximum", code="context_length_exceeded")
ASKS = """
import json, os, sys, urllib.request as u
body = {"messages": [{"role": "user", "content": sys.stdin.read()}]}
request = u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
answer = json.load(u.urlopen(request))
choice = answer["choices"][0]
print(json.dumps({**choice["message"], "finish_reason": choice["finish_reason"], "usage": answer["usage"]}))
"""
"""Python: the smallest agent there can be."""


class InBox(HarnessConformance):
    """A harness whose box is one of bubblewrap's, and whose model is the suite's."""

    name: ClassVar[str]
    played: ClassVar[tuple[Interaction, ...]] = ("single_turn", "agent_in_env")
    """Interactions that are not the same to the harness, or cost next to nothing."""
    settings: ClassVar[HarnessSettings] = HarnessSettings()

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _programs(cls, bubblewrap: None, harnesses: HarnessSettings) -> None:
        # Asking again would only take time: that programs do so is tested elsewhere.
        claude = harnesses.claude_code.model_copy(update={"env": {"CLAUDE_CODE_MAX_RETRIES": "0"}})
        once = ["request_max_retries=0", "stream_max_retries=0"]
        codex = harnesses.codex.model_copy(
            update={"args": [part for option in once for part in ("-c", f"model_providers.rollstream.{option}")]}
        )
        command = CommandSettings(argv=["python3", "-c", ASKS], steps="jsonl")
        cls.settings = HarnessSettings(claude_code=claude, codex=codex, command=command)

    def _claims(self) -> tuple[Interaction, ...]:
        assert self.harness().capabilities.interactions.issuperset(self.played)
        return self.played

    def harness(self) -> Harness:
        return registry.load(self.name)

    @asynccontextmanager
    async def box(self, descriptor: SessionReady, models: ScriptedModels) -> AsyncIterator[AgentBox]:
        def script(request: Request) -> Reply:
            messages = [{"role": message.get("role"), "content": text_of(message)} for message in request.messages]
            answer = models.answer(Asked("policy", messages, []))  # type: ignore[arg-type]
            if isinstance(answer, asyncio.Event):
                return Hang()
            if isinstance(answer, ContextOverflow):
                return FULL
            if isinstance(answer, Exception):
                return Status(500)
            return Text(text_of(answer), finish_reason=models.finish_reason)

        folder = await asyncio.to_thread(tempfile.TemporaryDirectory)
        with folder as path:
            async with agents("bubblewrap", script, Path(path), harnesses=self.settings) as here:
                placed = ready(self.name, "bubblewrap", interaction=descriptor.interaction)
                async with here.boxes.of(placed, self.harness(), Execution(id="execution", worker=WORKER)) as opened:
                    assert opened is not None
                    yield opened.box


class TestCommand(InBox):
    name = "command"


class TestClaudeCode(InBox):
    name = "claude_code"
    played: ClassVar[tuple[Interaction, ...]] = ("single_turn",)


class TestCodex(InBox):
    name = "codex"
    played: ClassVar[tuple[Interaction, ...]] = ("single_turn",)
