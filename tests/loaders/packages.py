"""Packages for one kind of test, installed once for each machine into the cache directory.

They are kept out of our own environment: numpy, pandas and their like would hide that our code does without them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest

from rollstream.broker.jars import cache_dir

HERE = Path(__file__).parent


def folder(name: str) -> Path:
    """Where the packages of `NAME.txt` are, or would be; other versions are in another place."""
    pins = (HERE / f"{name}.txt").read_bytes()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_dir(dict(os.environ)).resolve() / "tests" / f"{name}-{version}-{sha256(pins).hexdigest()[:12]}"


def install(name: str) -> Path:
    """The folder with the packages of `NAME.txt`, installed if it is not there."""
    target = folder(name)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=target.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--target", str(partial), "-r", str(HERE / f"{name}.txt")], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.fail(f"{name}.txt cannot be installed: {done.stderr[-2_000:]}", pytrace=False)
        if not target.exists():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def run(packages: Path, script: str, *arguments: str, scratch: Path) -> str:
    """What `script` of this folder prints, run with `packages` and without a network hub."""
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch / "hub"), "HF_DATASETS_CACHE": str(scratch / "cache")}
    quiet = {
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={**environment, **hub, **quiet, "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return done.stdout
