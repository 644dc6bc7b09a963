"""The published copy of the store: a file that is replaced as a whole and never changed.

Nobody can open a DuckDB file while another process writes it, not even to read. So readers get a copy, by an atomic rename;
whoever has the old one open keeps reading it.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

PUBLISHED = "trajectories.duckdb"
"""Name of the copy inside the data directory."""
MAX_SHARE = 0.1
"""Publishing may take this share of the writer's time; a large store is therefore published less often."""


def publish(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`, whose writer has just checkpointed and does not write meanwhile.

    Raises:
        OSError: it cannot be copied; `target` is as it was.
    """
    copy = target.with_name(f".{target.name}.tmp")
    copy.unlink(missing_ok=True)
    # In a process of its own: closing any descriptor of `source` in the writer's process would drop DuckDB's lock on it.
    done = subprocess.run(["cp", "--", str(source), str(copy)], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        # The old copy stays; half of a new one would only fill the disk.
        copy.unlink(missing_ok=True)
        raise OSError(done.stderr.strip() or f"cp ended with {done.returncode}")
    # Read-only, because a plain `duckdb FILE` opens for writing, which locks every other reader out.
    copy.chmod(0o444)
    remove_leftover(target)
    os.replace(copy, target)


def remove_leftover(target: Path) -> None:
    """Remove the `.wal` of a reader that had opened `target` for writing and crashed: no reader can open the file beside it."""
    target.with_name(f"{target.name}.wal").unlink(missing_ok=True)


@dataclass(slots=True)
class Schedule:
    """When to publish. Times are of one monotonic clock, in seconds."""

    interval_s: float
    changed: bool = True
    """Whether the store has something that the copy has not."""
    _not_before: float = float("-inf")

    def due(self, now: float) -> bool:
        return self.changed and now >= self._not_before

    def published(self, started: float, finished: float) -> None:
        """A publication took from `started` to `finished`."""
        self.changed = False
        self._not_before = max(started + self.interval_s, finished + (finished - started) / MAX_SHARE)
