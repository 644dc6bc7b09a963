"""What can run a broker here: Java with Kafka's jars, or the official image in Docker.

Looking around is kept apart from choosing, so that the choice is a table. A data directory stays with what ran it
first: the other one would start with an empty log, which looks like lost data.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from rollstream.broker.state import Via
from rollstream.errors import BrokerUnavailable

OLDEST_JAVA = 17
REMEDY = f"install Java {OLDEST_JAVA}+ and Maven, or Docker, or name a broker of your own in KAFKA_BOOTSTRAP_SERVERS"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What this machine has."""

    java: str | None = None
    """Path of the `java` command."""
    java_version: int | None = None
    """Its feature release, e.g. 17; null if the command does not run."""
    maven: str | None = None
    jars_cached: bool = False
    docker: str | None = None
    """Path of the `docker` command."""
    docker_answers: bool = False
    """Whether an engine answers it."""


def choose_runtime(found: Surroundings, remembered: Via | None = None) -> Via:
    """What to run the broker with; Java wins, because it starts faster and needs no engine.

    Raises:
        BrokerUnavailable: neither can, or not the one that this data directory's log was `remembered` with.
    """
    missing = {"java": _java_lacks(found), "docker": _docker_lacks(found)}
    if remembered is not None:
        if lack := missing[remembered]:
            name = {"java": "Java", "docker": "Docker"}[remembered]
            raise BrokerUnavailable(
                f"the log of this data directory was written with {name}, but {lack}; make that work again "
                "or choose another data directory"
            )
        return remembered
    if missing["java"] is None:
        return "java"
    if missing["docker"] is None:
        return "docker"
    raise BrokerUnavailable(f"no broker can be started here: {missing['java']}, and {missing['docker']}; {REMEDY}")


def _java_lacks(found: Surroundings) -> str | None:
    if found.java is None:
        return "Java was not found"
    if found.java_version is None:
        return f"{found.java} does not run"
    if found.java_version < OLDEST_JAVA:
        return f"{found.java} is Java {found.java_version} where {OLDEST_JAVA} or newer is needed"
    if not found.jars_cached and found.maven is None:
        return "Maven, which fetches Kafka, was not found"
    return None


def _docker_lacks(found: Surroundings) -> str | None:
    if found.docker is None:
        return "Docker was not found"
    return None if found.docker_answers else "the Docker engine does not answer"


def look_around(*, jars: Path, remembered: Via | None = None) -> Surroundings:
    """Ask this machine; Docker, which may be slow to answer, only where Java will not do.

    Args:
        jars: where the fetched jars would be.
    """
    java = find_java()
    found = Surroundings(
        java=java,
        java_version=parse_java_version(_output_of(java, "-version") or "") if java else None,
        maven=shutil.which("mvn"),
        jars_cached=jars.is_dir(),
    )
    docker = shutil.which("docker")
    if docker is None or (remembered != "docker" and _java_lacks(found) is None):
        return found
    answers = _output_of(docker, "version", "--format", "{{.Server.Os}}") is not None
    return replace(found, docker=docker, docker_answers=answers)


def find_java() -> str | None:
    """The `java` of `JAVA_HOME` if there is one, else of `PATH`."""
    if home := os.environ.get("JAVA_HOME"):
        java = Path(home) / "bin" / "java"
        if os.access(java, os.X_OK):
            return str(java)
    return shutil.which("java")


def parse_java_version(text: str) -> int | None:
    """The feature release in the output of `java -version`; 8 for the old form `1.8.0`."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def _output_of(*command: str) -> str | None:
    """What a command prints, both streams together, or None if it does not succeed within 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None
