"""Patches as agents hand them in: what one touches, and the ways to apply it, in order. Pure; nothing here runs git.

A patch that cannot be applied is an outcome, not a failure of ours, so every judgement here is a value.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

MAX_PATCH_BYTES = 16 * 1024 * 1024
NO_NEWLINE = b"\\ No newline at end of file"
_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11, '"': 34, "\\": 92}
_MOVED = re.compile(rb"(?:rename|copy) (?:from|to) (.*)")
_HUNK = re.compile(rb"^@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@", re.MULTILINE)
_WITHOUT_HUNKS = re.compile(
    rb"^(?:rename to |copy to |new mode |deleted file mode |new file mode |GIT binary patch)", re.MULTILINE
)

Fault = Literal["empty", "not_a_diff", "too_large", "unsafe_path"]
Tool = Literal["apply", "apply_3way", "apply_reject", "patch_fuzz"]
Ending = Literal["as_is", "lf"]

TOOLS: dict[Tool, tuple[str, ...]] = {
    "apply": ("git", "apply", "--verbose"),
    "apply_3way": ("git", "apply", "--verbose", "--3way"),
    "apply_reject": ("git", "apply", "--verbose", "--reject"),
    "patch_fuzz": ("patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i"),
}
"""Strictest first; each takes the patch's path as its last argument. SWE-bench's harness has the same ladder."""
ALREADY_APPLIED = ("git", "apply", "--reverse", "--check")
"""Succeeds if the tree has the patch in it already."""
RESET: tuple[tuple[str, ...], ...] = (("git", "reset", "--hard", "--quiet"), ("git", "clean", "-ffdq"))
"""Between tries: a try that failed may have changed half of the files. Ignored files stay, because builds are among them."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch, mended where that changes nothing of what it says."""

    content: bytes
    paths: tuple[str, ...]
    """Files that it touches, in its order; of a rename, both."""
    mended: bool
    """A missing newline at its end was added."""
    crlf: bool
    """All of its lines end in CR LF: it may have been written so, or carried through something that did that."""


@dataclass(frozen=True, slots=True)
class Step:
    """One try: which text of the patch, with which tool."""

    tool: Tool
    ending: Ending

    def argv(self, path: str) -> tuple[str, ...]:
        return (*TOOLS[self.tool], path)


def read_patch(raw: bytes, *, max_bytes: int = MAX_PATCH_BYTES) -> Patch | Fault:
    """A patch out of what an agent left, or what is wrong with it."""
    if len(raw) > max_bytes:
        return "too_large"
    if not raw.strip():
        return "empty"
    paths = tuple(dict.fromkeys(_paths(raw)))
    if not paths or not (_HUNK.search(raw) or _WITHOUT_HUNKS.search(raw)):
        return "not_a_diff"
    if any(is_unsafe(path) for path in paths):
        return "unsafe_path"
    lines = raw.splitlines(keepends=True)
    mended = not raw.endswith(b"\n")
    crlf = all(line.endswith(b"\r\n") for line in lines[: -1 if mended else None])
    content = raw + (b"\r\n" if crlf and len(lines) > 1 else b"\n") if mended else raw
    return Patch(content, paths, mended, crlf and len(lines) > 1)


def text_of(patch: Patch, ending: Ending) -> bytes:
    """The patch as it is, or with every line ending in LF."""
    return patch.content if ending == "as_is" else patch.content.replace(b"\r\n", b"\n")


def ladder(patch: Patch) -> Iterator[Step]:
    """Every try in order. The tree is reset between two of them, and the first that succeeds ends it.

    Text is changed before strictness is given up: a patch that was carried through CR LF applies strictly once that is undone.
    """
    endings: tuple[Ending, ...] = ("as_is", "lf") if patch.crlf else ("as_is",)
    for tool in TOOLS:
        for ending in endings:
            yield Step(tool, ending)


def is_unsafe(path: str) -> bool:
    """Whether a path lies outside of the repository, or in git's own directory."""
    parts = PurePosixPath(path).parts
    return not parts or path.startswith("/") or ".." in parts or any(part.lower() == ".git" for part in parts) or "\0" in path


def test_files(test_patch: Patch, patch: Patch) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files that a test patch restores: all that it touches, and those of them that the agent's patch has changed."""
    return test_patch.paths, tuple(path for path in test_patch.paths if path in set(patch.paths))


def _paths(raw: bytes) -> Iterator[str]:
    """Paths of a diff as they stand in it, without `a/` and `b/`."""
    for line in _headers(raw):
        word, _, text = line.rstrip(b"\r").partition(b" ")
        if line.startswith(b"diff --git "):
            yield from (_stripped(path) for path in _pair(text.removeprefix(b"--git ")))
        elif word in (b"---", b"+++") and text:
            path = unquoted(text.split(b"\t")[0].rstrip())
            if path != "/dev/null":
                yield _stripped(path)
        elif moved := _MOVED.match(line.rstrip(b"\r")):
            yield unquoted(moved[1])


def _headers(raw: bytes) -> Iterator[bytes]:
    """Lines of a diff outside of its hunks: a line that was removed may look like the head of a file."""
    old = new = 0
    for line in raw.split(b"\n"):
        if (old > 0 or new > 0) and line[:1] in (b" ", b"-", b"+", b"\\", b"", b"\r"):
            old -= line[:1] not in (b"+", b"\\")
            new -= line[:1] not in (b"-", b"\\")
        elif hunk := _HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
        else:
            old = new = 0
            yield line


def _pair(text: bytes) -> Sequence[str]:
    """Both paths of `diff --git a/x b/x`. Without quotes and with spaces, the two halves are the same but for `a/` and `b/`."""
    if text.startswith(b'"') or text.endswith(b'"'):
        return [unquoted(word) for word in re.findall(rb'"(?:[^"\\]|\\.)*"|\S+', text)][:2]
    middle = len(text) // 2
    first, second = text[:middle], text[middle + 1 :]
    if text[middle : middle + 1] == b" " and first[:2] == b"a/" and second[:2] == b"b/" and first[2:] == second[2:]:
        return [unquoted(first), unquoted(second)]
    words = text.split(b" b/", 1)
    return [unquoted(words[0]), unquoted(b"b/" + words[1])] if len(words) == 2 else [unquoted(text)]


def _stripped(path: str) -> str:
    """Without the first part, as `-p1` does; what has only one part keeps it."""
    return path[2:] if path.startswith(("a/", "b/")) else path


def unquoted(raw: bytes) -> str:
    """A path as git writes it: in C's quotes if it has control characters, quotes or bytes that are not ASCII."""
    if not (len(raw) >= 2 and raw.startswith(b'"') and raw.endswith(b'"')):
        return raw.decode(errors="surrogateescape")

    def one(match: re.Match[bytes]) -> bytes:
        text = match[1].decode("latin-1")
        return bytes([int(text, 8) & 255 if text[0].isdigit() else _ESCAPES.get(text, ord(text[0]) & 255)])

    return re.sub(rb"\\([0-7]{1,3}|.)", one, raw[1:-1], flags=re.DOTALL).decode(errors="surrogateescape")
