"""`rollstream up` and `rollstream down`: broker and workers of a data directory, in the foreground or on their own.

Detached workers have a supervisor too, the same command in the background, so that one that dies is started again.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from rollstream.broker import EmbeddedBroker, ensure_broker
from rollstream.cli.common import Config, DataDir, interruptible, out, pairs, read_settings
from rollstream.cli.own import UnsafeLocal, given_by_path
from rollstream.cli.pools import nobody_serves, remedy, unserved
from rollstream.cli.stack import KILL_MARGIN_S, READY_TIMEOUT_S, Stack, grace_s, home, started
from rollstream.errors import BrokerUnavailable, UsageError
from rollstream.eventlog.groups import GroupReader, GroupState, open_groups
from rollstream.eventlog.pools import Pools
from rollstream.plugins import absolute
from rollstream.settings import Settings
from rollstream.supervisor import (
    ProcessSpec,
    SupervisorLock,
    WorkersFailed,
    last_lines,
    logs_dir,
    plan,
    pool_suffix,
    running,
    stop_running,
    supervised_pools,
)

POLL_INTERVAL_S = 0.2
STATUS_INTERVAL_S = 5.0


def up(
    workers: Annotated[
        str, typer.Option(help="Which ones, with commas between; default: all.", metavar="NAME,...", show_default=False)
    ] = "",
    processes: Annotated[bool, typer.Option("--processes", help="A process for each worker instead of one for all.")] = False,
    replicas: Annotated[
        list[str] | None,
        typer.Option(help="So many processes of one worker, e.g. agent_worker=2; implies --processes.", metavar="NAME=N"),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            help="Which pool of the settings they serve. Default: the setting `pool`, else default.", show_default=False
        ),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option("--environment", help="An environment of your own for the workers. Repeatable.", metavar="PATH.py:CLASS"),
    ] = None,
    harness: Annotated[
        list[str] | None,
        typer.Option("--harness", help="A harness of your own for the workers. Repeatable.", metavar="PATH.py:CLASS"),
    ] = None,
    unsafe_local: UnsafeLocal = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when all are ready, and leave them running.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Start the broker and the workers, and keep them running.

    In the foreground, Ctrl-C stops what this command started, the embedded broker included. Logs are in DATA_DIR/logs.

    Example: rollstream up --detach
    """
    settings = read_settings(data_dir, config, pool)
    names = [name.strip() for name in workers.split(",") if name.strip()]
    specs = plan(names, processes=processes, replicas=_counts(replicas or []), pool=settings.pool)
    for location in [*(environment or []), *(harness or [])]:
        absolute(location)
    own, _, _ = given_by_path(settings, environment or [], harness or [], unsafe_local=unsafe_local)
    settings = own.settings
    if detach:
        options = ["--workers", workers] if workers else []
        options += ["--processes"] if processes else []
        options += ["--pool", settings.pool]
        options += [text for pair in replicas or [] for text in ("--replicas", pair)]
        options += [text for where in own.environments.values() for text in ("--environment", where)]
        options += [text for where in own.harnesses.values() for text in ("--harness", where)]
        options += ["--unsafe-local"] if unsafe_local else []
        _detach(settings, specs, options)
        return
    with interruptible(), started(settings, specs, _say, own.variables()) as stack:
        asyncio.run(_keep_running(stack, settings))


def down(
    pool: Annotated[
        str | None, typer.Option(help="Stop the workers of this pool alone, and no broker.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Stop the workers and the embedded broker of a data directory.

    Example: rollstream down
    """
    settings = read_settings(data_dir, config)
    pools = supervised_pools(home(settings)) if pool is None else [pool]
    stopped = []
    for one in pools:
        workers = stop_running(home(settings), grace_s(settings) + KILL_MARGIN_S, one)
        stopped += [f"{worker}{pool_suffix(one)}" for worker in workers]
    if pool is None and EmbeddedBroker(home(settings), notice=out.print).stop():
        stopped.append("broker")
    out.print(f"stopped: {', '.join(stopped)}" if stopped else f"nothing was running for {home(settings)}")


def _counts(texts: list[str]) -> dict[str, int]:
    counts = {}
    for name, value in pairs(texts, "--replicas"):
        if not value.isdigit():
            raise UsageError(f"--replicas {name}: expected a whole number, found {value!r}")
        counts[name] = int(value)
    return counts


def _say(line: str) -> None:
    out.print(f"{datetime.now():%H:%M:%S} {line}")


async def _keep_running(stack: Stack, settings: Settings) -> None:
    """Look after the workers for ever, and print how far they are whenever that has changed."""
    looking = asyncio.create_task(_print_changes(stack.bootstrap, settings))
    try:
        while True:
            stack.check()
            await asyncio.sleep(POLL_INTERVAL_S)
    finally:
        looking.cancel()


async def _print_changes(bootstrap: str, settings: Settings) -> None:
    shown = ""
    missing: list[str] = []
    while True:
        try:
            async with open_groups(bootstrap, settings) as groups:
                while True:
                    line = status_line(await groups.describe([settings.pool]))
                    if line != shown:
                        _say(line)
                    shown = line
                    if settings.pools and (found := await unserved_pools(groups, settings)) != missing:
                        missing = found
                        for sentence in missing:
                            _say(sentence)
                    await asyncio.sleep(STATUS_INTERVAL_S)
        except BrokerUnavailable as error:
            _say(str(error))
            await asyncio.sleep(STATUS_INTERVAL_S)


async def unserved_pools(groups: GroupReader, settings: Settings) -> list[str]:
    """A sentence for each pool, other than this process's own, that nobody serves."""
    pools = Pools.of(settings)
    found = unserved(pools, await groups.unattended())
    return [f"{nobody_serves(pools, pool)}: {remedy(pool)}" for pool in found if pool != settings.pool]


def status_line(states: Sequence[GroupState]) -> str:
    """Every topic that is worked on, how many records wait or run, and how many members work on them."""
    return " | ".join(
        f"{state.consumption.topic.name}: {'missing' if state.lag is None else f'{state.lag} open'}, "
        f"{len(state.members)} {state.consumption.worker}"
        for state in states
    )


def _detach(settings: Settings, specs: Sequence[ProcessSpec], options: Sequence[str]) -> None:
    """Start the same command in the background and return when its workers are ready."""
    begun = time.monotonic()
    broker = EmbeddedBroker(home(settings), notice=out.print)
    with SupervisorLock(home(settings), settings.pool):
        broker_is_ours = settings.bootstrap_servers is None and broker.status() is None
        # Here, because it can take minutes at first use and says so, and because the broker outlives the supervisor then.
        bootstrap = ensure_broker(settings, notice=out.print)
    log = logs_dir(home(settings)) / f"supervisor{pool_suffix(settings.pool)}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rollstream.cli", "up", "--data-dir", str(home(settings)), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        _await_detached(settings, process, log)
    except BaseException:
        process.terminate()
        process.wait()
        if broker_is_ours:
            broker.stop()
        raise
    names = ", ".join(worker for spec in specs for worker in spec.workers)
    out.print(f"{names} ready in {time.monotonic() - begun:.1f} s; broker at {bootstrap}; stop all with `rollstream down`")
    if settings.pools:
        for sentence in asyncio.run(_ask_unserved(bootstrap, settings)):
            out.print(sentence)


async def _ask_unserved(bootstrap: str, settings: Settings) -> list[str]:
    async with open_groups(bootstrap, settings) as groups:
        return await unserved_pools(groups, settings)


def _await_detached(settings: Settings, process: "subprocess.Popen[bytes]", log: Path) -> None:
    give_up = time.monotonic() + READY_TIMEOUT_S + KILL_MARGIN_S
    while True:
        state = running(home(settings), settings.pool)
        if state is not None and state.ready and state.supervisor.pid == process.pid:
            return
        if process.poll() is not None or time.monotonic() > give_up:
            lines = "\n".join(last_lines(log))
            raise WorkersFailed(f"the workers did not start; the last lines of {log}:\n{lines}")
        time.sleep(0.05)
