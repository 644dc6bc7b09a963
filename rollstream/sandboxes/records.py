"""Records of boxes as files, for providers without an engine that remembers them: a directory for each box."""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rollstream.sandboxes.protocol import FoundSandbox, SandboxTag
from rollstream.sandboxes.tags import from_labels, labels
from schemas.envelope import now

RECORD = "box.json"


def make_own(state_dir: Path) -> None:
    """Make the directory of all records, where others may make directories too.

    Raises:
        PermissionError: somebody else has made it, and could change what is in it.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o711)
    if state_dir.is_symlink() or state_dir.stat().st_uid != os.geteuid():
        raise PermissionError(1, f"{state_dir} belongs to somebody else")


def write_record(folder: Path, tag: SandboxTag, **extra: object) -> None:
    """Say whose a box is, in its directory; a record that is there is replaced at once."""
    record = {"labels": labels(folder.name, tag), "created_at": now().isoformat(), **extra}
    temporary = folder / f"{RECORD}.new"
    temporary.write_text(json.dumps(record))
    temporary.replace(folder / RECORD)


def read_record(folder: Path) -> dict[str, Any] | None:
    """What is recorded of a box; None if there is nothing readable."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def recorded(state_dir: Path) -> Iterator[FoundSandbox]:
    """Every box that is recorded and readable."""
    for path in state_dir.glob(f"*/{RECORD}"):
        record = read_record(path.parent) or {}
        try:
            tag, created_at = from_labels(record["labels"]), datetime.fromisoformat(record["created_at"])
        except (KeyError, TypeError, ValueError):
            continue
        if tag is not None:
            yield FoundSandbox(path.parent.name, tag, created_at)
