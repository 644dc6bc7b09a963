"""`rollstream sandboxes`: the boxes on this host, and removing those that nobody holds any more."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, interruptible, out, read_settings, table
from rollstream.cli.progress import duration
from rollstream.errors import BoundaryFailure, UsageError
from rollstream.eventlog.producer import EventProducer
from rollstream.reaping import reaper_of
from rollstream.sandboxes import registry
from rollstream.sandboxes.reaper import Reaper, Surveyed
from rollstream.settings import Settings
from rollstream.store.formats import visible

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at the sandboxes of this host, and remove orphans.")
Provider = Annotated[
    str | None,
    typer.Option(
        "--provider", "-p", help="Whose boxes. Default: those of every provider that answers here.", show_default=False
    ),
]


@app.command("list")
def list_sandboxes(
    provider: Provider = None,
    every: Annotated[bool, typer.Option("--all", help="Those of other installations, too.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """List the sandboxes on this host: whose they are, and until when they are held.

    Example: rollstream sandboxes list
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        surveyed = asyncio.run(_survey(settings, provider))
    shown = [(name, judged) for name, judged in surveyed if every or judged.own]
    if not shown:
        out.print(f"no sandboxes{'' if every else ' of this installation'}")
    else:
        rows = table("sandbox", "provider", "run", "session", "held by", "age", "lease")
        for name, judged in sorted(shown, key=lambda found: found[1].box.created_at):
            holder = judged.holder
            cells = (judged.box.id, name, holder.run or "", holder.session or "", holder.worker)
            age = duration((datetime.now(UTC) - judged.box.created_at).total_seconds())
            rows.add_row(*(visible(cell) for cell in cells), age, _lease(judged))
        out.print(rows)
    others = len(surveyed) - len(shown)
    if others:
        out.print(f"{others} of other installations: --all lists them")


@app.command()
def reap(
    provider: Provider = None,
    force: Annotated[bool, typer.Option("--force", help="Held ones too. Stop the workers first: what runs fails.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Remove the sandboxes of this installation that nobody holds any more. Workers do the same by themselves.

    Example: rollstream sandboxes reap
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        reaped, kept = asyncio.run(_reap(settings, provider, force=force))
    for judged in reaped:
        out.print(f"removed {visible(judged.box.id)}: {_WHY[judged.reap or 'closed']}")
    out.print(f"{len(reaped)} removed, {kept} still held")


_WHY = {"expired": "its lease had run out", "fenced": "another worker has its session", "forced": "forced", "closed": ""}


def _lease(judged: Surveyed) -> str:
    if not judged.own:
        return "of another installation"
    if judged.reap == "fenced":
        return "another worker has its session"
    left_s = (judged.expires_at - datetime.now(UTC)).total_seconds()
    return f"for {duration(left_s)}" if left_s > 0 else f"ran out {duration(-left_s)} ago"


async def _survey(settings: Settings, provider: str | None) -> list[tuple[str, Surveyed]]:
    async with _reapers(settings, provider) as reapers:
        return [(reaper.provider.name, judged) for reaper in reapers for judged in await reaper.survey()]


async def _reap(settings: Settings, provider: str | None, *, force: bool) -> tuple[list[Surveyed], int]:
    reaped: list[Surveyed] = []
    kept = 0
    async with _reapers(settings, provider) as reapers:
        for reaper in reapers:
            reaped += await reaper.reap(force=force)
            kept += sum(judged.own for judged in await reaper.survey())
    return reaped, kept


@asynccontextmanager
async def _reapers(settings: Settings, name: str | None) -> AsyncIterator[list[Reaper]]:
    """The reaper of the provider that is named, or of every one that answers.

    Raises:
        BoundaryFailure: the one that options or settings name does not answer, or is not to be had.
    """
    settings = settings.model_copy(update={"bootstrap_servers": find_broker(settings)})
    required = name or settings.sandboxes.provider
    async with (
        EventProducer(settings.bootstrap_servers, settings.kafka, client_id="rollstream-cli") as producer,
        AsyncExitStack() as open_,
    ):
        reapers = []
        for one in [name] if name else registry.names():
            try:
                provider = registry.load(settings.sandboxes, "cleanup", one)
                open_.push_async_callback(provider.close)
                await provider.host()
            except (BoundaryFailure, UsageError):
                if one == required:
                    raise
                continue
            reapers.append(await reaper_of(settings, provider, producer, f"cli@{socket.gethostname()}:{os.getpid()}"))
        yield reapers
