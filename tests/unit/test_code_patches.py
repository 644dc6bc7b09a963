"""Patches of agents: what is wrong with one, and that the ladder applies what can be applied, with git itself."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rollstream.environments.code.patches import (
    ALREADY_APPLIED,
    RESET,
    TOOLS,
    Patch,
    Step,
    is_unsafe,
    ladder,
    read_patch,
    test_files,
    text_of,
    unquoted,
)

test_files.__test__ = False  # type: ignore[attr-defined]
BEFORE = "".join(f"line {number}\n" for number in range(1, 21))
AFTER = BEFORE.replace("line 10\n", "line ten\n")


class Repository:
    """A git repository in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        (root / "a.txt").write_text(BEFORE)
        self.commit()

    def git(self, *arguments: str) -> bytes:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "core.autocrlf=false")
        return subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True).stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "x")

    def diff(self) -> bytes:
        """What has changed since the last commit; the tree is reset."""
        self.git("add", "-A")
        patch = self.git("diff", "--cached", "--binary")
        self.git("reset", "-q", "--hard")
        return patch

    def climb(self, patch: Patch) -> Step | None:
        """The step of the ladder that applied a patch."""
        for step in ladder(patch):
            (self.root.parent / "patch").write_bytes(text_of(patch, step.ending))
            if subprocess.run(step.argv("../patch"), cwd=self.root, capture_output=True).returncode == 0:
                return step
            for command in RESET:
                subprocess.run(command, cwd=self.root, check=True, capture_output=True)
        return None


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "repository").mkdir()
    return Repository(tmp_path / "repository")


@pytest.fixture
def gold(repository: Repository) -> bytes:
    (repository.root / "a.txt").write_text(AFTER)
    return repository.diff()


def read(raw: bytes) -> Patch:
    patch = read_patch(raw)
    assert isinstance(patch, Patch), patch
    return patch


def test_a_clean_patch_applies_at_the_first_step(repository: Repository, gold: bytes) -> None:
    assert repository.climb(read(gold)) == Step("apply", "as_is")
    assert (repository.root / "a.txt").read_text() == AFTER


def test_a_missing_newline_at_the_end_is_mended(repository: Repository, gold: bytes) -> None:
    patch = read(gold.rstrip(b"\n"))
    assert patch.mended
    assert repository.climb(patch) == Step("apply", "as_is")


def test_a_patch_that_was_carried_through_crlf_applies_strictly(repository: Repository, gold: bytes) -> None:
    patch = read(gold.replace(b"\n", b"\r\n"))
    assert patch.crlf
    assert repository.climb(patch) == Step("apply", "lf")
    assert (repository.root / "a.txt").read_text() == AFTER


def test_a_patch_of_a_file_with_crlf_keeps_it(repository: Repository) -> None:
    (repository.root / "a.txt").write_bytes(BEFORE.replace("\n", "\r\n").encode())
    repository.commit()
    (repository.root / "a.txt").write_bytes(AFTER.replace("\n", "\r\n").encode())
    patch = read(repository.diff())
    assert not patch.crlf
    assert repository.climb(patch) == Step("apply", "as_is")
    assert (repository.root / "a.txt").read_bytes() == AFTER.replace("\n", "\r\n").encode()


def test_context_that_has_moved_on_needs_a_later_step(repository: Repository, gold: bytes) -> None:
    blind = gold.replace(gold[gold.index(b"index ") : gold.index(b"---")], b"")
    (repository.root / "a.txt").write_text(BEFORE.replace("line 8\n", "line eight\n"))
    repository.commit()
    assert repository.climb(read(blind)) == Step("patch_fuzz", "as_is")
    assert "line ten" in (repository.root / "a.txt").read_text()


def test_what_applies_in_no_way_leaves_the_tree_as_it_was(repository: Repository, gold: bytes) -> None:
    (repository.root / "a.txt").write_text("something else\n")
    repository.commit()
    assert repository.climb(read(gold)) is None
    assert repository.git("status", "--porcelain") == b""


def test_a_patch_that_is_in_the_tree_already_is_told(repository: Repository, gold: bytes) -> None:
    (repository.root.parent / "patch").write_bytes(gold)

    def already() -> bool:
        return subprocess.run([*ALREADY_APPLIED, "../patch"], cwd=repository.root, capture_output=True).returncode == 0

    assert not already()
    repository.climb(read(gold))
    repository.commit()
    assert already()


def test_every_kind_of_change_is_named_with_its_paths(repository: Repository) -> None:
    root = repository.root
    for name in ("gone", "moved from", "mode.sh", "naïve", 'quo"te'):
        (root / name).write_text(f"{name}\n" * 5)
    repository.commit()
    (root / "gone").unlink()
    (root / "moved from").rename(root / "moved to")
    (root / "mode.sh").chmod(0o755)
    (root / "naïve").write_text("1\n--- a/trap\n+++ b/trap\n")
    (root / 'quo"te').write_text("2\n")
    (root / "binary").write_bytes(bytes(range(256)))
    (root / "link").symlink_to("/etc/passwd")
    patch = read(repository.diff())
    assert set(patch.paths) == {"gone", "moved from", "moved to", "mode.sh", "naïve", 'quo"te', "binary", "link"}
    assert repository.climb(patch) == Step("apply", "as_is")


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"I have mended the bug.\n", "not_a_diff"),
        (b"\x00\xff" * 50, "not_a_diff"),
        (b"--- a/x\n+++ b/x\nno hunk\n", "not_a_diff"),
        (b"x" * 101, "too_large"),
        (b"--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "unsafe_path"),
        (b"--- /dev/null\n+++ /etc/cron.d/x\n@@ -0,0 +1 @@\n+b\n", "unsafe_path"),
        (b"diff --git a/.git/hooks/x b/.git/hooks/x\nnew file mode 100755\n@@ -0,0 +1 @@\n+b\n", "unsafe_path"),
    ],
)
def test_what_is_no_patch_is_told_apart(raw: bytes, fault: str) -> None:
    assert read_patch(raw, max_bytes=100) == fault


def test_a_removed_line_that_looks_like_a_head_names_no_file() -> None:
    raw = b"--- a/notes\n+++ b/notes\n@@ -1,2 +1,2 @@\n--- /etc/passwd\n+++ ../../x\n same\n"
    assert read(raw).paths == ("notes",)
    hidden = raw + b"--- a/x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n"
    assert read_patch(hidden) == "unsafe_path"


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x", ".git/config", "a/.GIT/x", "", "x\0y"])
def test_paths_outside_of_the_work_tree_are_unsafe(path: str) -> None:
    assert is_unsafe(path)


@pytest.mark.parametrize("path", ["x", "a/b", ".github/x", "a..b", ".gitignore"])
def test_paths_of_files_are_safe(path: str) -> None:
    assert not is_unsafe(path)


def test_test_files_that_the_agent_changed_are_named() -> None:
    def of(*paths: str) -> Patch:
        return Patch(b"", paths, False, False)

    assert test_files(of("t/a", "t/b"), of("src", "t/b")) == (("t/a", "t/b"), ("t/b",))


def test_text_is_changed_before_strictness_is_given_up(gold: bytes) -> None:
    steps = list(ladder(read(gold.replace(b"\n", b"\r\n"))))
    assert [step.tool for step in steps[::2]] == list(TOOLS)
    assert [step.ending for step in steps[:2]] == ["as_is", "lf"]


@given(st.binary(max_size=300))
def test_any_bytes_can_be_judged(raw: bytes) -> None:
    judged = read_patch(raw)
    if isinstance(judged, Patch):
        assert judged.content.endswith(b"\n")
        assert judged.content.startswith(raw)
        assert not any(is_unsafe(path) for path in judged.paths)


@given(st.binary(max_size=40))
def test_a_quoted_path_of_any_bytes_is_read(raw: bytes) -> None:
    quoted = b'"' + b"".join(b"\\%03o" % byte for byte in raw) + b'"'
    assert unquoted(quoted).encode(errors="surrogateescape") == raw
