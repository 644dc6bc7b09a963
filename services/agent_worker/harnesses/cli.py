"""Agents that are programs in a box: one activation is one run of the program, and its output tells what it did.

A program's word is not taken for how its model fared: that is what the door says. The steps of a run are durable as they
happen; a limit that one of them passes ends the program, and everything that it has started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from rollstream.errors import BoundaryFailure, Refused
from rollstream.models.formats import Malformed, parse_json
from rollstream.models.protocol import Completion, ContextOverflow
from rollstream.sandboxes.protocol import ExecResult, OnOutput, Stream
from schemas.envelope import now
from schemas.episode import StopReason
from schemas.session import SessionReady, Submission
from schemas.values import ChatMessage, JsonObject, Sampling, Usage, text_of
from services.agent_worker.harnesses.protocol import AgentBox, Capabilities, Models, Turn

MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_OUTPUT_BYTES = 64 * 1024
"""Kept of what a program prints, for sentences; its steps are read as they come."""
KEY = "rollstream"
"""What programs take for a key. The real one never enters a box."""
NOT_RUNNABLE = (126, 127)
CAPABILITIES = Capabilities(
    interactions=frozenset({"single_turn", "agent_in_env", "conversation", "gymnasium", "tools"}),
    tools=True,
    needs_sandbox=True,
)
"""Of every program that goes on from its own last run, and calls an environment's tools by the Model Context Protocol."""
STOPS: dict[str | None, StopReason] = {"length": "length", "content_filter": "content_filter"}


class AgentFailed(BoundaryFailure):
    """The agent's program broke down, and not because of its model: it says nothing about the task."""

    def __init__(self, message: str, *, kind: str = "agent_crashed", retryable: bool = True) -> None:
        super().__init__(message, stage="agent", kind=kind, retryable=retryable)


@dataclass(frozen=True, slots=True)
class Step:
    """What a program did in one go: said something, or called its tools."""

    completion: Completion
    new_messages: list[ChatMessage]
    """Results of its tools since the step before."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program says that its run went.

    Attributes:
        steps: that were held back until now.
        left: results of tools that no step came after.
        failed: what it complains of; "" when it says that it is done, None when it says nothing at all.
        resume: by which its next run knows of this one.
        stop: why it stopped, where it tells.
    """

    steps: list[Step]
    left: list[ChatMessage]
    failed: str | None
    resume: str | None = None
    stop: StopReason | None = None


class StreamParser(Protocol):
    """Reads what a program prints, in one run. Pure: the time is given."""

    def feed(self, line: JsonObject, escaped: bool, at: datetime) -> list[Step]:
        """What a line, which is a JSON object, adds."""
        ...

    def end(self, at: datetime) -> Ending: ...


class Cli(Protocol):
    """What is particular of one program."""

    name: str

    def argv(self, box: AgentBox, session: str, resume: str | None) -> list[str]:
        """The command, which reads its instruction from the standard input.

        Args:
            resume: of the run before, if there was one.
        """
        ...

    def env(self, box: AgentBox) -> Mapping[str, str]: ...
    def parser(self, started_at: datetime, before: StreamParser | None) -> StreamParser:
        """For one run.

        Args:
            before: the parser of the run that this one goes on from; some programs count on.
        """
        ...


class Lines:
    """Bytes in, JSON objects out; what is none, or too long, is left out."""

    def __init__(self, max_text_bytes: int) -> None:
        self._max_text_bytes = max_text_bytes
        self._pending = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> list[tuple[JsonObject, bool]]:
        """The objects that are whole now, each with whether something of it had to be escaped or cut."""
        *whole, rest = chunk.split(b"\n")
        found = []
        for line in whole:
            self._pending += line
            if not self._skipping and (parsed := self._parse(bytes(self._pending))) is not None:
                found.append(parsed)
            self._pending.clear()
            self._skipping = False
        self._pending += rest
        if len(self._pending) > MAX_LINE_BYTES:
            self._pending.clear()
            self._skipping = True
        return found

    def _parse(self, line: bytes) -> tuple[JsonObject, bool] | None:
        if not line.lstrip().startswith(b"{"):
            return None
        try:
            return parse_json(line, self._max_text_bytes)
        except Malformed:
            return None


class CliSession:
    """`AgentSession` of a program."""

    def __init__(self, cli: Cli, descriptor: SessionReady, models: Models, box: AgentBox | None) -> None:
        self._cli = cli
        self._descriptor = descriptor
        self._models = models
        self._box = with_a_model(cli.name, box)
        if descriptor.tools and not self._box.tools_url:
            found = f"{len(descriptor.tools)} with interaction {descriptor.interaction}"
            raise Refused(f"harness {cli.name} calls tools of a world that answers, found {found}", stage="agent")
        self._resume: str | None = None
        self._unseen: list[ChatMessage] = []
        """What came since the last step: its tools' results, and what the environment answered."""
        self._activated = False
        self._parser: StreamParser | None = None
        self._answer = ""

    async def activate(self, observation: Sequence[ChatMessage]) -> Turn:
        if self._activated:
            self._unseen += observation
        self._activated = True
        self._parser = self._cli.parser(now(), self._parser)
        run = _Run(self, self._parser, self._descriptor.limits.max_output_bytes)
        done = await run_program(
            self._box,
            self._cli.argv(self._box, self._descriptor.session, self._resume),
            self._cli.env(self._box),
            instruction_of(observation).encode(),
            run.hear,
        )
        ending = run.parser.end(now())
        await run.take(ending.steps)
        run.messages += ending.left
        self._unseen += ending.left
        self._resume = ending.resume or self._resume
        stop = judge(self._cli.name, done, ending, self._box) or STOPS.get(run.finish_reason)
        messages = run.messages
        if not messages or messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return Turn(messages, stop)

    async def take(self, step: Step, messages: list[ChatMessage]) -> None:
        """Make a step durable."""
        await self._models.record(step.completion, [*self._unseen, *step.new_messages])
        self._unseen = []
        messages += [*step.new_messages, step.completion.message]
        self._answer = text_of(step.completion.message) or self._answer

    async def close(self) -> Submission:
        return Submission(text=self._answer)


class _Run:
    """One run of a program, as it is heard."""

    def __init__(self, session: CliSession, parser: StreamParser, max_text_bytes: int) -> None:
        self._session = session
        self._lines = Lines(max_text_bytes)
        self.parser = parser
        self.messages: list[ChatMessage] = []
        self.finish_reason: str | None = None

    async def hear(self, stream: Stream, chunk: bytes) -> None:
        if stream == "stdout":
            for line, escaped in self._lines.feed(chunk):
                await self.take(self.parser.feed(line, escaped, now()))

    async def take(self, steps: Sequence[Step]) -> None:
        for step in steps:
            await self._session.take(step, self.messages)
            self.finish_reason = step.completion.finish_reason


async def run_program(
    box: AgentBox,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdin: bytes,
    hear: OnOutput | None = None,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
) -> ExecResult:
    """Run a program of the agent's to its end, with the way to the model open."""
    if box.door is not None:
        await box.door.open()
    return await box.sandbox.exec(argv, env=env, stdin=stdin, max_output_bytes=max_output_bytes, on_output=hear)


def with_a_model(name: str, box: AgentBox | None) -> AgentBox:
    """A box that a program can call its model from.

    Raises:
        Refused: it is none.
    """
    if box is None or box.model_url is None:
        found = "no box" if box is None else "one without"
        raise Refused(
            f"harness {name} works in a box with a way to the model, found {found}; give its box the network gateway",
            stage="agent",
            kind="no_gateway",
        )
    return box


def judge(name: str, done: ExecResult, ending: Ending, box: AgentBox, ok_exit_codes: Sequence[int] = (0,)) -> StopReason | None:
    """What becomes of a run that has ended.

    Returns:
        Why it stopped, if not because the agent was done.

    Raises:
        ModelFailure: the program ended because its model failed.
        AgentFailed: it broke down.
        Refused: there is no such program.
    """
    failed, refused = ending.failed, None if box.door is None else box.door.failure
    if ending.stop is not None:
        return ending.stop
    went_well = done.exit_code in ok_exit_codes and not failed
    if went_well and (failed == "" or refused is None):
        return None
    if isinstance(refused, ContextOverflow):
        return "context_overflow"
    if refused is not None:
        raise refused
    said = failed or (done.stderr.text.strip().splitlines() or [""])[-1]
    what = f"the program of harness {name} ended with exit code {done.exit_code}: {said[:500]}"
    if done.exit_code in NOT_RUNNABLE and not failed:
        raise Refused(f"{what}; bake it into the image, or set harnesses.{name}.path", stage="agent", kind="harness_missing")
    if done.oom_killed:
        raise AgentFailed(f"{what}; the box has too little memory: raise memory_mib", kind="agent_out_of_memory")
    raise AgentFailed(what)


def instruction_of(observation: Sequence[ChatMessage]) -> str:
    """What an observation tells a program that takes one text: the texts of its messages, with speakers where there are two."""
    told = [message for message in observation if text_of(message)]
    if all(message.get("role") != "assistant" for message in told):
        return "\n\n".join(text_of(message) for message in told)
    return "\n\n".join(f"{message.get('role')}: {text_of(message)}" for message in told)


def completion(
    message: ChatMessage,
    response: JsonObject,
    *,
    model: str,
    started_at: datetime,
    at: datetime,
    finish_reason: str | None = None,
    usage: Usage | None = None,
    escaped: bool = False,
    cost_usd: float | None = None,
) -> Completion:
    """A model call that a program made, as far as its output tells of it."""
    return Completion(
        message=message,
        finish_reason=finish_reason,
        usage=usage or Usage(),
        response=response,
        model=model,
        # Programs have their own, and do not say.
        sampling=Sampling(),
        started_at=started_at,
        duration_s=max(0.0, (at - started_at).total_seconds()),
        attempts=1,
        escaped=escaped,
        cost_usd=cost_usd,
    )


def tool_call(id: str, name: str, arguments: str) -> JsonObject:
    """A call of a program's own tool, in OpenAI's form."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def objects(value: object) -> list[JsonObject]:
    """The JSON objects in what should be a list of them."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def count(value: object, name: str) -> int:
    """A count in an object that may be none; 0 where there is none."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else 0
