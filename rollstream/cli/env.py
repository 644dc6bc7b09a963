"""`rollstream env`: which environments there are, what one asks for, and whether a task file fits its environment."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import typer

from rollstream.backends import default_backend
from rollstream.blobs import BlobStore
from rollstream.cli.common import Config, DataDir, err, interruptible, out, progress_bar, read_settings, table
from rollstream.cli.own import given_by_path
from rollstream.datasets import BadLine, Row, read_rows
from rollstream.environments import registry
from rollstream.environments.graders import GraderPool
from rollstream.environments.protocol import Environment, Services, is_stepped
from rollstream.errors import Refused, UsageError
from rollstream.sandboxes import registry as sandboxes
from rollstream.settings import Settings
from rollstream.testing.boxes import OwnBoxes
from rollstream.testing.checking import Checked, Finding, check_rows

FINDINGS_SHOWN = 50

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List environments, show one, and check a task file against its own."
)
Own = Annotated[
    str | None,
    typer.Option("--environment", "-e", help="A name, or path.py:Class. Default: what each row names.", show_default=False),
]
Sandbox = Annotated[
    str | None,
    typer.Option(
        "--sandbox", help="Provider of the boxes that some environments verify in. Default: as for runs.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@app.command("list")
def list_environments(as_json: AsJson = False, data_dir: DataDir = None, config: Config = None) -> None:
    """List every environment that can be loaded here, and where it comes from.

    Example: rollstream env list
    """
    given_by_path(read_settings(data_dir, config), [], [])
    found = [_summary(name) for name in registry.names()]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    shown = table("name", "version", "answers back", "from", "what")
    for one in found:
        shown.add_row(one["name"], one["version"], one["answers_back"], one["from"], one["what"])
    out.print(shown)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A name, or path.py:Class.", metavar="NAME")],
    as_json: AsJson = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Show the fields of an environment's tasks: which it must have, and which an agent may see.

    Example: rollstream env show math
    """
    _, (known,), _ = given_by_path(read_settings(data_dir, config), [name], [])
    environment = _loaded(known or name)
    schema = environment.task_type.model_json_schema()
    if as_json:
        print(json.dumps({**_summary(environment.name), "task": schema}, indent=2))
        return
    out.print(f"{environment.name} {environment.version} ({registry.origin(environment.name)})")
    out.print(getdoc(type(environment)) or "")
    out.print(f"success: a reward of {environment.success_threshold:g} or more, unless its verdict says so itself")
    shown = table("field", "type", "seen by", "needed")
    public, required = registry.ALWAYS_PUBLIC | environment.public_fields, schema.get("required", [])
    for field, described in schema.get("properties", {}).items():
        shown.add_row(field, _type(described), "agent" if field in public else "verify", "yes" if field in required else "")
    out.print(shown)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A task file, as `publish` reads it.", metavar="FILE")],
    environment: Own = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only so many rows.", show_default=False)] = None,
    sandbox: Sandbox = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Admit every task of a file, play its reference solution, and play doing nothing. Needs no broker and no model.

    Exits with 1 if a task is refused, if a solution does not succeed, or if doing nothing does.

    Example: rollstream env check tasks.jsonl -e math
    """
    own, (name,), _ = given_by_path(read_settings(data_dir, config), [environment], [])
    if name is not None:
        _loaded(name)
    with interruptible():
        found = asyncio.run(_check(file, name, limit, own.settings, sandbox))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        _print_findings(found)
    if not found:
        raise UsageError(f"{file} holds no row")
    if any(one.finding in ("refused", "wrong") for one in found):
        raise typer.Exit(1)


async def _check(file: Path, name: str | None, limit: int | None, settings: Settings, sandbox: str | None) -> list[Checked]:
    # Twice, and never held: a file may be long.
    total = sum(1 for _ in _first(file, limit))
    verifier = settings.verifier
    found: list[Checked] = []
    try:
        provider = sandboxes.load(settings.sandboxes, "verification", sandbox or default_backend(settings))
    except Refused as error:
        raise UsageError(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="rollstream-check-") as scratch, progress_bar("checking", total) as advance:
        async with GraderPool(verifier.grader_processes, verifier.grader_timeout_s) as graders:
            blobs = BlobStore(scratch)
            services = Services(graders, sandboxes=OwnBoxes(provider, "rollstream env check"), blobs=blobs)
            async for one in check_rows(_first(file, limit), name, settings.defaults, services, file.parent, blobs):
                found.append(one)
                advance(1)
    await provider.close()
    return found


def _first(file: Path, limit: int | None) -> Iterator[Row | BadLine]:
    for row in read_rows(file):
        if limit is not None and row.index >= limit:
            return
        yield row


def _print_findings(found: list[Checked]) -> None:
    told = [one for one in found if one.finding in ("refused", "wrong")]
    for one in told[:FINDINGS_SHOWN]:
        err.print(f"line {one.line}{f' ({one.task})' if one.task else ''}: {one.reason}")
    if len(told) > FINDINGS_SHOWN:
        err.print(f"… and {len(told) - FINDINGS_SHOWN} more")
    for reason, count in Counter(one.reason for one in found if one.finding == "unsolved").items():
        err.print(f"note: {count} of {len(found)} tasks were not solved here: each {reason}")
    counts = Counter(one.finding for one in found)
    words: dict[Finding, str] = {"good": "good", "unsolved": "not solved", "refused": "refused", "wrong": "score wrong"}
    summary = ", ".join(f"{counts[kind]} {words[kind]}" for kind in words if counts[kind])
    out.print(f"{len(found)} tasks of {', '.join(sorted({one.environment for one in found if one.environment}))}: {summary}")


def _loaded(name: str) -> Environment[Any]:
    try:
        return registry.load(name)
    except Refused as error:
        raise UsageError(str(error)) from None


def _summary(name: str) -> dict[str, str]:
    try:
        environment = registry.load(name)
    except Refused as error:
        return {"name": name, "version": "", "answers_back": "", "from": registry.origin(name), "what": f"broken: {error}"}
    return {
        "name": name,
        "version": environment.version,
        "answers_back": "yes" if is_stepped(environment) else "no",
        "from": registry.origin(name),
        "what": (getdoc(type(environment)) or "").partition("\n")[0],
    }


def _type(described: dict[str, Any]) -> str:
    """A JSON schema in a word or two."""
    if "anyOf" in described:
        return " or ".join(_type(one) for one in described["anyOf"])
    if "enum" in described:
        return " | ".join(map(str, described["enum"]))
    if described.get("type") == "array":
        return f"list of {_type(described.get('items', {}))}"
    return str(described.get("type") or described.get("$ref", "any").rpartition("/")[2])
