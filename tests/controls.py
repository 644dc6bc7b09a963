"""Run control for tests: what is said of runs is told to it directly, and no log is read."""

from rollstream.eventlog.control import RunControl
from rollstream.settings import KafkaSettings


def unheard() -> RunControl:
    """A control that has heard of nothing. `tell` it."""
    return RunControl("nowhere:9092", KafkaSettings())
