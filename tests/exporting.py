"""Exports for tests: a small store of everything, one call to export it, and its rows."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from rollstream.store.exports.export import Export, Exported
from rollstream.store.exports.request import ExportRequest
from rollstream.store.reader import open_snapshot
from schemas.envelope import Event
from schemas.rollout import Mask
from schemas.values import JsonObject
from tests.events import Attempt, attempts, task_submitted


def mixed() -> list[Event]:
    """Group a: rewards 1, 0, 0.5 with their own answers, an error. Group b: 1 and 1, one of them masked. Group c: still out."""
    a, b, c = task_submitted("a", attempts=4), task_submitted("b", attempts=2), task_submitted("c", attempts=2)
    masked = Attempt(b, index=1).scored().model_copy(update={"mask": Mask(loss=True, baseline=True)})
    return [
        *(a, b, c),
        *(replace(each, answer=f"answer {each.index}").scored() for each in attempts(a, 1.0, 0.0, 0.5)),
        Attempt(a, index=3).failed(),
        Attempt(b, index=0).scored(),
        masked,
        Attempt(c, index=0, reward=0.0).scored(),
    ]


def export(store: Path, to: Path, *, overwrite: bool = False, shard_bytes: int = 2**28, **asked: object) -> Exported:
    request = ExportRequest(runs=("run-1",), **asked)  # type: ignore[arg-type]
    with open_snapshot(store) as connection:
        job = Export(connection, request, max_shard_bytes=shard_bytes)
        return job.write(job.choose(), to, overwrite=overwrite, progress=lambda count: None)


def rows(folder: Path, split: str = "train") -> list[JsonObject]:
    """The rows of a split, in the order of its files."""
    found: list[JsonObject] = []
    for path in sorted((folder / "data").glob(f"{split}-*")):
        if path.suffix == ".parquet":
            found += pq.read_table(path).to_pylist()
        else:
            found += [json.loads(line) for line in path.read_bytes().splitlines()]
    return found
