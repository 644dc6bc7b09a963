"""What an agent's box is left with of a repository that an image holds: its base, and no way to what came after it."""

import subprocess
from pathlib import Path

import pytest

from rollstream.environments.code.workspaces import of_archive, of_image


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "init.defaultBranch=trunk")
    return subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """As an image holds it: later commits on a branch, a tag, a remote, a stash and in the reflog, packed and loose."""
    root = tmp_path / "testbed"
    root.mkdir()
    git(root, "init", "-q")
    (root / ".gitignore").write_text("build/\n")
    for number in range(6):
        (root / "a.py").write_text(f"number = {number}\n")
        git(root, "add", "-A")
        git(root, "commit", "-qm", f"commit {number}")
        if number == 4:
            git(root, "gc", "-q")
    git(root, "tag", "-a", "fixed", "-m", "x")
    git(root, "branch", "later")
    git(root, "update-ref", "refs/remotes/origin/trunk", "HEAD")
    git(root, "remote", "add", "origin", "https://example.invalid/x.git")
    (root / "a.py").write_text("stashed = 1\n")
    git(root, "stash")
    git(root, "reset", "-q", "--hard", "HEAD~3")
    (root / "build").mkdir()
    (root / "build/ext.so").write_text("built")
    (root / "egg [1].info").write_text("left by the image")
    return root


def run(root: Path, commands: list[list[str]]) -> None:
    for argv in commands:
        subprocess.run(argv, cwd=root, check=True, capture_output=True)


def objects(root: Path) -> set[str]:
    listed = git(root, "cat-file", "--batch-check=%(objectname)", "--batch-all-objects")
    return set(listed.split())


def test_nothing_that_came_after_the_base_is_left_in_the_agents_box(root: Path) -> None:
    base, later = git(root, "rev-parse", "HEAD~1"), git(root, "rev-list", "later", "--not", "HEAD~1").split()
    assert len(later) == 4
    run(root, of_image(base).commands)
    assert git(root, "log", "--format=%s", "--all", "--reflog") == "What the image has beside it\ncommit 1\ncommit 0"
    assert not objects(root) & {*later}
    assert git(root, "fsck", "--unreachable", "--no-reflogs") == ""
    assert (git(root, "tag"), git(root, "remote"), git(root, "stash", "list"), git(root, "reflog")) == ("", "", "", "")
    assert git(root, "rev-parse", "HEAD~1") == base
    assert git(root, "branch", "--show-current") == "main"


def test_what_the_image_built_stays_and_is_nothing_that_the_agent_did(root: Path) -> None:
    run(root, of_image("HEAD").commands)
    assert (root / "build/ext.so").read_text() == "built"
    assert git(root, "ls-files") == ".gitignore\na.py\negg [1].info"
    (root / "mine.py").write_text("x = 1\n")
    (root / "__pycache__").mkdir()
    (root / "__pycache__/a.pyc").write_text("")
    git(root, "add", "-A")
    assert git(root, "diff", "--cached", "--name-only", "HEAD") == "mine.py"


def test_the_verifiers_box_has_the_same_base_and_is_not_searched(root: Path) -> None:
    base = git(root, "rev-parse", "HEAD~1")
    run(root, of_image(base, hide=False).commands)
    assert git(root, "rev-parse", "HEAD~1") == base
    assert git(root, "tag") == "fixed"
    assert git(root, "status", "--porcelain") == ""


def test_what_an_image_of_swe_bench_has_set_up_is_part_of_its_base(root: Path) -> None:
    base = git(root, "rev-parse", "HEAD")
    (root / "a.py").write_text("set_up = True\n")
    git(root, "commit", "-qam", "SWE-bench")
    run(root, of_image(base).commands)
    assert (root / "a.py").read_text() == "set_up = True\n"
    assert git(root, "log", "--format=%s", "--all").splitlines()[1:3] == ["SWE-bench", "commit 2"]


def test_changes_in_the_image_are_undone(root: Path) -> None:
    (root / "a.py").write_text("changed = True\n")
    run(root, of_image("HEAD").commands)
    assert (root / "a.py").read_text() == "number = 2\n"
    assert git(root, "status", "--porcelain") == ""


def test_an_image_without_the_base_says_so(root: Path) -> None:
    argv = of_image("0" * 40).commands[0]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"the repository in {root} has no revision {'0' * 40}\n"


def test_set_up_goes_last() -> None:
    assert of_archive("blob.x", "abc", ["make"]).commands == [
        ["git", "reset", "--hard", "--quiet", "abc"],
        ["sh", "-c", "make"],
    ]
    assert of_image("abc", ["make"]).commands[-1] == ["sh", "-c", "make"]
