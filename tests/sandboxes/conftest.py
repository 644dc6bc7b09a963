"""What the sandbox providers need of a machine."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NoReturn
from uuid import uuid4

import pytest

pytest.register_assert_rewrite("rollstream.testing.boxes", "rollstream.testing.sandboxes", "rollstream.testing.sandbox_files")

from deploy.hostpack import PackagesMissing, pack  # noqa: E402
from deploy.sandbox_image import RECIPE  # noqa: E402
from rollstream.settings import HarnessSettings  # noqa: E402
from tests.sandboxes import programs  # noqa: E402


def lacking(what: str) -> NoReturn:
    """Skip the test; in CI, which can provide everything, fail it."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine that answers."""
    if shutil.which("docker") is None:
        lacking("the docker command is missing")
    if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode != 0:
        lacking("no Docker engine answers: deploy/with-docker.sh starts one for a command")


@pytest.fixture(scope="session")
def sandbox_image(engine: None) -> Iterator[str]:
    """The image of `make sandbox-image`, packed for the time of the session."""
    tag = f"rollstream-test-sandbox:{uuid4().hex[:8]}"
    try:
        pack(tag, RECIPE)
    except PackagesMissing as error:
        lacking(str(error))
    yield tag
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, check=False)


@pytest.fixture(scope="session")
def harnesses() -> Iterator[HarnessSettings]:
    """Settings of harnesses whose programs are installed."""
    if shutil.which("npm") is None:
        lacking("npm is missing, which installs the agents' programs: apt-get install npm")
    with programs.reachable() as settings:
        yield settings


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        lacking("bubblewrap is missing: apt-get install bubblewrap")
