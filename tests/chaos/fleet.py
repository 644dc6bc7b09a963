"""Processes that are killed, frozen and started again, and the diary of what was done to them."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.broker import EmbeddedBroker
from tests.chaos.plan import role

STARTS_WITHIN_S = 60.0


@dataclass
class Diary:
    """What was done when, in wall time, to be printed when a test fails."""

    began: float = field(default_factory=time.time)
    entries: list[tuple[float, str]] = field(default_factory=list)
    broker_down: list[tuple[float, float]] = field(default_factory=list)
    """From the kill of the broker to its being in service again."""

    def write(self, text: str) -> None:
        self.entries.append((time.time(), text))

    def count(self, word: str) -> int:
        """How often something was done."""
        return sum(text.startswith(word) for _, text in self.entries)

    def __str__(self) -> str:
        return "\n".join(f"{at - self.began:7.2f} s  {text}" for at, text in self.entries)


@dataclass
class Fleet:
    """Named worker processes. Those that end by themselves are started again, as a supervisor would, and noted."""

    environment: Mapping[str, str]
    log_dir: Path
    diary: Diary = field(default_factory=Diary)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _frozen: set[str] = field(default_factory=set)
    _keeper: asyncio.Task[None] | None = None
    ended_by_themselves: int = 0

    def start(self, name: str, *command: str) -> None:
        """Start `python -m services ROLE`, or another module."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with (self.log_dir / f"{name}.log").open("ab") as output:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *(command or ("services", role(name)))],
                env=dict(self.environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def ready(self, *names: str) -> None:
        """Wait until the named workers, or all, have said that they are."""
        await asyncio.gather(*(self.line(name, '"event": "ready"') for name in names or self._running))

    async def line(self, name: str, text: str) -> str:
        """The first line of a process's log that contains `text`."""
        path = self.log_dir / f"{name}.log"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTS_WITHIN_S):
                while True:
                    for line in path.read_text(errors="replace").splitlines():
                        if text in line:
                            return line
                    await asyncio.sleep(0.05)
        raise AssertionError(f"{name} did not say {text!r}:\n{path.read_text(errors='replace')[-2000:]}")

    def keep(self) -> None:
        """From now on, start again what ended."""
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for name, process in list(self._running.items()):
                if process.poll() is not None:
                    if process.returncode != -signal.SIGKILL:
                        self.ended_by_themselves += 1
                        self.diary.write(f"{name} ended by itself with {process.returncode}: {self.last_words(name)}")
                    self.start(name)

    async def whole(self) -> None:
        """Wait until every process runs: one that was killed a moment ago is still to be started again."""
        assert self._keeper is not None, "keep() first"
        while any(process.poll() is not None for process in self._running.values()):
            await asyncio.sleep(0.05)

    def last_words(self, name: str) -> str:
        lines = (self.log_dir / f"{name}.log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "nothing")

    def kill(self, name: str) -> None:
        self.diary.write(f"SIGKILL {name}")
        self._running[name].kill()

    async def freeze(self, name: str, duration_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while, if it still lives then."""
        process = self._running[name]
        self.diary.write(f"SIGSTOP {name} for {duration_s:g} s")
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(duration_s)
        process.send_signal(signal.SIGCONT)
        self.diary.write(f"SIGCONT {name}")

    async def leave(self, name: str) -> None:
        """SIGTERM, and wait for the end."""
        self.diary.write(f"SIGTERM {name}")
        process = self._running.pop(name)
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
        self.diary.write(f"{name} left with {process.returncode}")

    async def stop(self, *, gracefully: bool = True) -> dict[str, int]:
        """End all; returns their exit codes."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        for process in self._running.values():
            process.send_signal(signal.SIGCONT)
            if gracefully:
                process.terminate()
            else:
                process.kill()
        codes = {}
        for name, process in self._running.items():
            try:
                codes[name] = await asyncio.to_thread(process.wait, 60)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = await asyncio.to_thread(process.wait)
        self._running.clear()
        return codes


async def kill_broker(broker: EmbeddedBroker, diary: Diary, down_s: float = 1.0) -> None:
    """`kill -9` of the broker, and its start on the same log and ports after a while."""
    running = broker.status()
    assert running is not None, "the broker does not run"
    assert running.pid is not None, "the broker runs in a container, which has no process to kill"
    diary.write(f"SIGKILL broker, for {down_s:g} s")
    killed_at = time.time()
    os.kill(running.pid, signal.SIGKILL)
    await asyncio.sleep(down_s)
    again = await asyncio.to_thread(broker.start)
    assert again.bootstrap == running.bootstrap, "the broker came back on another port"
    diary.broker_down.append((killed_at, time.time()))
    diary.write("the broker is in service again")


async def start_model(
    fleet: Fleet, name: str, journal: Path, *, max_latency_s: float, flaky: float, tool_steps: int = 0
) -> str:
    """A scripted model server as a process of its own; returns its base URL. Stop it with its fleet."""
    options: Sequence[str] = (
        *("--max-latency-s", str(max_latency_s)),
        *("--flaky", str(flaky)),
        *("--tool-steps", str(tool_steps)),
    )
    fleet.start(name, "tests.chaos.model", "--journal", str(journal), *options)
    url: str = json.loads(await fleet.line(name, "base_url"))["base_url"]
    return url
