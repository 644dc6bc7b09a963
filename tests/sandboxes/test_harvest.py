"""What is taken out of an agent's box: whatever the agent did to its repository, its difference from the base. Nothing runs."""

import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from rollstream.blobs import BlobReference, BlobStore
from rollstream.errors import EnvironmentFailure
from rollstream.sandboxes.bubblewrap import BubblewrapProvider
from rollstream.sandboxes.docker import DockerProvider
from rollstream.sandboxes.harvest import Base, keep_base
from rollstream.sandboxes.protocol import Sandbox, SandboxProvider
from rollstream.testing.boxes import BoxMaking, sh
from schemas.session import Submission, Workspace
from services.agent_worker.harvest import MAX_ARTIFACT_BYTES, MAX_BASE_BYTES, Harvest

SET_UP = """
git init -q . && mkdir -p src/deep && printf 'one\\ntwo\\n' > src/a.py && printf 'kept' > no_newline.txt
printf '*.pyc\\n' > .gitignore && head -c 3000 /dev/zero > zeros.bin && printf 'x' > src/deep/x.py
chmod 755 src/deep/x.py && ln -s a.py src/link && git add -A && git commit -q -m base
"""
FIX = "printf 'one\\n2\\n' > src/a.py\n"
INLINE = 8192


class Bubblewrap(BoxMaking):
    def provider(self) -> SandboxProvider:
        return BubblewrapProvider("agent")


class Docker(BoxMaking):
    tag = ""

    def provider(self) -> SandboxProvider:
        return DockerProvider("agent", image=self.tag)


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker])])
def making(request: pytest.FixtureRequest) -> BoxMaking:
    request.getfixturevalue("bubblewrap")
    if request.param == "bubblewrap":
        return Bubblewrap()
    making = Docker()
    making.tag = request.getfixturevalue("sandbox_image")
    return making


class Scene:
    """A box with a repository, its base, and somewhere for what is long."""

    def __init__(self, box: Sandbox, base: Base, blobs: BlobStore) -> None:
        self.box, self.base, self.blobs = box, base, blobs

    async def act(self, script: str) -> None:
        done = await sh(self.box, script, timeout_s=60)
        assert done.ok, done.stderr.text

    async def take(self, *files: str) -> Submission:
        await self.box.kill()
        workspace = Workspace(base="HEAD", files=list(files))
        return await Harvest(self.box, self.blobs, INLINE).take(workspace, self.base, Submission(text="done"))

    async def patch(self) -> bytes:
        submission = await self.take()
        assert submission.left_out == {}
        assert submission.artifact is not None
        reference = BlobReference.parse(submission.artifact)
        return submission.artifact.encode() if reference is None else await self.blobs.get(reference)


OpenScene = Callable[..., AbstractAsyncContextManager[Scene]]


@pytest.fixture
def scene(making: BoxMaking, tmp_path: Path) -> OpenScene:
    @asynccontextmanager
    async def open_scene(set_up: str = SET_UP, **limits: int) -> AsyncIterator[Scene]:
        async with making.box(**limits) as box:
            done = await sh(box, set_up)
            assert done.ok, done.stderr.text
            base = await keep_base(box, "HEAD", MAX_BASE_BYTES)
            try:
                yield Scene(box, base, BlobStore(str(tmp_path / "blobs")))
            finally:
                base.close()

    return open_scene


def applied(patch: bytes, folder: Path) -> Path:
    """The base with a patch on it, on this machine."""
    folder.mkdir()
    environment = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"}
    environment |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    subprocess.run(["sh", "-ec", SET_UP], cwd=folder, env=environment, check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=patch, cwd=folder, env=environment, check=True)
    return folder


async def test_a_box_that_nobody_touched_gives_an_empty_patch(scene: OpenScene) -> None:
    async with scene() as here:
        assert await here.patch() == b""


WAYS = {
    "leaves its work lying about": FIX,
    "commits": FIX + "git add -A && git commit -q -m fix",
    "commits and resets the index": FIX + "git add -A && git commit -q -m fix && git reset -q --soft HEAD~1",
    "rewrites its history": FIX
    + "git checkout -q --orphan other && git add -A && git commit -q -m all && git branch -D master || :",
    "deletes the repository": FIX + "rm -rf .git",
    "breaks the repository": FIX + "rm -rf .git/objects && echo nonsense > .git/HEAD && echo '[core' > .git/config",
    "replaces the repository by a file": FIX + "rm -rf .git && echo 'gitdir: /nowhere' > .git",
    "starts a repository anew": FIX + "rm -rf .git && git init -q . && git add -A && git commit -q -m mine",
    "hides files from the index": FIX
    + "git update-index --assume-unchanged src/a.py && git update-index --skip-worktree src/a.py",
    "leaves a lock": FIX + "touch .git/index.lock",
    "excludes everything for itself": FIX + "echo '*' > .git/info/exclude && git config core.excludesFile .git/info/exclude",
    "ignores everything in its home": FIX + 'mkdir -p "$HOME/.config/git" && echo "*" > "$HOME/.config/git/ignore"',
    "replaces the base's objects": FIX + "git replace -f $(git rev-parse HEAD:src/a.py) $(git hash-object -w src/a.py)",
    "makes a file unreadable": FIX + "chmod 000 src/a.py src/deep",
    "fills its home": FIX + 'cat /dev/zero > "$HOME/full" 2>/dev/null || :',
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_same_patch_comes_out_of_an_agent_that(way: str, scene: OpenScene, tmp_path: Path) -> None:
    async with scene() as here:
        await here.act(WAYS[way])
        patch = await here.patch()
    assert patch.count(b"diff --git") == 1, patch.decode()
    assert (applied(patch, tmp_path / "applied") / "src" / "a.py").read_text() == "one\n2\n"


async def test_new_deleted_moved_binary_and_executable_files_and_links_travel(scene: OpenScene, tmp_path: Path) -> None:
    async with scene() as here:
        await here.act(
            "mkdir new && printf 'n' > new/file && rm no_newline.txt "
            "&& git mv src/deep/x.py src/y.py "
            "&& ln -s ../new/file src/l2 && head -c 100 /dev/urandom > zeros.bin && touch junk.pyc "
            "&& printf 'caf\\351\\n' > latin1.txt"
            " && printf 'a\\r\\nb\\r\\n' > crlf.txt"
        )
        raw = await here.box.read("zeros.bin", max_bytes=1000)
        patch = await here.patch()
    there = applied(patch, tmp_path / "applied")
    assert (there / "new" / "file").read_text() == "n"
    assert (there / "zeros.bin").read_bytes() == raw
    assert (there / "latin1.txt").read_bytes() == b"caf\xe9\n"
    assert (there / "crlf.txt").read_bytes() == b"a\r\nb\r\n"
    assert os.access(there / "src" / "y.py", os.X_OK)
    assert os.readlink(there / "src" / "l2") == "../new/file"
    assert not [name for name in ("no_newline.txt", "junk.pyc", "src/deep") if (there / name).exists()]


async def test_no_hook_filter_driver_or_monitor_of_the_agents_runs(scene: OpenScene) -> None:
    traps = """
    trap_='#!/bin/sh\\ntouch /tmp/sprung\\ncat\\n'
    printf "$trap_" > /tmp/trap && chmod 755 /tmp/trap
    for hook in pre-commit post-index-change post-checkout pre-auto-gc reference-transaction; do
        cp /tmp/trap .git/hooks/$hook; done
    for where in --global --local; do
        git config $where core.fsmonitor /tmp/trap; git config $where core.hooksPath "$PWD/.git/hooks"
        git config $where filter.evil.clean /tmp/trap; git config $where filter.evil.process /tmp/trap
        git config $where diff.evil.command /tmp/trap; git config $where diff.evil.textconv /tmp/trap
        git config $where diff.external /tmp/trap; git config $where core.attributesFile /tmp/attributes
        git config $where core.pager /tmp/trap; git config $where core.sshCommand /tmp/trap
    done
    echo '* filter=evil diff=evil ident' > .gitattributes; cp .gitattributes /tmp/attributes
    """
    async with scene() as here:
        await sh(here.box, FIX + traps + "rm -f /tmp/sprung")
        submission = await here.take()
        sprung = await sh(here.box, "ls /tmp/sprung")
    assert not sprung.ok, "something of the agent's was run"
    assert "+2" in (submission.artifact or "")
    assert submission.left_out == {}


async def test_a_repository_inside_of_the_repository_is_taken_as_files(scene: OpenScene, tmp_path: Path) -> None:
    async with scene() as here:
        await here.act(
            "mkdir -p sub empty && cd sub && git init -q . && echo s > s.txt && git add -A && git commit -q -m s && cd ../empty"
            " && git init -q . && echo e > e.txt"
        )
        patch = await here.patch()
    there = applied(patch, tmp_path / "applied")
    assert ((there / "sub" / "s.txt").read_text(), (there / "empty" / "e.txt").read_text()) == ("s\n", "e\n")


async def test_a_patch_above_the_inline_limit_is_a_blob(scene: OpenScene) -> None:
    async with scene(disk_mib=128, memory_mib=512) as here:
        await here.act("yes 'a line that is as long as it has to be' | head -c 20000000 > big.txt")
        submission = await here.take()
        assert submission.artifact is not None
        reference = BlobReference.parse(submission.artifact)
        assert reference is not None
        assert reference.size_bytes > 15_000_000
        assert (await here.blobs.get(reference)).startswith(b"diff --git a/big.txt b/big.txt")


async def test_a_patch_above_all_reason_is_left_out_and_said_so(scene: OpenScene) -> None:
    async with scene(disk_mib=400, memory_mib=1500) as here:
        await here.act(f"head -c {MAX_ARTIFACT_BYTES + 20_000_000} /dev/urandom > noise.bin")
        submission = await here.take()
    assert submission.artifact is None
    assert "longer than" in submission.left_out["artifact"]


async def test_declared_files_come_along_and_what_cannot_says_why(scene: OpenScene) -> None:
    async with scene() as here:
        await here.act(
            "echo answer > answer.txt; printf 'caf\\351' > odd.txt; ln -s /etc/passwd link; mkdir folder;"
            f"printf 'blob.{'0' * 64}.5' > forged.txt"
        )
        submission = await here.take("answer.txt", "odd.txt", "link", "folder", "absent", "/etc/passwd", "../up", "forged.txt")
        forged = BlobReference.parse(submission.files["forged.txt"])
        assert forged is not None
        assert (await here.blobs.get(forged)).startswith(b"blob.000")
    assert submission.files["answer.txt"] == "answer\n"
    assert submission.files["odd.txt"] == "caf\\xe9"
    assert set(submission.left_out) == {"link", "folder", "absent", "/etc/passwd", "../up"}
    assert submission.text == "done"


async def test_a_base_that_is_not_there_is_the_environments_failure(making: BoxMaking) -> None:
    async with making.box() as box:
        await sh(box, SET_UP)
        with pytest.raises(EnvironmentFailure, match="expected the revision nowhere"):
            await keep_base(box, "nowhere", MAX_BASE_BYTES)
