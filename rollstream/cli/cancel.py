"""`rollstream cancel`: a run ends now, whatever the backlog.

The order matters: workers are told first and given a moment to stop, so that what is then found unfinished stays unfinished.
"""

import asyncio
from typing import Annotated

import typer

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, interruptible, out, progress_bar, read_settings
from rollstream.eventlog.producer import EventProducer
from rollstream.ledger import read_run
from rollstream.operations import batches
from rollstream.runs import read_runs
from rollstream.settings import Settings
from schemas.rollout import RolloutScored
from schemas.run import RunCancelled

STOPPING_S = 1.5
"""Several times what a worker needs to hear of it."""
BATCH = 1_000


def cancel(
    run: Annotated[str, typer.Argument(help="Name of the run.")], data_dir: DataDir = None, config: Config = None
) -> None:
    """End a run: what has not ended is stopped, and recorded as cancelled.

    Cancelling again changes nothing. What was scored stays.

    Example: rollstream cancel nightly
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        bootstrap = find_broker(settings)
        ended, total = asyncio.run(cancel_run(bootstrap, settings, run))
    if ended:
        out.print(f"run {run} is cancelled: {ended} of {total} attempts had not ended, and are recorded as cancelled")
    else:
        out.print(f"run {run} is cancelled: all {total} attempts had ended before")


async def cancel_run(bootstrap: str, settings: Settings, run: str) -> tuple[int, int]:
    """Cancel a run; returns how many attempts ended with it, and how many it has.

    Raises:
        UsageError: nothing in the log belongs to such a run.
    """
    await read_run(bootstrap, settings, run)  # before anything is said of a run that does not exist
    cancelled = RunCancelled.create(run=run)
    async with EventProducer(bootstrap, settings.kafka, client_id="rollstream-cli") as producer:
        if not (await read_runs(bootstrap, settings.kafka)).states.cancelled(run):
            await producer.publish([cancelled])
            await asyncio.sleep(STOPPING_S)
        ledger = (await read_run(bootstrap, settings, run)).ledger
        unfinished = list(ledger.unfinished())
        with progress_bar("cancelling", len(unfinished)) as advance:
            for batch in batches(iter(unfinished), BATCH):
                await producer.publish([RolloutScored.of_cancellation(ids, cancelled.occurred_at) for ids in batch])
                advance(len(batch))
    return len(unfinished), sum(group.size for group in ledger.groups.values())
