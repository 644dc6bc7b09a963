"""The engine and the images that tests with containers share."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import pytest

from deploy.hostpack import PackagesMissing
from tests.docker.packed_images import (
    ROOT,
    download_wheels,
    engine_has_official,
    kafka_image,
    kafka_recipe,
    packed,
    python_recipe,
    remove,
)


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
    answer = subprocess.run(["docker", "version", "-f", "{{.Server.Version}}"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        lacking("no Docker engine answers: deploy/with-docker.sh starts one for a command")


@pytest.fixture(scope="session")
def kafka(engine: None) -> Iterator[str]:
    """The image of Apache Kafka: the official one if the engine has it, else a stand-in for the time of the session."""
    if engine_has_official(kafka_image()):
        yield kafka_image()
        return
    try:
        recipe = kafka_recipe()
    except PackagesMissing as error:
        lacking(str(error))
    with packed(kafka_image(), recipe) as tag:
        yield tag


@pytest.fixture(scope="session")
def rollstream_image(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """deploy/Dockerfile, built on a packed Python whose packages are on board."""
    tag = f"rollstream-test:{uuid4().hex[:8]}"
    wheels = tmp_path_factory.mktemp("wheels")
    try:
        with packed(f"{tag}-python", python_recipe(_filled(wheels))) as python:
            build = ["docker", "build", "-q", "--force-rm", "-f", "deploy/Dockerfile", "--build-arg", f"PYTHON_IMAGE={python}"]
            # The classic builder: Debian's engine has no other.
            environment = os.environ | {"DOCKER_BUILDKIT": "0"}
            subprocess.run([*build, "-t", tag, "."], cwd=ROOT, env=environment, check=True)
            yield tag
    except PackagesMissing as error:
        lacking(str(error))
    finally:
        remove(tag)


def _filled(wheels: Path) -> Path:
    download_wheels(wheels)
    return wheels


@pytest.fixture(scope="session")
def compose(engine: None) -> list[str]:
    """The command of Docker Compose: the engine's plug-in, or the older program of its own."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    lacking("Docker Compose is missing: neither `docker compose` nor `docker-compose` answers")
