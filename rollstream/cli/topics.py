"""`rollstream topics`: the catalogue, and the topics as the broker has them."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import typer

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, err, out, read_settings, table
from rollstream.errors import RollstreamError
from rollstream.eventlog import provisioning
from rollstream.eventlog.connection import close_admin, connect_admin
from rollstream.eventlog.provisioning import Provisioned, TopicState
from rollstream.settings import Settings
from topics.catalogue import CATALOGUE

ASYNCAPI_TIMEOUT_S = 60

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List, create and describe the topics.")


@app.command("list")
def list_topics(data_dir: DataDir = None, config: Config = None) -> None:
    """List every topic: what it carries, who writes it and who reads it. Asks no broker.

    Example: rollstream topics list
    """
    kafka = read_settings(data_dir, config).kafka
    shown = table("topic", "event", "key", "partitions", "written by", "read by")
    for topic in CATALOGUE:
        shown.add_row(
            kafka.topic_prefix + topic.name,
            topic.event.__name__,
            topic.key,
            str(topic.partitions(kafka.partitions)),
            _short(topic.written_by),
            _short(topic.read_by),
        )
    out.print(shown)


@app.command()
def ensure(data_dir: DataDir = None, config: Config = None) -> None:
    """Create the topics that are missing, and compare the others with the catalogue. Exits with 1 if they differ.

    Example: rollstream topics ensure
    """
    outcome = asyncio.run(_ensure(read_settings(data_dir, config)))
    for name in outcome.created:
        out.print(f"created {name}")
    out.print(f"{len(outcome.created)} created, {len(outcome.existing)} were there")
    _exit_on(outcome.mismatches)


@app.command()
def describe(data_dir: DataDir = None, config: Config = None) -> None:
    """Show the topics as the broker has them. Exits with 1 if one is missing or differs from the catalogue.

    Example: rollstream topics describe
    """
    settings = read_settings(data_dir, config)
    states = asyncio.run(_describe(settings))
    shown = table("topic", "partitions", "expected", "retention.ms", "max.message.bytes")
    for state in states:
        shown.add_row(
            state.name,
            "missing" if state.partitions is None else str(state.partitions),
            str(state.topic.partitions(settings.kafka.partitions)),
            state.config.get("retention.ms", ""),
            state.config.get("max.message.bytes", ""),
        )
    out.print(shown)
    missing = [f"topic {state.name} does not exist: `rollstream topics ensure`" for state in states if state.partitions is None]
    _exit_on([*missing, *provisioning.compare(states, settings.kafka)])


@app.command()
def asyncapi() -> None:
    """Print the AsyncAPI 3.0 document of all workers, as JSON.

    Example: rollstream topics asyncapi > asyncapi.json
    """
    # A process of its own, because the command line imports no worker.
    command = [sys.executable, "-m", "services", "asyncapi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASYNCAPI_TIMEOUT_S, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RollstreamError(f"`python -m services asyncapi` ended with code {done.returncode}: {last}")
    sys.stdout.write(done.stdout)


async def _ensure(settings: Settings) -> Provisioned:
    admin = await connect_admin(find_broker(settings))
    try:
        return await provisioning.ensure(admin, settings.kafka)
    finally:
        await close_admin(admin)


async def _describe(settings: Settings) -> list[TopicState]:
    admin = await connect_admin(find_broker(settings))
    try:
        return await provisioning.describe(admin, settings.kafka)
    finally:
        await close_admin(admin)


def _exit_on(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        err.print(sentence)
    if sentences:
        raise typer.Exit(1)


def _short(names: Sequence[str]) -> str:
    return ", ".join(name.removesuffix("_worker") for name in names)
