"""Address books as CSV files, as other programs export them."""

import csv
from pathlib import Path


def read(path: Path) -> list[dict[str, str]]:
    """Every contact of a file, by the names in its first row.

    Programs write UTF-8 with or without a byte order mark, or, older ones, Windows-1252.
    """
    text = path.read_bytes().decode("utf-8", errors="replace")
    return [dict(row) for row in csv.DictReader(text.splitlines())]


def write(path: Path, contacts: list[dict[str, str]]) -> None:
    """Write contacts as UTF-8; each must have the fields of the first."""
    fields = list(contacts[0]) if contacts else []
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(contacts)
