"""`codex`: OpenAI's Codex CLI, in the agent's box. It talks to the run's model by OpenAI's Responses API."""

from collections.abc import Mapping
from datetime import datetime
from typing import ClassVar

from schemas.session import SessionReady
from services.agent_worker.harnesses.cli import CAPABILITIES, KEY, CliSession, StreamParser
from services.agent_worker.harnesses.codex_stream import CodexStream
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models

PROVIDER = "rollstream"
MAX_RETRIES = 4
STREAM_RETRIES = 1
"""Each is as many requests again."""
OFF = ("plugins", "apps", "remote_plugin", "multi_agent", "goals", "enable_request_compression")
"""Of its features: what needs a network, what our side could not read, and agents whose calls it does not tell of."""


class CodexHarness:
    name: ClassVar[str] = "codex"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = CAPABILITIES

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> CliSession:
        return CliSession(Codex("" if box is None else box.model), descriptor, models, box)


class Codex:
    """The program, asking for one model."""

    name = CodexHarness.name

    def __init__(self, model: str) -> None:
        self._model = model

    def argv(self, box: AgentBox, session: str, resume: str | None) -> list[str]:
        provider = (
            f'{{name="{PROVIDER}",base_url="{box.model_url}/v1",env_key="OPENAI_API_KEY",wire_api="responses",'
            f"request_max_retries={MAX_RETRIES},stream_max_retries={STREAM_RETRIES}}}"
        )
        options = [f"model_provider={PROVIDER}", f"model_providers.{PROVIDER}={provider}", "analytics.enabled=false"]
        options += [f'mcp_servers.environment.url="{box.tools_url}"'] if box.tools_url else []
        options += ["check_for_update_on_startup=false", "web_search=disabled"]
        return [
            box.program,
            *("exec", "--json", "--skip-git-repo-check", "--ignore-user-config"),
            # The box is the sandbox.
            "--dangerously-bypass-approvals-and-sandbox",
            *("-C", box.sandbox.workdir, "-m", box.model),
            *(part for option in options for part in ("-c", option)),
            # Where the environment has tools, they are the world; a shell beside them would only lead astray.
            *(part for name in (*OFF, *(["shell_tool"] if box.tools_url else [])) for part in ("--disable", name)),
            *box.settings.codex.args,
            *(("resume", resume) if resume else ()),
            "-",
        ]

    def env(self, box: AgentBox) -> Mapping[str, str]:
        return {"OPENAI_API_KEY": KEY, **box.settings.codex.env}

    def parser(self, started_at: datetime, before: StreamParser | None) -> CodexStream:
        return CodexStream(started_at, self._model, before.total if isinstance(before, CodexStream) else None)
