"""`rollstream audit`: the log alone proves that every attempt ended exactly once, or names those that did not."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import orjson
import typer

from rollstream.audit import Audit
from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, err, interruptible, out, read_settings, table
from rollstream.cli.driving import drive_again
from rollstream.errors import UsageError
from rollstream.ledger import RunLog, read_run
from rollstream.operations import Repair, repair
from rollstream.settings import Settings

SHOWN = 10
"""Of each kind of finding."""


def audit(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    json: Annotated[bool, typer.Option("--json", help="As JSON, every finding.")] = False,
    repairing: Annotated[
        bool, typer.Option("--repair", help="Drive attempts again that have not ended and that no worker has before it.")
    ] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Prove from the log that every attempt of a run ended exactly once. Exits with 1 if one did not.

    Example: rollstream audit nightly
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        bootstrap = find_broker(settings)
        log = asyncio.run(read_run(bootstrap, settings, run))
        found, to_repair = log.audit(), repair(log.ledger)
        if json:
            sys.stdout.write(as_json(run, found, to_repair))
        else:
            print_audit(run, found, to_repair)
        if repairing:
            _repair(bootstrap, settings, run, log, to_repair)
    if not found.is_clean:
        raise typer.Exit(1)


def _repair(bootstrap: str, settings: Settings, run: str, log: RunLog, found: Repair) -> None:
    if log.runs.states.cancelled(run):
        raise UsageError(
            f"run {run} is cancelled: `rollstream cancel {run}` ends what has not ended, `rollstream resume` goes on"
        )
    if not found.wanted:
        err.print(f"nothing to repair: {found.under_way} attempts have not ended, and workers have all of them before them")
        return
    message = "it had not ended, and no worker had it before it"
    redriven = asyncio.run(drive_again(bootstrap, settings, log, found.wanted, kind="repaired", message=message))
    err.print(f"driven again: {redriven.from_sessions} from their sessions, {redriven.from_tasks} from their tasks")
    if redriven.without_trace:
        err.print(f"{redriven.without_trace} have neither a readable session nor a task in the log, and cannot be")


def print_audit(run: str, found: Audit, to_repair: Repair) -> None:
    """The numbers, then the findings by name."""
    shown = table("run " + run, "")
    for name, number in numbers(found, to_repair):
        shown.add_row(name, str(number))
    out.print(shown)
    for sentence in findings(found):
        out.print(sentence)
    if found.is_clean:
        out.print(f"clean: each of {found.attempts} attempts has exactly one terminal record that counts")
    elif len(found.missing) == to_repair.under_way and not (found.double or found.strays or found.missing_groups):
        out.print("not finished: workers still have every attempt before them that has not ended")
    else:
        out.print("not clean")


def numbers(found: Audit, to_repair: Repair) -> Iterator[tuple[str, object]]:
    promised = "" if found.expected_groups is None else f" of {found.expected_groups} that were promised"
    yield "groups", f"{found.groups}{promised}"
    yield "attempts", found.attempts
    for status in ("completed", "truncated", "errored", "cancelled"):
        yield f"  {status}", found.counting.get(status, 0)
    yield "  not ended", len(found.missing)
    yield "    of them, before a worker", to_repair.under_way
    yield "ended twice in one session", len(found.double)
    yield "records of no attempt", len(found.strays)
    yield "repeated records (harmless)", found.repeated
    yield "ended in several tries (the first counts)", len(found.overtaken)


def findings(found: Audit) -> Iterator[str]:
    """A sentence for each thing that is wrong, up to some of each kind."""
    if found.missing_groups:
        yield f"{found.missing_groups} groups were promised and never published: publish the same file again"
    for attempt in found.missing[:SHOWN]:
        yield f"not ended: rollout {attempt.rollout_id} (group {attempt.group}, attempt {attempt.index})"
    yield from _more(len(found.missing))
    for rollout, records in list(found.double.items())[:SHOWN]:
        places = ", ".join(f"{record.status} at rollouts.scored/{record.partition}/{record.offset}" for record in records)
        yield f"ended twice: rollout {rollout}, {places}"
    yield from _more(len(found.double))
    for record in found.strays[:SHOWN]:
        yield f"of no attempt: rollouts.scored/{record.partition}/{record.offset}, rollout {record.rollout_id}"
    yield from _more(len(found.strays))


def _more(count: int) -> Iterator[str]:
    if count > SHOWN:
        yield f"… and {count - SHOWN} more; --json names all"


def as_json(run: str, found: Audit, to_repair: Repair) -> str:
    body = {
        "run": run,
        "clean": found.is_clean,
        **asdict(found),
        "counting": dict(found.counting),
        "missing_groups": found.missing_groups,
        "missing": [asdict(attempt) | {"rollout_id": attempt.rollout_id} for attempt in found.missing],
        "under_way": to_repair.under_way,
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() + "\n"
