"""The broker of one data directory: started once, found by everyone, stopped on request.

It is nobody's child on purpose: workers, the CLI and a notebook come and go, the log stays up. One lock per data
directory makes concurrent starts and stops take turns.
"""

import base64
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from rollstream.broker.config import choose_ports, server_properties
from rollstream.broker.container import ContainerBroker
from rollstream.broker.jars import jars_dir, kafka_version, pom_path
from rollstream.broker.java import JavaBroker
from rollstream.broker.runtime import choose_runtime, look_around
from rollstream.broker.state import BrokerState, Via, locked, read_state, write_atomically, write_state
from rollstream.broker.wire import ask_cluster
from rollstream.errors import BrokerUnavailable

START_TIMEOUT_S = 120.0
"""A crash with gigabytes in open segments is recovered at disk speed."""
STOP_TIMEOUT_S = 30.0
LOOK_INTERVAL_S = 0.3
LOCK_TIMEOUT_S = 900.0
"""Another process may be fetching Kafka while it holds the lock."""


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class BrokerRuntime(Protocol):
    """How the broker is run: as a Java process or as a container."""

    via: Via
    home: Path
    listen_host: str

    def prepare(self) -> None: ...
    def format_storage(self, cluster_id: str, properties: str) -> None: ...
    def launch(self, state: BrokerState) -> BrokerState: ...
    def find(self, state: BrokerState) -> BrokerState | None: ...
    def end(self, state: BrokerState, *, timeout_s: float) -> None: ...
    def last_lines(self, count: int) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Running:
    """A live broker, and whether it is in service."""

    bootstrap: str
    via: Via
    version: str
    pid: int | None
    """Null for a container."""
    started_at: float
    answers: bool
    """False while it starts or recovers its log, and if it is stuck."""


class EmbeddedBroker:
    """Apache Kafka, one node, reachable on the loopback address only.

    Args:
        data_dir: keeps the log; one broker runs per data directory.
        notice: is told in one line what takes long, such as fetching Kafka.
    """

    def __init__(self, data_dir: Path, *, notice: Callable[[str], None] = print_to_stderr) -> None:
        self.data_dir = data_dir.expanduser().resolve()
        self._notice = notice
        self._directory = self.data_dir / "broker"
        self._state_path = self._directory / "broker.json"
        self._lock_path = self._directory / "lock"

    @property
    def logs_path(self) -> Path:
        """Kafka's own log file; `jvm.log` beside it has what the JVM prints outside of logging."""
        state = read_state(self._state_path)
        return self._home("java" if state is None else state.via) / "log" / "broker.log"

    def status(self) -> Running | None:
        """The live broker of this data directory, or None."""
        found = self._find()
        return None if found is None else _running(found[1], answers=_answers(found[1]))

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> Running:
        """Start the broker, or find it running, and return when it is in service.

        Args:
            timeout_s: from launch to service; fetching Kafka at first use comes on top.

        Raises:
            BrokerUnavailable: nothing here can run a broker, or it ended or did not answer in time.
        """
        with locked(self._lock_path, timeout_s=LOCK_TIMEOUT_S):
            # What is found may be dying, since a process that was just killed still shows for a moment.
            if (found := self._find()) and (running := self._await_service(*found, timeout_s)):
                return running
            runtime, state = self._launch(read_state(self._state_path))
            if running := self._await_service(runtime, state, timeout_s):
                return running
            raise BrokerUnavailable(f"the broker ended while it started; {_log_excerpt(runtime)}")

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """End the broker: cleanly, or by force after `timeout_s`. False if none was running."""
        if read_state(self._state_path) is None:
            return False
        with locked(self._lock_path, timeout_s=LOCK_TIMEOUT_S):
            if (found := self._find()) is None:
                return False
            runtime, state = found
            runtime.end(state, timeout_s=timeout_s)
            return True

    def _find(self) -> tuple[BrokerRuntime, BrokerState] | None:
        remembered = read_state(self._state_path)
        if remembered is None:
            return None
        runtime = self._runtime(remembered.via, remembered.version)
        state = runtime.find(remembered)
        return None if state is None else (runtime, state)

    def _launch(self, previous: BrokerState | None) -> tuple[BrokerRuntime, BrokerState]:
        version = kafka_version(pom_path().read_text(encoding="utf-8"))
        remembered = None if previous is None else previous.via
        found = look_around(jars=jars_dir(version), remembered=remembered)
        runtime = self._runtime(choose_runtime(found, remembered), version)
        (runtime.home / "log").mkdir(parents=True, exist_ok=True)
        runtime.prepare()

        used_before = None if previous is None else (previous.port, previous.controller_port)
        port, controller_port = choose_ports(used_before, self.data_dir)
        properties = partial(server_properties, port=port, controller_port=controller_port, listen_host=runtime.listen_host)
        write_atomically(runtime.home / "server.properties", properties())
        shutil.copyfile(Path(__file__).with_name("log4j2.properties"), runtime.home / "log4j2.properties")
        cluster_id = formatted_cluster_id(runtime.home / "data") or _format(runtime, properties)

        state = BrokerState(
            via=runtime.via,
            version=version,
            port=port,
            controller_port=controller_port,
            cluster_id=cluster_id,
            started_at=time.time(),
        )
        # Ports before the launch: if we die right after it, the process is still found and is known to answer there.
        write_state(self._state_path, state)
        state = runtime.launch(state)
        write_state(self._state_path, state)
        return runtime, state

    def _await_service(self, runtime: BrokerRuntime, state: BrokerState, timeout_s: float) -> Running | None:
        """Wait until the broker answers; None if it ends before."""
        give_up = time.monotonic() + timeout_s
        look_again = 0.0
        while not _answers(state):
            now = time.monotonic()
            if now > give_up:
                raise BrokerUnavailable(
                    f"the broker runs but is not in service after {timeout_s:.0f} s; "
                    f"wait with `rollstream broker start` or end it with `rollstream broker stop`; {_log_excerpt(runtime)}"
                )
            # Seldom, because asking Docker costs as much as the broker needs to get on.
            if now > look_again:
                if runtime.find(state) is None:
                    return None
                look_again = now + LOOK_INTERVAL_S
            time.sleep(0.05)
        return _running(state, answers=True)

    def _home(self, via: Via) -> Path:
        return {"java": self._directory, "docker": self.data_dir / "broker-docker"}[via]

    def _runtime(self, via: Via, version: str) -> BrokerRuntime:
        if via == "java":
            return JavaBroker(self._home(via), version=version, notice=self._notice)
        return ContainerBroker(self._home(via), version=version, notice=self._notice)


def _format(runtime: BrokerRuntime, properties: Callable[..., str]) -> str:
    """Make the `data` of a new node and return its cluster id.

    Kafka's tool works beside it, and a rename ends it: the tool may be killed, or go on after whoever started it was.
    """
    for abandoned in runtime.home.glob("formatting-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    cluster_id, beside = new_cluster_id(), f"formatting-{uuid4().hex}"
    write_atomically(runtime.home / "format.properties", properties(log_dir=beside))
    runtime.format_storage(cluster_id, "format.properties")
    data = runtime.home / "data"
    try:
        (runtime.home / beside).rename(data)
    except OSError:
        raise BrokerUnavailable(f"{data} is not empty but has no meta.properties; restore or remove it") from None
    return cluster_id


def _running(state: BrokerState, *, answers: bool) -> Running:
    return Running(state.bootstrap, state.via, state.version, state.pid, state.started_at, answers)


def _answers(state: BrokerState) -> bool:
    answer = ask_cluster(state.port)
    return answer is not None and answer.cluster_id == state.cluster_id and state.port in answer.ports


def _log_excerpt(runtime: BrokerRuntime) -> str:
    lines = [line for line in runtime.last_lines(20) if not line.startswith("\tat ")][-8:]
    return f"the last lines of {runtime.home / 'log'}:\n" + "\n".join(lines) if lines else "its log is empty"


def new_cluster_id() -> str:
    """A random cluster id in Kafka's own form: 16 bytes, URL-safe base64, no dash in front."""
    while (text := base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")).startswith("-"):
        pass
    return text


def formatted_cluster_id(data: Path) -> str | None:
    """The cluster id in the storage metadata of `data`, or None if it was never formatted."""
    try:
        text = (data / "meta.properties").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    found = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
    return found[1] if found else None
