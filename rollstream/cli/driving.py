"""Driving attempts again, with progress: what `audit --repair`, `resume` and `dead-letters replay` have in common."""

from rollstream.cli.common import progress_bar
from rollstream.eventlog.producer import EventProducer
from rollstream.ledger import RunLog
from rollstream.operations import Wanted
from rollstream.redriving import Redriven, Redriving
from rollstream.settings import Settings
from schemas.failure import ErrorInfo


async def drive_again(bootstrap: str, settings: Settings, log: RunLog, wanted: Wanted, *, kind: str, message: str) -> Redriven:
    """Open another session of each attempt that is wanted.

    Args:
        kind: why, as the retries in the log will say, and `message` in words.
    """
    cause = ErrorInfo(kind=kind, stage="agent", message=message, retryable=True)
    async with EventProducer(bootstrap, settings.kafka, client_id="rollstream-cli") as producer:
        with progress_bar("driving again", len(wanted)) as advance:
            return await Redriving(bootstrap, settings, log, producer, cause).drive(wanted, advance)
