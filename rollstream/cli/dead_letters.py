"""`rollstream dead-letters`: records that nobody could handle, and what is to become of them."""

import asyncio
from collections.abc import Iterable
from typing import Annotated, Literal

import typer

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, interruptible, out, read_settings, table
from rollstream.cli.driving import drive_again
from rollstream.dead_letters import Letter, Original, choose, read_letters, read_original, replay_of
from rollstream.errors import UsageError
from rollstream.eventlog.producer import EventProducer
from rollstream.ledger import RunLog, read_run
from rollstream.runs import UnknownRun
from rollstream.settings import Settings
from rollstream.store.formats import visible
from schemas.failure import DeadLetterSettled

MAX_BYTES = 4_000
"""Shown of a record's value."""

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Look at records that nobody could handle, and replay or discard them."
)
Numbers = Annotated[list[int] | None, typer.Argument(help="As `list` shows them.", metavar="NUMBER...", show_default=False)]
OfRun = Annotated[str | None, typer.Option("--run", help="Those of this run.", show_default=False)]
Everything = Annotated[bool, typer.Option("--all", help="All that wait.")]


@app.command("list")
def list_letters(
    run: OfRun = None,
    settled: Annotated[bool, typer.Option("--settled", help="Those that were replayed or discarded, too.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """List the records that wait for a decision: where each stands, who refused it and why.

    Example: rollstream dead-letters list --run nightly
    """
    settings = read_settings(data_dir, config)
    letters = asyncio.run(read_letters(find_broker(settings), settings.kafka))
    found = [one for one in letters if run in (None, one.event.run) and (settled or one.settled is None)]
    shown = table("number", "record", "refused by", "run", "reason", *(["settled"] if settled else []))
    for letter in found:
        row = [str(letter.number), letter.event.subject(), letter.event.boundary, letter.event.run or "-", _line(letter)]
        shown.add_row(*row, *([letter.settled or "-"] if settled else []))
    if found:
        out.print(shown)
    else:
        out.print("no dead letter waits for a decision")


@app.command()
def show(
    number: Annotated[int, typer.Argument(help="As `list` shows it.")], data_dir: DataDir = None, config: Config = None
) -> None:
    """Show one record: its bytes as text or hex, its headers, and the traceback if there is one.

    Example: rollstream dead-letters show 12
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        letter, original = asyncio.run(_read_one(find_broker(settings), settings, number))
    event = letter.event
    out.print(f"{event.subject()}, refused by {event.boundary} at {event.occurred_at:%Y-%m-%d %H:%M:%S} UTC")
    out.print(f"reason: {visible(event.reason)}")
    out.print(f"run: {event.run or '-'}, rollout: {event.rollout or '-'}, settled: {letter.settled or '-'}")
    out.print(f"key: {readable(original.key)}")
    for name, value in original.headers:
        out.print(f"header {visible(name)}: {readable(value)}")
    out.print(f"value: {readable(original.value)}")
    if event.traceback:
        out.print(f"\n{visible(event.traceback)}")


@app.command()
def replay(
    numbers: Numbers = None, run: OfRun = None, everything: Everything = False, data_dir: DataDir = None, config: Config = None
) -> None:
    """Publish records again; where an attempt has ended with one, drive the attempt again in a new round.

    Example: rollstream dead-letters replay 12 13
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        bootstrap = find_broker(settings)
        chosen = choose(asyncio.run(read_letters(bootstrap, settings.kafka)), numbers or [], run, everything=everything)
        for letter in chosen:
            out.print(f"{letter.number}: {asyncio.run(replay_letter(bootstrap, settings, letter))}")
    if not chosen:
        out.print("no dead letter waits for a decision")


@app.command()
def discard(
    numbers: Numbers = None, run: OfRun = None, everything: Everything = False, data_dir: DataDir = None, config: Config = None
) -> None:
    """Take records off the list. They stay in the log, and their attempts stay as they ended.

    Example: rollstream dead-letters discard --run nightly
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        bootstrap = find_broker(settings)
        letters = choose(asyncio.run(read_letters(bootstrap, settings.kafka)), numbers or [], run, everything=everything)
        asyncio.run(_settle(bootstrap, settings, letters, "discarded"))
    out.print(f"{len(letters)} discarded")


async def replay_letter(bootstrap: str, settings: Settings, letter: Letter) -> str:
    """Replay one letter; returns what that came to.

    Raises:
        UsageError: its run is cancelled, or its record is gone.
    """
    log = await _log_of(bootstrap, settings, letter)
    plan = replay_of(None if log is None else log.ledger, letter.event)
    if log is not None and letter.event.run and log.runs.states.cancelled(letter.event.run):
        raise UsageError(f"run {letter.event.run} is cancelled: `rollstream resume {letter.event.run}` first")
    if log is None or plan.again is None:
        original = await read_original(bootstrap, settings.kafka, letter.event)
        async with EventProducer(bootstrap, settings.kafka, client_id="rollstream-cli") as producer:
            await producer.publish_raw(letter.event.topic, original.key, original.value, original.headers)
        done = f"published again on {letter.event.topic}"
    elif plan.again.wanted:
        message = f"dead letter {letter.number} was replayed"
        redriven = await drive_again(bootstrap, settings, log, plan.again.wanted, kind="replayed", message=message)
        done = f"{redriven.attempts} attempts that ended with it are driven again in a new round"
        if redriven.without_trace:
            return f"{redriven.without_trace} attempts ended with it, and the log has neither a session nor a task of them"
    elif plan.again.under_way:
        done = f"{plan.again.under_way} attempts that ended with it were driven again before, and are under way"
    else:
        done = "every attempt that ended with it has been scored since"
    await _settle(bootstrap, settings, [letter], "replayed")
    return done


async def _log_of(bootstrap: str, settings: Settings, letter: Letter) -> RunLog | None:
    """What the log has of the letter's run, if the letter names an attempt of one."""
    if letter.event.run is None or letter.event.rollout is None:
        return None
    try:
        return await read_run(bootstrap, settings, letter.event.run)
    except UnknownRun:
        return None


async def _read_one(bootstrap: str, settings: Settings, number: int) -> tuple[Letter, Original]:
    (letter,) = choose(await read_letters(bootstrap, settings.kafka), [number], None, everything=False)
    return letter, await read_original(bootstrap, settings.kafka, letter.event)


async def _settle(bootstrap: str, settings: Settings, letters: Iterable[Letter], how: Literal["replayed", "discarded"]) -> None:
    async with EventProducer(bootstrap, settings.kafka, client_id="rollstream-cli") as producer:
        await producer.publish([DeadLetterSettled.create(letter.event, how) for letter in letters])


def readable(raw: bytes | None) -> str:
    """Bytes as text where they are text, else in hex; long ones are cut, and say so."""
    if raw is None:
        return "(none)"
    kept = raw[:MAX_BYTES]
    try:
        text = visible(kept.decode())
    except UnicodeDecodeError:
        text = f"hex {kept.hex(' ')}"
    return text if len(raw) <= MAX_BYTES else f"{text}… ({len(raw)} bytes in all)"


def _line(letter: Letter, limit: int = 100) -> str:
    line = visible(" ".join(letter.event.reason.split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
