"""The broker as a Java process of this machine, in a session of its own.

It outlives whoever started it and does not see the Ctrl-C of their terminal. It is recognised by its command line,
which names its home: a process id alone may have been recycled.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from rollstream.broker.config import JVM_OPTIONS
from rollstream.broker.jars import fetch_jars, jars_dir
from rollstream.broker.logs import tail
from rollstream.broker.runtime import find_java
from rollstream.broker.state import BrokerState, Via
from rollstream.errors import BrokerUnavailable, UsageError

FORMAT_TIMEOUT_S = 120.0
NEW_ARCHIVE = "classes.jsa"
PASSED_ON = ("PATH", "HOME", "TMPDIR", "TZ", "JAVA_HOME", "JAVA_TOOL_OPTIONS", "LD_LIBRARY_PATH")
"""Of our environment. A process that lives on for weeks has no business with the API keys of the shell it came from."""


class JavaBroker:
    """One broker process, started in and recognised by `home`."""

    via: Via = "java"
    listen_host = "127.0.0.1"

    def __init__(self, home: Path, *, version: str, notice: Callable[[str], None]) -> None:
        self.home = home
        self._version = version
        self._notice = notice

    def prepare(self) -> None:
        """Fetch the jars if they are not here yet."""
        fetch_jars(self._version, self._notice)

    def format_storage(self, cluster_id: str, properties: str) -> None:
        """Write the storage metadata of a new node, as the file named `properties` says.

        Raises:
            BrokerUnavailable: Kafka's tool refused, with the first line of what it said.
        """
        arguments = ("format", "-t", cluster_id, "-c", properties)
        command = self._command("kafka.tools.StorageTool", *arguments, jvm_options=_sharing(self._archive()))
        try:
            done = subprocess.run(
                command,
                cwd=self.home,
                env=broker_environment(dict(os.environ)),
                capture_output=True,
                text=True,
                timeout=FORMAT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BrokerUnavailable(f"formatting the log of {self.home} took over {FORMAT_TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            said = (done.stderr + done.stdout).strip().partition("\n")[0]
            raise BrokerUnavailable(f"Kafka's storage tool could not format the log of {self.home}: {said}")

    def launch(self, state: BrokerState) -> BrokerState:
        """Start the process and return the state with its id; it is not answering yet."""
        (self.home / NEW_ARCHIVE).unlink(missing_ok=True)
        # Kafka's classes from an archive take 40 % off the start. The first clean end writes it.
        options = _sharing(self._archive()) or (f"-XX:ArchiveClassesAtExit={NEW_ARCHIVE}",)
        with (self.home / "log" / "jvm.log").open("ab") as output:
            process = subprocess.Popen(
                self._command("kafka.Kafka", "server.properties", jvm_options=options),
                cwd=self.home,
                env=broker_environment(dict(os.environ)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return state.model_copy(update={"pid": process.pid})

    def find(self, state: BrokerState) -> BrokerState | None:
        """The state with the id of the live process, or None if there is none."""
        process = find_process(self.home, state)
        return None if process is None else state.model_copy(update={"pid": process.pid})

    def end(self, state: BrokerState, *, timeout_s: float) -> None:
        """Ask the process to end, and after `timeout_s` end it.

        Raises:
            UsageError: it belongs to another user.
        """
        process = find_process(self.home, state)
        if process is None:
            return
        try:
            process.terminate()
            if f"-XX:ArchiveClassesAtExit={NEW_ARCHIVE}" in process.cmdline():
                self._notice("the broker keeps its classes in an archive as it ends (once, a few seconds)")
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(timeout_s)
        except psutil.NoSuchProcess:
            return
        except psutil.AccessDenied:
            raise UsageError(f"the broker of {self.home} (pid {process.pid}) belongs to another user") from None
        else:
            self._keep_new_archive()

    def last_lines(self, count: int) -> list[str]:
        """The end of Kafka's log, and after it what the JVM itself had to say."""
        logs = (self.home / "log" / "broker.log", self.home / "log" / "jvm.log")
        return [line for log in logs for line in tail(log, count)]

    def _command(self, main_class: str, *arguments: str, jvm_options: tuple[str, ...]) -> list[str]:
        options = (*JVM_OPTIONS, *jvm_options, mark_of(self.home))
        return [_java(), *options, "-cp", f"{jars_dir(self._version)}/*", main_class, *arguments]

    def _archive(self) -> Path:
        return jars_dir(self._version) / f"classes-{_fingerprint(Path(_java()))}.jsa"

    def _keep_new_archive(self) -> None:
        """Hand the class archive that the process wrote as it ended to all later starts."""
        written, archive = self.home / NEW_ARCHIVE, self._archive()
        if written.exists() and archive.parent.is_dir():
            # Moved beside it first: the data directory may be on another file system, and a start may be reading.
            beside = archive.with_name(f".{archive.name}.{os.getpid()}")
            shutil.move(written, beside)
            beside.replace(archive)


def broker_environment(ours: dict[str, str]) -> dict[str, str]:
    """The environment of the broker, given ours."""
    # Under a plain C locale, Java cannot even enter a directory whose name is not ASCII.
    return {name: ours[name] for name in PASSED_ON if name in ours} | {"LC_ALL": "C.UTF-8"}


def _java() -> str:
    java = find_java()
    if java is None:
        raise BrokerUnavailable("the broker of this data directory runs on Java, which was not found")
    return java


def _sharing(archive: Path) -> tuple[str, ...]:
    """JVM options that load classes from `archive`; none if it is not there. The JVM checks that it fits the jars."""
    return (f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off") if archive.exists() else ()


def _fingerprint(java: Path) -> str:
    """Changes when another Java is installed, whose classes would not fit."""
    program = java.resolve()
    return hashlib.sha256(f"{program} {program.stat().st_mtime_ns}".encode()).hexdigest()[:12]


def mark_of(home: Path) -> str:
    """The argument on the command line by which the broker of `home` is recognised."""
    return f"-Drollstream.broker={home}"


def find_process(home: Path, state: BrokerState) -> psutil.Process | None:
    """The live broker process of `home`, or None.

    Every process is looked at if the remembered id is not it: the launcher may have died before it wrote the id down.
    """
    if state.pid is not None:
        try:
            remembered = psutil.Process(state.pid)
        except psutil.NoSuchProcess:
            pass
        else:
            _await_command_line(remembered)
            if _is_broker_of(home, remembered):
                return remembered
    return next((process for process in psutil.process_iter() if _is_broker_of(home, process)), None)


def _await_command_line(process: psutil.Process, timeout_s: float = 2.0) -> None:
    """A process that has just been launched has no command line for a moment, longer on a busy machine."""
    give_up = time.monotonic() + timeout_s
    with contextlib.suppress(psutil.Error):
        while not process.cmdline() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < give_up:
            time.sleep(0.005)


def _is_broker_of(home: Path, process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        # Gone, dead but not yet reaped by its parent, or another user's business.
        return False
    return mark_of(home) in command and "kafka.Kafka" in command
