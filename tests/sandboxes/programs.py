"""The agents' programs that tests play with: real ones, installed once for each machine into the cache directory.

Boxes of bubblewrap read them as another user, who gets through to no home directory of root's: so they are linked to a place
that everybody reaches, for the time of the tests.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from rollstream.broker.jars import cache_dir
from rollstream.settings import CliSettings, HarnessSettings

PINS = Path(__file__).with_name("programs.txt")


def installed() -> Path:
    """The folder with the packages of `programs.txt`, installed if it is not there."""
    pins = PINS.read_text().split()
    target = cache_dir(dict(os.environ)).resolve() / "tests" / f"programs-{sha256(' '.join(pins).encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".programs.", dir=target.parent))
    # Without scripts: the programs are binaries, in packages of their own for each platform.
    command = ["npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(partial), *pins]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.fail(f"{PINS.name} cannot be installed: {done.stderr[-2_000:]}", pytrace=False)
        if not target.exists():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def reachable() -> Iterator[HarnessSettings]:
    """Settings of the harnesses whose programs these are."""
    modules = installed() / "node_modules"
    machine = "arm64" if platform.machine() in ("aarch64", "arm64") else "x64"
    claude = modules / "@anthropic-ai" / f"claude-code-linux-{machine}" / "claude"
    (codex,) = (modules / "@openai" / f"codex-linux-{machine}" / "vendor").iterdir()
    folder = Path(tempfile.mkdtemp(prefix="rollstream-programs-"))
    try:
        folder.chmod(0o755)
        _link(claude, folder / "claude")
        for path in (codex / "bin").iterdir():
            _link(path, folder / "codex" / "bin" / path.name)
        yield HarnessSettings(
            claude_code=CliSettings(path=str(folder / "claude")), codex=CliSettings(path=str(folder / "codex"))
        )
    finally:
        shutil.rmtree(folder)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
