"""Writes the snapshots: `python -m schemas.snapshots`. With `--check`, writes nothing and fails if one would change."""

import argparse
import sys

from schemas.events import EVENTS
from schemas.snapshots import FOLDER, path_of, render


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m schemas.snapshots", description="Write the JSON Schema of every event.")
    parser.add_argument("--check", action="store_true", help="only say what would change; exit code 1 if anything would")
    check: bool = parser.parse_args().check
    wanted = {path_of(kind): render(event) for kind, event in EVENTS.items()}
    stale = sorted(set(FOLDER.glob("*.json")) - wanted.keys())
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in [*changed, *stale]:
        print(f"{'removed' if path in stale else 'changed'}: {path.name}")
    if check:
        sys.exit(1 if changed or stale else 0)
    for path in changed:
        path.write_text(wanted[path])
    for path in stale:
        path.unlink()


if __name__ == "__main__":
    main()
