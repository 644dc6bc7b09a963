"""`command`: any program as an agent, by the template in the settings of the worker (`[harnesses.command]`).

It may call the run's model at the addresses that its environment gives. Of programs that print no steps, only what they leave
behind is known.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import ClassVar, cast

from rollstream.errors import Refused
from rollstream.sandboxes.protocol import DownloadTooLarge
from schemas.envelope import now
from schemas.session import SessionReady, Submission
from schemas.values import ChatMessage, JsonObject, Usage, clean_text, text_of, truncate_text
from services.agent_worker.harnesses.cli import (
    KEY,
    STOPS,
    AgentFailed,
    Ending,
    Lines,
    Step,
    completion,
    count,
    instruction_of,
    judge,
    run_program,
)
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models, Turn

_PLACE = re.compile(r"\{(instruction|instruction_file|workdir|model|model_url)\}")
KEEP_INSTRUCTION = 'umask 077; cat > "$HOME/instruction.txt" && printf %s "$HOME/instruction.txt"'


class CommandHarness:
    name: ClassVar[str] = "command"
    version: ClassVar[str] = "1"
    capabilities: ClassVar[Capabilities] = Capabilities(
        interactions=frozenset({"single_turn", "agent_in_env"}), needs_sandbox=True
    )

    async def open(self, descriptor: SessionReady, models: Models, box: AgentBox | None) -> "CommandSession":
        if box is None or not box.settings.command.argv:
            lacks = "a box" if box is None else "harnesses.command.argv in the worker's settings"
            raise Refused(f"harness command takes {lacks}, found none", stage="agent", kind="harness_missing")
        return CommandSession(descriptor, models, box)


class CommandSession:
    def __init__(self, descriptor: SessionReady, models: Models, box: AgentBox) -> None:
        self._models = models
        self._box = box
        self._limit = descriptor.limits.max_output_bytes
        self._answer = ""

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        settings, box = self._box.settings.command, self._box
        instruction = instruction_of(observation)
        fills = {
            "instruction": instruction,
            "workdir": box.sandbox.workdir,
            "model": box.model,
            "model_url": box.model_url or "",
        }
        if settings.instruction == "file":
            fills["instruction_file"] = await self._keep(instruction)
        lines, stream, messages = Lines(self._limit), JsonlStream(now(), box.model), list[ChatMessage]()

        async def hear(source: str, chunk: bytes) -> None:
            if source == "stdout" and settings.steps == "jsonl":
                for line, escaped in lines.feed(chunk):
                    await self._take(stream.feed(line, escaped, now()), messages)

        done = await run_program(
            box,
            fill([*settings.argv, *settings.args], fills),
            {**_addresses(box), **settings.env},
            instruction.encode() if settings.instruction == "stdin" else b"",
            hear,
            self._limit,
        )
        ending = stream.end(now())
        stop = judge("command", done, ending, box, settings.ok_exit_codes) or STOPS.get(stream.finish_reason)
        messages += ending.left
        if settings.answer_file:
            self._answer = await self._read(settings.answer_file)
        elif settings.steps == "none":
            self._answer = truncate_text(clean_text(done.stdout.text.strip()), self._limit)
        if not messages or messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", "content": self._answer})
        return Turn(messages, stop)

    async def _take(self, steps: Sequence[Step], messages: list[ChatMessage]) -> None:
        for step in steps:
            await self._models.record(step.completion, step.new_messages)
            messages += [*step.new_messages, step.completion.message]
            self._answer = text_of(step.completion.message) or self._answer

    async def _keep(self, instruction: str) -> str:
        """The path of a file with the instruction, outside of the work directory."""
        done = await self._box.sandbox.exec(["sh", "-c", KEEP_INSTRUCTION], stdin=instruction.encode(), max_output_bytes=4096)
        if not done.ok:
            raise AgentFailed(f"the instruction cannot be written into the box: {done.stderr.text.strip()[:200]}")
        return done.stdout.text

    async def _read(self, path: str) -> str:
        try:
            content = await self._box.sandbox.read(path, max_bytes=self._limit)
        except (OSError, DownloadTooLarge):
            # It is not there, or no answer: the agent has given none.
            return ""
        return clean_text(content.decode(errors="backslashreplace")).strip()

    async def close(self) -> Submission:
        return Submission(text=self._answer)


def fill(argv: Sequence[str], fills: Mapping[str, str]) -> list[str]:
    """A template with what is known put in; what an instruction itself holds is never taken for a place."""
    return [_PLACE.sub(lambda found: fills.get(found[1], ""), part) for part in argv]


def _addresses(box: AgentBox) -> dict[str, str]:
    """Where the model is, under the names that programs look for."""
    if box.model_url is None:
        return {}
    return {
        "OPENAI_BASE_URL": f"{box.model_url}/v1",
        "OPENAI_API_KEY": KEY,
        "OPENAI_MODEL": box.model,
        "ANTHROPIC_BASE_URL": box.model_url,
        "ANTHROPIC_API_KEY": KEY,
    }


class JsonlStream:
    """`StreamParser` of chat messages, one a line: an assistant's is a step, everything else is what it saw. Pure."""

    def __init__(self, started_at: datetime, model: str) -> None:
        self._boundary = started_at
        self._model = model
        self._seen: list[ChatMessage] = []
        self.finish_reason: str | None = None
        """Of the last step."""

    def feed(self, line: JsonObject, escaped: bool, at: datetime) -> list[Step]:
        role = line.get("role")
        if role not in ("assistant", "tool", "user", "system", "developer"):
            return []
        known = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
        message = cast("ChatMessage", {name: line[name] for name in known if name in line})
        started_at, self._boundary = self._boundary, at
        if role != "assistant":
            self._seen.append(message)
            return []
        usage = line.get("usage")
        self.finish_reason = str(line["finish_reason"]) if line.get("finish_reason") else None
        seen, self._seen = self._seen, []
        made = completion(
            message,
            line,
            model=str(line.get("model") or self._model),
            started_at=started_at,
            at=at,
            finish_reason=self.finish_reason,
            usage=Usage(prompt_tokens=count(usage, "prompt_tokens"), completion_tokens=count(usage, "completion_tokens")),
            escaped=escaped,
        )
        return [Step(made, seen)]

    def end(self, at: datetime) -> Ending:
        return Ending([], self._seen, None)
