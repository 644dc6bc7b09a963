"""Sections of `name = value`. A value is a number, true, false, or text, in quotes if need be; `#` begins a comment."""

Value = str | int | float | bool


class Malformed(ValueError):
    """The message begins with the number of the line."""


def parse(text: str) -> dict[str, dict[str, Value]]:
    """Sections by name; what stands before the first is in the section with the empty name.

    Raises:
        Malformed: a line is neither a section nor `name = value`, or a quote is never closed.
    """
    sections: dict[str, dict[str, Value]] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        if line.startswith("["):
            section = line.strip("[]")
            sections[section] = {}
            continue
        name, _, value = line.partition("=")
        if not name.strip() or "=" not in line:
            raise Malformed(f"line {number}: expected name = value, found {line!r}")
        sections.setdefault(section, {})[name.strip()] = _value(value.strip(), number)
    return sections


def _value(text: str, number: int) -> Value:
    if text.startswith('"'):
        return text.strip('"')
    if text in ("true", "false"):
        return bool(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
