"""The broker as a container of the official image, driven by the `docker` command.

The image's own start script is bypassed: Java is called as it is without Docker, in a mounted home that is laid out the
same, so that there is one way to set up a broker. Only its port is published, and only on the loopback address.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from rollstream.broker.config import JVM_OPTIONS
from rollstream.broker.logs import tail
from rollstream.broker.state import BrokerState, Via
from rollstream.errors import BrokerUnavailable

PULL_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 120.0
MOUNTED_HOME = "/broker"
LABEL = "rollstream.broker"


class ContainerBroker:
    """One broker container, named after and labelled with `home`."""

    via: Via = "docker"
    listen_host = "0.0.0.0"  # inside the container

    def __init__(self, home: Path, *, version: str, notice: Callable[[str], None]) -> None:
        self.home = home
        self._notice = notice
        self._image = f"apache/kafka:{version}"
        self.name = container_name(home)

    def prepare(self) -> None:
        """Pull the image if the engine does not have it."""
        if self._run("image", "inspect", self._image).returncode != 0:
            self._notice(f"pulling the image {self._image} (once)")
            self._expect("pull", "-q", self._image, timeout_s=PULL_TIMEOUT_S)

    def format_storage(self, cluster_id: str, properties: str) -> None:
        """Write the storage metadata of a new node, as the file named `properties` says.

        Raises:
            BrokerUnavailable: the engine or Kafka's tool refused, with its last line.
        """
        arguments = ("format", "-t", cluster_id, "-c", properties)
        self._expect("run", "--rm", *java_in(self.home, self._image), "kafka.tools.StorageTool", *arguments)

    def launch(self, state: BrokerState) -> BrokerState:
        """Start the container; it is not answering yet."""
        self._run("rm", "-f", "-v", self.name)
        self._expect(*run_arguments(self.home, self.name, self._image, state.port))
        return state

    def find(self, state: BrokerState) -> BrokerState | None:
        """The state, or None if the container does not run."""
        is_running = self._run("inspect", "-f", "{{.State.Running}}", self.name).stdout.strip() == "true"
        return state if is_running else None

    def end(self, state: BrokerState, *, timeout_s: float) -> None:
        """Ask the container to end, and after `timeout_s` end it."""
        self._run("stop", "-t", str(int(timeout_s)), self.name, timeout_s=timeout_s + COMMAND_TIMEOUT_S)
        self._expect("rm", "-f", "-v", self.name)

    def last_lines(self, count: int) -> list[str]:
        done = self._run("logs", "--tail", str(count), self.name)
        printed = (done.stdout + done.stderr).splitlines() if done.returncode == 0 else []
        return [*tail(self.home / "log" / "broker.log", count), *printed]

    def _expect(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        done = self._run(*arguments, timeout_s=timeout_s)
        if done.returncode != 0:
            last = done.stderr.strip().rpartition("\n")[2]
            raise BrokerUnavailable(f"`docker {arguments[0]}` failed for the broker's image {self._image}: {last}")

    def _run(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
        except FileNotFoundError:
            raise BrokerUnavailable("the broker of this data directory runs in Docker, which was not found") from None
        except subprocess.TimeoutExpired:
            raise BrokerUnavailable(f"`docker {arguments[0]}` did not end within {timeout_s:.0f} s") from None


def container_name(home: Path) -> str:
    """A name that is readable and different for every data directory."""
    digest = hashlib.sha256(str(home).encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-zA-Z0-9]+", "-", home.parent.name).strip("-")
    return "-".join(part for part in ("rollstream-broker", readable, digest) if part)


def run_arguments(home: Path, name: str, image: str, port: int) -> list[str]:
    """What follows `docker` to start the broker itself."""
    return [
        "run", "--detach", "--name", name, "--label", f"{LABEL}={home}", "--publish", f"127.0.0.1:{port}:{port}",
        *java_in(home, image), "kafka.Kafka", "server.properties",
    ]  # fmt: skip


def java_in(home: Path, image: str) -> list[str]:
    """Options, image and Java options of a run in `home`, by the user whose files it holds."""
    # Quoted as in CSV, which this option is, for the sake of a path with a comma.
    source = f"source={home}".replace('"', '""')
    return [
        "--user", f"{os.getuid()}:{os.getgid()}",
        "--mount", f'type=bind,"{source}",target={MOUNTED_HOME}', "--workdir", MOUNTED_HOME,
        "--entrypoint", "java", image, *JVM_OPTIONS, "-cp", "/opt/kafka/libs/*",
    ]  # fmt: skip
