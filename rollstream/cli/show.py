"""`rollstream show`: trajectories, as people read them."""

import json
from typing import Annotated

import typer
from rich.text import Text

from rollstream.cli.common import Config, DataDir, out, read_settings
from rollstream.errors import UsageError
from rollstream.store.formats import visible
from rollstream.store.reader import open_snapshot
from rollstream.store.trajectory import Choice, Trajectory, choose_rollouts, find_rollout
from schemas.values import JsonObject

MAX_TEXT = 4_000
"""Characters shown of one message, unless all are asked for."""

ROLE_STYLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
STATUS_STYLES = {"completed": "green", "truncated": "yellow", "errored": "red", "cancelled": "red"}


def show(
    rollout: Annotated[str | None, typer.Argument(help="The beginning of a rollout or session id.", show_default=False)] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Choose from this run. Default: the latest.", show_default=False)
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Attempts that ended with an error.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Scored attempts, lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Scored attempts, highest reward first.")] = False,
    count: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 1,
    full: Annotated[bool, typer.Option("--full", help=f"Messages beyond {MAX_TEXT} characters too.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Print trajectories readably.

    Example: rollstream show --run nightly --worst -n 3
    """
    asked: dict[Choice, bool] = {"failed": failed, "worst": worst, "best": best}
    choices = [choice for choice, chosen in asked.items() if chosen]
    if len(choices) > 1 or (rollout and (choices or run)):
        raise UsageError("expected a rollout id, or --run with one of --failed, --worst and --best")
    with open_snapshot(read_settings(data_dir, config).data_dir) as connection:
        if rollout:
            found = [find_rollout(connection, rollout)]
        else:
            found = choose_rollouts(connection, run, choices[0] if choices else "latest", count)
    for trajectory in found:
        print_trajectory(trajectory, full=full)


def print_trajectory(trajectory: Trajectory, *, full: bool = False) -> None:
    """One attempt: its facts, what was said, and what came of it."""
    limit = None if full else MAX_TEXT
    status = Text(trajectory.status, style=f"bold {STATUS_STYLES.get(trajectory.status, '')}".strip())
    out.print(Text.assemble(("── rollout ", "dim"), (trajectory.rollout, "bold"), " ", status, " ", _earned(trajectory)))
    for name, value in _facts(trajectory):
        out.print(Text.assemble((f"{name:8} ", "dim"), value))
    if trajectory.recorded_only:
        out.print(Text("what was recorded until it failed:", style="dim"))
    for message in trajectory.messages:
        print_message(message, limit)
    if trajectory.error:
        out.print(Text.assemble(("\nerror ", "bold red"), _shortened(trajectory.error, limit)))
    if trajectory.diagnostics:
        out.print(Text.assemble(("\nverdict ", "bold"), _shortened(_compact(trajectory.diagnostics), limit)))
    out.print()


def print_message(message: JsonObject, limit: int | None) -> None:
    """One chat message: role, text, tool calls."""
    role = str(message.get("role", "?"))
    name = f" {message['name']}" if message.get("name") else ""
    out.print(Text(f"\n{role}{name}", style=f"bold {ROLE_STYLES.get(role, '')}".strip()))
    if text := _content(message.get("content")):
        out.print(Text(_shortened(text, limit)))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        told = function if isinstance(function, dict) else {}
        out.print(Text(_shortened(f"→ {told.get('name', '?')}({told.get('arguments', '')})", limit), style="bold"))


def _earned(trajectory: Trajectory) -> Text:
    if trajectory.reward is None:
        return Text("not scored", style="dim")
    success = {True: ", success", False: ", no success", None: ""}[trajectory.success]
    parts = f" ({', '.join(f'{k} {v}' for k, v in trajectory.components.items())})" if trajectory.components else ""
    return Text(f"reward {trajectory.reward:g}{success}{parts}")


def _facts(trajectory: Trajectory) -> list[tuple[str, str]]:
    place = f"attempt {trajectory.group_index + 1} of {trajectory.group_size}"
    again = f", round {trajectory.round}, try {trajectory.try_}" if trajectory.round or trajectory.try_ else ""
    facts = [
        ("task", f"{trajectory.environment} / {trajectory.task or 'unknown'}, {place}{again}"),
        ("run", f"{trajectory.run}, harness {trajectory.harness or '?'}, model {trajectory.model or '?'}"),
        ("session", trajectory.session),
        ("ended", f"{trajectory.scored_at:%Y-%m-%d %H:%M:%S} UTC, {trajectory.stop_reason}"),
    ]
    return [*facts, ("spent", _spent(trajectory))] if trajectory.calls else facts


def _spent(trajectory: Trajectory) -> str:
    times = (
        ("queued", trajectory.queued_s), ("agent", trajectory.agent_s), ("environment", trajectory.environment_s),
        ("model", trajectory.model_s), ("verification", trajectory.verify_s),
    )  # fmt: skip
    told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times if seconds is not None)
    calls = f"{trajectory.calls} call" + ("s" if trajectory.calls != 1 else "")
    return f"{calls}, {trajectory.prompt_tokens:,} + {trajectory.completion_tokens:,} tokens; {told}"


def _content(content: object) -> str:
    """The text of a message; parts that are no text are named."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part if isinstance(part, dict) else {} for part in content)
    return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in parts)


def _shortened(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return visible(text)
    return f"{visible(text[:limit])}… ({len(text) - limit:,} more characters; --full shows them)"


def _compact(value: JsonObject) -> str:
    return json.dumps(value, ensure_ascii=False)
