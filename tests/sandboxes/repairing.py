"""A repository with a bug, and what it takes to verify patches to it in real boxes."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from rollstream.blobs import BlobStore
from rollstream.environments import registry
from rollstream.environments.protocol import Environment, Episode, Services, Verdict
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.testing.boxes import OwnBoxes
from rollstream.testing.playing import NoGraders
from schemas.episode import StopReason
from schemas.session import Submission

BUG = "def double(number):\n    return number + 2\n\n\ndef half(number):\n    return number / 2\n"
FIXED = BUG.replace("number + 2", "number * 2")
PUBLIC = """from lib import double, half


def test_half():
    assert half(4) == 2


def test_two():
    assert double(2) == 4
"""
HIDDEN = "from lib import double\n\n\ndef test_three():\n    assert double(3) == 6\n"
FILES = {"lib.py": BUG, "tests/test_lib.py": PUBLIC}
BOX = {"memory_mib": 256, "disk_mib": 64, "pids": 64}


def diff(before: Mapping[str, str | bytes | None], after: Mapping[str, str | bytes | None], scratch: Path) -> str:
    """A patch between two trees, as an agent hands it in. A path whose content is None is not there; a link is `-> TARGET`."""
    root = scratch / "diff"
    root.mkdir()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "core.autocrlf=false"]
    subprocess.run([*git, "init", "-q"], cwd=root, check=True)
    for tree in (before, after):
        # What goes first: a link may take the place of a directory.
        for path, content in sorted(tree.items(), key=lambda item: item[1] is not None):
            _write(root / path, content)
        subprocess.run([*git, "add", "-A"], cwd=root, check=True)
        if tree is before:
            subprocess.run([*git, "commit", "-qm", "x"], cwd=root, check=True)
    done = subprocess.run([*git, "diff", "--cached", "--binary"], cwd=root, check=True, capture_output=True)
    subprocess.run(["rm", "-rf", str(root)], check=True)
    return done.stdout.decode()


def _write(path: Path, content: str | bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if content is None:
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
        return
    if isinstance(content, str) and content.startswith("-> "):
        path.symlink_to(content.removeprefix("-> "))
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


class Verifying:
    """Verifies patches with real boxes of one provider."""

    def __init__(self, provider: SandboxProvider, scratch: Path) -> None:
        self.provider = provider
        self.scratch = scratch
        self.blobs = BlobStore(str(scratch / "blobs"))
        self.worker = f"test-{uuid4().hex[:8]}"
        self.boxes = OwnBoxes(provider, self.worker)
        (scratch / "repo").mkdir()
        for path, content in FILES.items():
            _write(scratch / "repo" / path, content)

    def services(self) -> Services:
        return Services(NoGraders(), sandboxes=self.boxes, blobs=self.blobs)

    def row(self, **changes: Any) -> dict[str, Any]:
        """A row of `code_repair` as it stands on the log."""
        row = {
            "instruction": "double does not double",
            "repo": "repo",
            "tests": {"tests/test_hidden.py": HIDDEN},
            "patch": self.patch({"lib.py": FIXED}),
            "box": BOX,
            "test_timeout_s": 60,
            **changes,
        }
        environment: Any = registry.load("code_repair")
        localised: dict[str, Any] = environment.localise(row, self.scratch, self.blobs.keep)
        return localised

    def patch(self, after: Mapping[str, str | bytes | None]) -> str:
        return diff(FILES, {**FILES, **after}, self.scratch)

    async def verify(self, artifact: str | None, *, stop_reason: StopReason = "completed", **changes: Any) -> Verdict:
        """The verdict of `code_repair` on a patch."""
        return await self.score(registry.load("code_repair"), self.row(**changes), artifact, stop_reason)

    async def score(
        self,
        environment: Environment[Any],
        row: Mapping[str, object],
        artifact: str | None,
        stop_reason: StopReason = "completed",
    ) -> Verdict:
        task = registry.admit(environment, row)
        return await environment.verify(task, Episode([], Submission(artifact=artifact), stop_reason), self.services())
