"""From a request to a directory: choose, look, write, and say what was done."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb
import orjson

import rollstream
from rollstream.errors import NothingToExport
from rollstream.store.exports.atif import VERSION, AtifRows
from rollstream.store.exports.dpo import DpoRows
from rollstream.store.exports.files import MANIFEST, MAX_SHARD_BYTES, FileInfo, SplitFiles, appearing
from rollstream.store.exports.grpo import GrpoRows
from rollstream.store.exports.request import ExportRequest
from rollstream.store.exports.rows import RowFormat
from rollstream.store.exports.selection import Selection, groups, select
from rollstream.store.exports.sft import SftRows
from rollstream.store.reader import query

MANIFEST_VERSION = 1
"""Raised when a field of the manifest changes its meaning."""

Progress = Callable[[int], None]
"""Called with a number of groups that are done. Each group is done twice: seen, and written."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has become."""

    files: tuple[FileInfo, ...]
    rows: dict[str, int]
    """By split, also those that are empty."""
    groups: int
    left_out: dict[str, int]
    """Reason -> attempts (pairs in DPO, groups in GRPO) without a row."""

    @property
    def total(self) -> int:
        return sum(self.rows.values())


def row_format(request: ExportRequest) -> RowFormat:
    """What makes the rows of `request`."""
    match request.format:
        case "sft":
            return SftRows(dedupe=request.dedupe)
        case "dpo":
            return DpoRows(dedupe=request.dedupe)
        case "grpo":
            return GrpoRows()
        case "atif":
            return AtifRows(dedupe=request.dedupe)


@dataclass(slots=True)
class Export:
    """One export of one snapshot."""

    connection: duckdb.DuckDBPyConnection
    request: ExportRequest
    max_shard_bytes: int = MAX_SHARD_BYTES

    def choose(self) -> Selection:
        """Choose the attempts; see `selection.select` for what it raises."""
        return select(self.connection, self.request)

    def write(self, selection: Selection, target: Path, *, overwrite: bool, progress: Progress) -> Exported:
        """Write what was chosen.

        Raises:
            UsageError: `target` may not be replaced, or not be written.
            NothingToExport: no row could be made of what was chosen.
        """
        with appearing(target, overwrite=overwrite) as folder:
            rows = row_format(self.request)
            for group in groups(self.connection, selection):
                rows.observe(group)
                progress(1)
            exported = self._write_files(selection, rows, folder, progress)
            manifest = orjson.dumps(self._manifest(selection, rows, exported), option=orjson.OPT_INDENT_2)
            (folder / MANIFEST).write_bytes(manifest + b"\n")
        return exported

    def _write_files(self, selection: Selection, rows: RowFormat, folder: Path, progress: Progress) -> Exported:
        splits = self.request.splits
        written = 0
        with _split_files(folder / "data", self.request, rows, self.max_shard_bytes) as files:
            for group in groups(self.connection, selection):
                if made := list(rows.rows(group)):
                    files[splits.of(group.task)].add_group(made)
                    written += 1
                progress(1)
            left_out = Counter({reason: count for reason, count in rows.left_out.items() if count})
            if not written:
                reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
                raise NothingToExport(f"none of {selection.attempts} chosen attempts gave a row: {reasons}")
            counts = {name: files[name].rows for name in splits.names}
            done = tuple(info for name in splits.names for info in files[name].finish())
        return Exported(done, counts, written, dict(sorted(left_out.items())))

    def _manifest(self, selection: Selection, rows: RowFormat, exported: Exported) -> dict[str, object]:
        """Everything that decides what the files hold, and nothing else: the same store gives the same bytes."""
        request = self.request
        offsets = query(self.connection, "SELECT offsets FROM snapshot_info")[0]["offsets"]
        schema = rows.schema()
        return {
            "made_by": f"rollstream {rollstream.__version__}",
            "manifest_version": MANIFEST_VERSION,
            "format": request.format,
            "file_format": request.file_format,
            "runs": list(request.runs),
            "offsets": orjson.loads(offsets),
            "filter": {
                "where": request.where,
                "min_reward": request.min_reward,
                "margin": request.margin,
                "dedupe": request.dedupe,
            },
            "splits": {"shares": dict(request.splits.shares), "seed": request.splits.seed},
            "schema": VERSION if schema is None else {column.name: str(column.type) for column in schema},
            "chosen": {"groups": selection.groups, "attempts": selection.attempts},
            "left_out": exported.left_out,
            "rows": exported.rows,
            "files": [asdict(info) for info in exported.files],
        }


@contextmanager
def _split_files(folder: Path, request: ExportRequest, rows: RowFormat, max_bytes: int) -> Iterator[dict[str, SplitFiles]]:
    folder.mkdir()
    schema = rows.schema()
    files = {name: SplitFiles(folder, name, request.file_format, schema, max_bytes) for name in request.splits.names}
    try:
        yield files
    finally:
        for each in files.values():
            each.close()
