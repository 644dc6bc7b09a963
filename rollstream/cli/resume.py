"""`rollstream resume`: a run goes on, and what failed is driven again in a new round. What was scored is not touched."""

import asyncio
from typing import Annotated

import typer

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, err, interruptible, out, read_settings
from rollstream.cli.driving import drive_again
from rollstream.errors import UsageError
from rollstream.eventlog.producer import EventProducer
from rollstream.ledger import RunLog, read_run
from rollstream.operations import Resumption, resumption
from rollstream.redriving import Redriven
from rollstream.settings import Settings
from schemas.run import RunResumed

LOOKS = 10
LOOK_INTERVAL_S = 1.0


def resume(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Drive attempts again that were cancelled, too.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Let a paused or cancelled run go on, and drive its errored attempts again in a new round.

    What was scored stays. Resuming again while they are under way changes nothing.

    Example: rollstream resume nightly
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        bootstrap = find_broker(settings)
        log = asyncio.run(go_on(bootstrap, settings, run))
        statuses = ("errored", "cancelled") if cancelled else ("errored",)
        found = resumption(log.ledger, statuses)
        message = "`rollstream resume` asked for another round"
        redriven = asyncio.run(drive_again(bootstrap, settings, log, found.wanted, kind="resumed", message=message))
    _print(run, log, found, redriven, cancelled=cancelled)


async def go_on(bootstrap: str, settings: Settings, run: str) -> RunLog:
    """Lift what holds a run up, if anything does.

    Raises:
        UsageError: no such run, or workers have not passed the backlog of a cancelled one: they would run it after all.
    """
    log = await read_run(bootstrap, settings, run)
    if log.runs.states.cancelled(run):
        log = await _after_its_backlog(bootstrap, settings, run, log)
        was = "cancelled"
    elif (pause := log.runs.states.paused(run)) is not None:
        was = f"paused: {pause.reason}"
    else:
        return log
    async with EventProducer(bootstrap, settings.kafka, client_id="rollstream-cli") as producer:
        await producer.publish([RunResumed.create(run=run)])
    out.print(f"run {run} goes on (it was {was})")
    return log


async def _after_its_backlog(bootstrap: str, settings: Settings, run: str, log: RunLog) -> RunLog:
    for _ in range(LOOKS):
        if not log.ledger.under_way:
            return log
        await asyncio.sleep(LOOK_INTERVAL_S)
        log = await read_run(bootstrap, settings, run)
    also = ", and those of its pools with `--pool`" if settings.pools else ""
    raise UsageError(
        f"run {run} was cancelled, and workers have not yet passed what it left behind ({log.ledger.under_way} records): "
        f"start them (`rollstream up`{also}), then resume"
    )


def _print(run: str, log: RunLog, found: Resumption, redriven: Redriven, *, cancelled: bool) -> None:
    if redriven.attempts:
        of_tasks = f", {redriven.from_tasks} of them from their tasks" if redriven.from_tasks else ""
        out.print(f"{redriven.attempts} attempts are driven again in a new round{of_tasks}")
    if found.under_way:
        out.print(f"{found.under_way} were driven again before, and are under way")
    if not found.wanted and not found.under_way:
        out.print("no attempt is errored" + (" or cancelled" if cancelled else ""))
    if redriven.without_trace:
        err.print(f"{redriven.without_trace} have neither a readable session nor a task in the log, and stay as they are")
    stay = sum(record.status == "cancelled" for record in log.ledger.counting().values())
    if stay and not cancelled:
        out.print(f"{stay} attempts stay cancelled: `rollstream resume {run} --cancelled` drives them again too")
