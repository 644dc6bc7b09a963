"""What the log says about runs: their manifests, and which of their groups have been published."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from rollstream.errors import UsageError
from rollstream.eventlog.control import RunStates
from rollstream.eventlog.reading import open_reader
from rollstream.settings import KafkaSettings
from schemas.envelope import utc_of
from schemas.events import UndecodableEvent, decode_any
from schemas.run import RunPublished
from topics.catalogue import RUNS_CONTROL, TASKS_IN

CLOCK_SKEW = timedelta(minutes=5)
"""Between the clocks of brokers, whose time the records carry: one takes a partition over from another."""
RECENT_RUNS = 8
"""Offered when one is not found."""


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run that was announced in the log."""

    manifest: RunPublished
    recorded_at: datetime

    @property
    def read_from(self) -> datetime:
        """No record of the run is older than this."""
        return self.recorded_at - CLOCK_SKEW


@dataclass(frozen=True, slots=True)
class Runs:
    """Everything that `runs.control` says."""

    known: dict[str, KnownRun]
    """Every announced run by name, in the order of their announcement; of several announcements the first counts."""
    states: RunStates
    """Which are paused or cancelled, announced or not."""


async def read_runs(bootstrap: str, kafka: KafkaSettings) -> Runs:
    """What the log says about all runs now.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    runs = Runs({}, RunStates())
    async with open_reader(bootstrap, kafka, (RUNS_CONTROL,)) as reader:
        async for batch in reader.to_end():
            for record in batch:
                try:
                    event = decode_any(record.value, RUNS_CONTROL.events)
                except UndecodableEvent:
                    # Others write here too, and a newer version may say more than we understand.
                    continue
                runs.states.learn(event)
                if isinstance(event, RunPublished):
                    runs.known.setdefault(event.run, KnownRun(event, utc_of(record.timestamp_ms)))
    return runs


async def known_runs(bootstrap: str, kafka: KafkaSettings) -> dict[str, KnownRun]:
    """Every announced run.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    return (await read_runs(bootstrap, kafka)).known


class UnknownRun(UsageError):
    """Nothing in the log belongs to a run of this name."""

    def __init__(self, run: str, runs: Runs) -> None:
        recent = list(runs.known)[: -RECENT_RUNS - 1 : -1]
        told = f"recent runs: {', '.join(recent)}" if recent else "no run was published here yet"
        super().__init__(f"no run is named {run!r}; {told}")


async def published_groups(bootstrap: str, kafka: KafkaSettings, run: str, since: datetime) -> dict[str, int]:
    """Groups of a run that stand on `tasks.in`, with their sizes, by header alone.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    groups: dict[str, int] = {}
    async with open_reader(bootstrap, kafka, (TASKS_IN,)) as reader:
        await reader.seek_to_time(since)
        async for batch in reader.to_end():
            for record in batch:
                headers = record.header_map()
                if headers.get("run_id") == run and "group_id" in headers:
                    size = headers.get("group_size", "")
                    groups[headers["group_id"]] = int(size) if size.isdigit() else 1
    return groups
