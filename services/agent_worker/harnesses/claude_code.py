"""`claude_code`: Anthropic's Claude Code, in the agent's box. It talks to the run's model by Anthropic's Messages API."""

from collections.abc import Mapping
from datetime import datetime
from typing import ClassVar
from uuid import NAMESPACE_OID, uuid5

import orjson

from schemas.session import SessionReady
from services.agent_worker.harnesses.claude_stream import ClaudeStream
from services.agent_worker.harnesses.cli import CAPABILITIES, KEY, CliSession, StreamParser
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models

TOOLS = "Bash,Edit,Read,Write,Glob,Grep"
MAX_RETRIES = 4


class ClaudeCodeHarness:
    name: ClassVar[str] = "claude_code"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = CAPABILITIES

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> CliSession:
        return CliSession(ClaudeCode(), descriptor, models, box)


class ClaudeCode:
    """The program."""

    name = ClaudeCodeHarness.name

    def argv(self, box: AgentBox, session: str, resume: str | None) -> list[str]:
        own = str(uuid5(NAMESPACE_OID, session))
        known = ["--resume", resume] if resume else ["--session-id", own]
        return [
            box.program,
            "--bare",
            "-p",
            *("--model", box.model, "--dangerously-skip-permissions"),
            # Where the environment has tools, they are the world; a shell beside them would only lead astray.
            *("--tools", "" if box.tools_url else TOOLS),
            *(("--mcp-config", _tools(box.tools_url), "--strict-mcp-config") if box.tools_url else ()),
            *("--output-format", "stream-json", "--verbose", "--include-partial-messages"),
            *known,
            *box.settings.claude_code.args,
        ]

    def env(self, box: AgentBox) -> Mapping[str, str]:
        return {
            "ANTHROPIC_BASE_URL": box.model_url or "",
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_RETRIES": str(MAX_RETRIES),
            "DISABLE_AUTOUPDATER": "1",
            # Where the box's user is root, the program would refuse to act without asking.
            "IS_SANDBOX": "1",
            **box.settings.claude_code.env,
        }

    def parser(self, started_at: datetime, before: StreamParser | None) -> ClaudeStream:
        return ClaudeStream(started_at, before.cost_usd if isinstance(before, ClaudeStream) else 0.0)


def _tools(url: str) -> str:
    """The program's configuration of the environment's tools."""
    return orjson.dumps({"mcpServers": {"environment": {"type": "http", "url": url}}}).decode()
