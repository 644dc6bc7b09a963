"""The documents say what the code does: settings, topics, commands, variables, tests, links."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import rollstream
from rollstream.cli.main import COMMANDS, Entry, LazyCommand
from rollstream.settings import Settings
from topics.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def rows(text: str, first_column: str) -> list[list[str]]:
    """Cells of every table whose first column is called so, code marks left out."""
    tables = re.findall(rf"^\| {first_column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for table in tables for line in table.splitlines()
    ]


def settings_of(model: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None) -> Iterator[tuple[str, str]]:
    """Every setting and its default, as the documents write them; a dictionary of sections stands for one called NAME."""
    for name, field in model.model_fields.items():
        types = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        sections = [kind for kind in types if issubclass(kind, BaseModel)]
        if not sections:
            yield prefix + name, written(getattr(defaults, name, field.default))
        elif field.annotation is sections[0]:
            yield from settings_of(sections[0], f"{prefix}{name}.", field.default)
        else:
            yield from settings_of(sections[0], f"{prefix}{name}.NAME.")


def written(default: Any) -> str:
    match default:
        case _ if default is PydanticUndefined:
            return "required"
        case None:
            return "none"
        case "":
            return '""'
        case float():
            return f"{default:g}"
        case _:
            return str(default)


def test_every_setting_is_documented_with_its_default_and_no_other() -> None:
    documented = {row[0]: row[1] for row in rows(read("docs/operations.md"), "Setting")}

    assert documented == dict(settings_of(Settings))


def test_every_topic_is_documented() -> None:
    assert not [topic.name for topic in CATALOGUE if f"`{topic.name}`" not in read("docs/topics.md")]


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_every_command_is_documented(entry: Entry) -> None:
    command = LazyCommand(entry).load()
    typed = [f"{entry.name} {name}" for name in getattr(command, "commands", {})] or [entry.name]

    assert not [text for text in typed if f"rollstream {text}" not in read("docs/cli.md")]


def test_every_variable_that_is_read_is_documented() -> None:
    code = "".join(path.read_text() for part in ("rollstream", "services") for path in (ROOT / part).rglob("*.py"))
    read_by_code = set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', code))
    read_by_compose = set(re.findall(r"\$\{(\w+):-", read("compose.yml"))) | set(
        re.findall(r"^ +([A-Z_]+):$", read("compose.yml"), re.MULTILINE)
    )

    missing = [name for name in read_by_code | read_by_compose if name not in read("docs/operations.md")]

    assert not missing


def test_every_test_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", read("docs/architecture.md"))

    missing = [
        f"{path}::{name}" for path, name in named if f"def {name}(" not in (read(path) if (ROOT / path).exists() else "")
    ]

    assert named
    assert not missing


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = {name for path in DOCUMENTS for name in re.findall(r"(?:`|^)make ([a-z-]+)\b", path.read_text(), re.MULTILINE)}

    assert named <= targets
    assert {"demo", "test", "check", "bench", "clean", "help"} <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]

    assert not [link for link in links if not leads_somewhere(document, link)]


def leads_somewhere(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = document if not path else (document.parent / path).resolve()
    if not anchor or not target.is_file():
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_decision_is_in_the_index_under_its_title() -> None:
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in DECISIONS}
    index = re.findall(r"^\| \[(\d{4})\]\(([\w.-]+)\) \| (.+) \|$", read("docs/decisions/README.md"), re.MULTILINE)

    assert {name: f"{number} {title}" for number, name, title in index} == titles


def test_the_changelog_begins_with_the_version_under_way() -> None:
    first = re.search(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)

    assert first
    assert rollstream.__version__ in first[1]
