"""What the docs tell people to type exists."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.cli.main import COMMANDS, LazyCommand

ROOT = Path(__file__).parents[2]
ENTRIES = {entry.name: entry for entry in COMMANDS}


def typed_commands() -> Iterator[tuple[str, str]]:
    """Every `rollstream …` in a code block or in backticks, with its file."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        spans = re.findall(r"`(rollstream [^`\n]+)`", text)
        for command in [line for line in lines if line.startswith("rollstream ")] + spans:
            yield path.name, command


@pytest.mark.parametrize(("document", "command"), sorted(set(typed_commands())))
def test_a_command_in_the_docs_exists_with_its_options(document: str, command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    if words[0].startswith("-") or words[0] == "COMMAND" or "|" in words[0]:
        return
    names = words[0].split("|")
    assert names[0] in ENTRIES, f"{document}: {command}"
    loaded = LazyCommand(ENTRIES[names[0]]).load()
    subcommands = getattr(loaded, "commands", {})
    if subcommands and len(words) > 1 and not words[1].startswith("-"):
        for name in words[1].split("|"):
            assert name in subcommands, f"{document}: {command}"
        loaded = subcommands[words[1].split("|")[0]]
    known = {option for parameter in loaded.params for option in parameter.opts} | {"--help"}
    for word in words[1:]:
        if word.startswith("-") and not word.lstrip("-").isdigit():
            assert word.partition("=")[0] in known, f"{document}: {command}"


def test_every_command_has_its_part_of_the_page() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name.strip() for heading in headings for name in heading.split(",")}
    assert documented == set(ENTRIES)
