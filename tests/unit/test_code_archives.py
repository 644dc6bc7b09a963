"""Repositories as archives: the same bytes every time, the history of one commit, a sentence for what cannot be packed."""

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from rollstream.environments.code.archives import Archive, archive_of, tar_of
from rollstream.errors import Refused


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "init.defaultBranch=trunk")
    return subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src/a.py").write_text("bug = True\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("src/a.py")
    return root


@pytest.fixture
def repository(folder: Path) -> Path:
    """Three commits, a tag and a branch ahead of the second."""
    git(folder, "init", "-q")
    for number in (1, 2, 3):
        (folder / "src/a.py").write_text(f"number = {number}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", f"commit {number}")
    git(folder, "tag", "release")
    git(folder, "branch", "later")
    git(folder, "remote", "add", "origin", "https://example.invalid/x.git")
    return folder


def unpacked(archive: Archive, into: Path) -> Path:
    into.mkdir()
    with tarfile.open(fileobj=BytesIO(archive.content)) as tar:
        tar.extractall(into, filter="data")
    git(into, "reset", "-q", "--hard")
    return into


def test_a_folder_becomes_one_commit_with_modes_and_links(folder: Path, tmp_path: Path) -> None:
    archive = archive_of(folder)
    found = unpacked(archive, tmp_path / "out")
    assert (found / "src/a.py").read_text() == "bug = True\n"
    assert (found / "run.sh").stat().st_mode & 0o111
    assert (found / "link").readlink() == Path("src/a.py")
    assert git(found, "rev-list", "--all") == archive.base
    assert git(found, "status", "--porcelain") == ""
    assert not (folder / ".git").exists()


def test_what_lies_about_makes_no_difference(folder: Path) -> None:
    before = archive_of(folder)
    (folder / "src/__pycache__").mkdir()
    (folder / "src/__pycache__/a.cpython-311.pyc").write_bytes(b"\0")
    (folder / ".pytest_cache").mkdir()
    (folder / ".pytest_cache/README.md").write_text("x")
    (folder / "src/a.py").touch()
    assert archive_of(folder) == before
    (folder / "src/a.py").write_text("bug = False\n")
    assert archive_of(folder).base != before.base


def test_what_the_folder_ignores_stays_behind(folder: Path, tmp_path: Path) -> None:
    (folder / ".gitignore").write_text("secrets.env\n")
    (folder / "secrets.env").write_text("TOKEN=1")
    assert not (unpacked(archive_of(folder), tmp_path / "out") / "secrets.env").exists()


def test_a_repository_keeps_its_past_and_has_no_future(repository: Path, tmp_path: Path) -> None:
    third = git(repository, "rev-parse", "HEAD")
    archive = archive_of(repository, "HEAD~1")
    found = unpacked(archive, tmp_path / "out")
    assert git(found, "log", "--format=%s", "--all") == "commit 2\ncommit 1"
    assert (found / "src/a.py").read_text() == "number = 2\n"
    assert (git(found, "tag"), git(found, "remote"), git(found, "branch", "--format=%(refname:short)")) == ("", "", "main")
    assert subprocess.run(["git", "cat-file", "-e", third], cwd=found, capture_output=True).returncode != 0
    assert git(found, "fsck", "--unreachable") == ""


def test_how_a_repository_is_packed_makes_no_difference(repository: Path) -> None:
    before = archive_of(repository, "HEAD~1")
    git(repository, "gc", "-q", "--prune=now")
    git(repository, "commit", "-qm", "later", "--allow-empty")
    assert archive_of(repository, before.base) == before


def test_a_tar_file_is_what_it_holds(folder: Path, tmp_path: Path) -> None:
    for name, inside in (("a.tar.gz", ["-C", str(tmp_path), "project"]), ("b.tar", ["-C", str(folder), "."])):
        subprocess.run(["tar", "-caf", str(tmp_path / name), *inside], check=True)
        assert archive_of(tmp_path / name) == archive_of(folder)


def test_relative_paths_are_understood(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert archive_of(Path("project")) == archive_of(folder)


def test_what_cannot_be_packed_is_one_sentence(folder: Path, repository: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "x").write_text("x" * 2000)
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, base, words in (
        (tmp_path / "nowhere", None, "expected a folder or a tar file at it, found nothing"),
        (plain / "x", None, "expected a folder or a tar file at it, found a file that tar cannot read: "),
        (empty, None, "expected files in the folder it, found none"),
        (plain, "v1", r"expected a git repository at it, since a base is named \(v1\), found a folder without one"),
        (repository, "v9", "expected a revision of the repository it as its base, found no revision 'v9'"),
        (repository, "--all", "expected a revision of the repository it as its base, found no revision '--all'"),
    ):
        with pytest.raises(Refused, match=words):
            archive_of(path, base, shown="it")
    (repository / "src/a.py").write_text("changed\n")
    with pytest.raises(Refused, match="it has changes that are not committed: commit them, or name a `base`"):
        archive_of(repository, shown="it")
    assert archive_of(repository, "HEAD").base == git(repository, "rev-parse", "HEAD")
    with pytest.raises(Refused, match="expected a repository of at most 100 bytes at it, found "):
        archive_of(plain, shown="it", max_bytes=100)


def test_a_tar_of_texts_does_not_depend_on_their_order() -> None:
    files = {"b": (b"2", 0o644), "a/c": (b"1", 0o755)}
    assert tar_of(files) == tar_of(dict(reversed(files.items())))
