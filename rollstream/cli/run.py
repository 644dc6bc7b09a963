"""`rollstream run`: up if needed, publish, watch, report."""

import asyncio
import re
import shlex
import time
from contextlib import suppress
from pathlib import Path

import typer

from rollstream.benchmarks import Benchmark
from rollstream.cli import publish as publishing
from rollstream.cli.common import Config, DataDir, err, interruptible, out, read_settings
from rollstream.cli.own import UnsafeLocal
from rollstream.cli.progress import Snapshot
from rollstream.cli.publish import Options, read_plan, request_of, send, told_as_good, with_own
from rollstream.cli.report import Found, full_report, print_found
from rollstream.cli.stack import Stack, found_or_started, home
from rollstream.cli.watch import follow, progress_display
from rollstream.errors import StoreUnavailable
from rollstream.publishing import Plan, RunRequest
from rollstream.settings import Settings
from rollstream.store.reader import open_snapshot
from rollstream.store.report.benchmarking import measure
from rollstream.store.report.runs import ended_attempts
from rollstream.supervisor import plan as plan_workers

STORE_TIMEOUT_S = 20.0
STORE_POLL_S = 0.3


def run(
    file: publishing.File = None,
    environment: publishing.Environment = None,
    harness: publishing.Harness = None,
    model: publishing.Model = None,
    role: publishing.Role = None,
    sandbox: publishing.Sandbox = None,
    attempts: publishing.Attempts = None,
    run: publishing.Run = None,
    dataset: publishing.Dataset = None,
    split: publishing.Split = None,
    epoch: publishing.Epoch = None,
    field: publishing.Field = None,
    sampling: publishing.SamplingOption = None,
    limit: publishing.Limit = None,
    max_steps: publishing.MaxSteps = None,
    agent_timeout: publishing.AgentTimeout = None,
    benchmark: publishing.BenchmarkFile = None,
    unsafe_local: UnsafeLocal = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Publish a task file, watch it to its end and print the report.

    Uses the workers that run already, or starts its own for the duration. Exits with 0 if every attempt had an outcome.

    Example: rollstream run gsm8k.jsonl -e math -m small -k 8
    """
    settings = read_settings(data_dir, config)
    options = Options(
        file, environment, harness, model, role, sandbox, attempts, run, dataset, split, epoch, field, sampling, limit,
        max_steps, agent_timeout, benchmark,
    )  # fmt: skip
    with interruptible():
        own, options = with_own(options, settings, unsafe_local=unsafe_local)
        settings = own.settings
        request = request_of(options, settings)
        # Before anything is started: a file that cannot be read needs no broker.
        plan = read_plan(request, settings)
        with found_or_started(settings, plan_workers([], pool=settings.pool), out.print, own.variables()) as stack:
            if stack.supervisor is None and own.caveat():
                err.print(f"note: {own.caveat()}")
            snapshot = play(request, plan, settings, stack)
            conclude(request.run, snapshot, settings, stack, request.benchmark)
        print_hints(*hints(request.run), data_dir=data_dir)
    if not told_as_good(snapshot) or plan.refusals:
        raise typer.Exit(1)


def play(request: RunRequest, plan: Plan, settings: Settings, stack: Stack) -> Snapshot:
    """Publish a run and watch it to its end, while looking after the workers."""
    asyncio.run(send(request, plan, settings, stack.bootstrap))
    with progress_display() as show:
        return asyncio.run(follow(stack.bootstrap, settings, request.run, show, meanwhile=stack.check))


def conclude(run: str, snapshot: Snapshot, settings: Settings, stack: Stack, benchmark: Benchmark | None = None) -> None:
    """Print the report as soon as the published store has all that the log has of the run."""
    found = _await_report(run, snapshot.done, settings, stack, benchmark)
    if found is None:
        out.print(f"the published store does not have all of it after {STORE_TIMEOUT_S:g} s: is a store_worker running?")
    else:
        print_found(found)


def _await_report(run: str, ended: int, settings: Settings, stack: Stack, benchmark: Benchmark | None) -> Found | None:
    give_up = time.monotonic() + STORE_TIMEOUT_S
    while time.monotonic() < give_up:
        stack.check()
        # Until then nothing may be published yet, or not this run.
        with suppress(StoreUnavailable), open_snapshot(home(settings)) as connection:
            if ended_attempts(connection, run) >= ended:
                result = None if benchmark is None else measure(connection, run, benchmark)
                return Found(full_report(connection, run, settings), benchmark=benchmark, result=result)
        time.sleep(STORE_POLL_S)
    return None


def print_hints(*commands: str, data_dir: Path | None) -> None:
    """The commands to go on with, as they can be pasted."""
    location = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
    out.print("go on with:")
    for command in commands:
        out.print(f"  {command}{location}")


def hints(run: str) -> tuple[str, ...]:
    """What most people want to know of a run next."""
    name = run.replace("'", "''")
    question = f"SELECT environment, count(*), avg(reward) FROM rollouts WHERE run_id = '{name}' GROUP BY 1"
    # Nobody reads what `shlex.quote` makes of single quotes, and few names need it.
    quoted = f'"{question}"' if re.fullmatch(r"[\w.-]+", run, re.ASCII) else shlex.quote(question)
    return (f"rollstream show --run {shlex.quote(run)} --worst", f"rollstream sql {quoted}")
