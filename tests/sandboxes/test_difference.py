"""What is told of a box's files against what they began as, in real boxes: complete, and by nothing that stands in the box."""

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollstream.errors import EnvironmentFailure
from rollstream.sandboxes.bubblewrap import BubblewrapProvider
from rollstream.sandboxes.harvest import Base, difference, keep_base
from rollstream.sandboxes.protocol import DownloadTooLarge, Sandbox, SandboxProvider
from rollstream.testing.boxes import BoxMaking, sh

BEGIN = """
git init -q . && printf 'one\\ntwo\\n' > kept && printf 'gone\\n' > gone && mkdir deep && printf 'x' > deep/file
printf '*.log\\n' > .gitignore
git add -A && git -c user.name=a -c user.email=a@b commit -q -m base
"""


class Boxes(BoxMaking):
    def provider(self) -> SandboxProvider:
        return BubblewrapProvider("agent")


@pytest.fixture
async def box(bubblewrap: None) -> AsyncIterator[Sandbox]:
    async with Boxes().box() as box:
        assert (await sh(box, BEGIN)).ok
        yield box


async def base_of(box: Sandbox) -> Base:
    return await keep_base(box, "HEAD", 2**20)


async def patch_of(box: Sandbox, base: Base) -> bytes:
    return (await difference(box, base, 2**20)).patch


def apply(patch: bytes, folder: Path) -> None:
    """Make the base in a folder of this machine, and change it."""
    (folder / "deep").mkdir()
    for name, text in (("kept", "one\ntwo\n"), ("gone", "gone\n"), ("deep/file", "x"), (".gitignore", "*.log\n")):
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=patch, check=True, cwd=folder)


async def test_every_change_is_in_the_patch_and_the_patch_makes_the_same_files(box: Sandbox, tmp_path: Path) -> None:
    base = await base_of(box)
    assert await patch_of(box, base) == b""
    await sh(
        box, "echo three >> kept; rm gone; printf '\\0\\377' > 'new file'; chmod +x deep/file; echo noise > a.log; ln -s kept l"
    )
    patch = await patch_of(box, base)
    assert patch == await patch_of(box, base), "looking changes nothing"
    apply(patch, tmp_path)
    assert (tmp_path / "kept").read_text() == "one\ntwo\nthree\n"
    assert (tmp_path / "new file").read_bytes() == b"\0\xff"
    assert (tmp_path / "l").readlink() == Path("kept")
    assert not (tmp_path / "gone").exists()
    assert (tmp_path / "deep/file").stat().st_mode & 0o100
    assert not (tmp_path / "a.log").exists()


@pytest.mark.parametrize(
    "deed",
    [
        "git -c user.name=a -c user.email=a@b commit -q -a -m mine",
        "rm -rf .git",
        "rm -rf .git && git init -q .",
        "git config core.worktree /tmp; git config diff.external false; printf '* -diff filter=evil\\n' > .git/info/attributes",
        "printf '[core]\\n\\thooksPath = /tmp\\n\\tautocrlf = true\\n[diff]\\n\\texternal = false\\n' > ~/.gitconfig",
        "chmod 000 .git",
        "git update-index --assume-unchanged kept",
    ],
)
async def test_whatever_becomes_of_the_repository_the_difference_is_told(box: Sandbox, deed: str) -> None:
    base = await base_of(box)
    await sh(box, f"echo three >> kept; {deed}")
    patch = await patch_of(box, base)
    assert patch.startswith(b"diff --git a/kept b/kept\n")
    assert patch.endswith(b" one\n two\n+three\n")


async def test_a_repository_that_was_made_inside_is_left_out_and_stays(box: Sandbox) -> None:
    base = await base_of(box)
    await sh(
        box, "git init -q inner && cd inner && echo x > y && git add y && git -c user.name=a -c user.email=a@b commit -qm z"
    )
    assert await patch_of(box, base) == b""
    assert (await sh(box, "test -d inner/.git")).ok


async def test_a_patch_that_is_too_long_and_a_base_that_is_not_there_are_said(box: Sandbox) -> None:
    base = await base_of(box)
    await sh(box, "head -c 300000 /dev/urandom > big")
    with pytest.raises(DownloadTooLarge):
        await difference(box, base, 10_000)
    with pytest.raises(EnvironmentFailure, match="expected the revision nowhere"):
        await keep_base(box, "nowhere", 2**20)
    with pytest.raises(EnvironmentFailure, match="at most 10 bytes"):
        await keep_base(box, "HEAD", 10)
