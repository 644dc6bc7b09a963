"""What the log says about runs: their manifests, and which of their groups have been published."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from rollstream.eventlog.reading import open_reader
from rollstream.settings import KafkaSettings
from schemas.envelope import utc_of
from schemas.events import UndecodableEvent, decode
from schemas.run import RunPublished
from topics.catalogue import RUNS_CONTROL, TASKS_IN

CLOCK_SKEW = timedelta(minutes=5)
"""Between the clocks of those who write the log, whose time its records carry."""


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run that was announced in the log."""

    manifest: RunPublished
    recorded_at: datetime

    @property
    def read_from(self) -> datetime:
        """No record of the run is older than this."""
        return self.recorded_at - CLOCK_SKEW


async def known_runs(bootstrap: str, kafka: KafkaSettings) -> dict[str, KnownRun]:
    """Every announced run by name, in the order of their announcement; of several announcements the first counts.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    runs: dict[str, KnownRun] = {}
    async with open_reader(bootstrap, kafka, (RUNS_CONTROL,)) as reader:
        async for batch in reader.to_end():
            for record in batch:
                try:
                    manifest = decode(record.value, RunPublished)
                except UndecodableEvent:
                    # Others write here too, and a newer version may say more than we understand.
                    continue
                recorded_at = utc_of(record.timestamp_ms)
                runs.setdefault(manifest.run, KnownRun(manifest, recorded_at))
    return runs


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
