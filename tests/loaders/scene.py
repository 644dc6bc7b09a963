"""A store with something of everything that an export may hold, and its exports."""

from dataclasses import replace
from pathlib import Path

from rollstream.store.exports.export import Export
from rollstream.store.exports.request import ExportRequest, FileFormat, Format, Splits
from rollstream.store.reader import open_snapshot
from schemas.envelope import Event
from tests.events import Attempt, task_submitted, with_tools
from tests.stores import publish_events

TASKS = 24


def store(data_dir: Path, *, tools: bool) -> Path:
    """Groups of three: a success, a failure of the agent, and an error; with tools, every other group calls some."""
    events: list[Event] = []
    for number in range(TASKS):
        task = task_submitted(f"task-{number}", attempts=3)
        good, bad = (Attempt(task, index=index, answer=f"answer {number}.{index}", reward=1.0 - index) for index in range(2))
        records = [replace(good).scored(), bad.scored()]
        if tools and number % 2:
            records[0] = with_tools(records[0])
            records[1] = with_tools(records[1])
            records[1] = records[1].model_copy(
                update={"messages": [*records[1].messages[:-1], {"role": "assistant", "content": "It is 3."}]}
            )
        events += [task, *records, Attempt(task, index=2).failed()]
    return publish_events(data_dir, *events)


def export(data_dir: Path, to: Path, format: Format, file_format: FileFormat, *, splits: str = "train=0.75,test=0.25") -> Path:
    request = ExportRequest(("run-1",), format, file_format, splits=Splits.parse(splits))
    with open_snapshot(data_dir) as connection:
        job = Export(connection, request)
        job.write(job.choose(), to, overwrite=False, progress=lambda count: None)
    return to
