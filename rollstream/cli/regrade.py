"""`rollstream regrade`: what agents handed in is verified once more, by the environment as it is installed now."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated

import typer

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, err, interruptible, out, progress_bar, read_settings
from rollstream.cli.watch import NotFinished, held_up
from rollstream.environments import registry
from rollstream.errors import Refused, RollstreamError, UsageError
from rollstream.eventlog.groups import open_groups
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import open_reader
from rollstream.ledger import RunLog, read_run
from rollstream.regrading import Asked, Graded, Regrade, Regrading, plan_regrade
from rollstream.runs import read_runs
from rollstream.settings import Settings
from rollstream.store.reader import ask, open_snapshot
from topics.catalogue import ROLLOUTS_RETRIES, ROLLOUTS_SCORED

LOOK_INTERVAL_S = 3.0


def regrade(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    environment: Annotated[
        str | None, typer.Option("--environment", "-e", help="Only attempts of this one.", show_default=False)
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--environment-version", help="Refuse if another version is installed here.", show_default=False),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            help='Only attempts whose row of `rollouts` fits, e.g. "reward = 0". Asks the published store.',
            metavar="SQL",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Attempts, too, that the installed version has graded already.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until all are verified; exit with 1 if one could not be.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait with --wait; then exit with 1.", min=0, show_default=False)
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Verify what agents handed in once more, without running them.

    Both verdicts are kept; the newer one counts. Asking again while it is under way, or after it, changes nothing.

    Example: rollstream regrade nightly --environment-version 2 --wait
    """
    settings = read_settings(data_dir, config)
    with interruptible():
        bootstrap = find_broker(settings)
        log = asyncio.run(read_run(bootstrap, settings, run))
        versions = wanted_versions(log, environment, version)
        if log.runs.states.cancelled(run):
            raise UsageError(f"run {run} is cancelled, and workers skip all of it: `rollstream resume {run}` first")
        only = None if where is None else _chosen(settings, run, where)
        found = asyncio.run(_plan(bootstrap, settings, log, versions, only, force=force))
        if not (found.wanted or found.under_way or found.current):
            reasons = ", ".join(left_alone(found)) or "no attempt fits what was asked for"
            raise UsageError(f"nothing to regrade in run {run}: {reasons}")
        unfit = asyncio.run(_ask(bootstrap, settings, log, found)) if found.wanted else set[str]()
        pending = {name: asked for name, asked in {**found.wanted, **found.under_way}.items() if name not in unfit}
        for sentence in told(run, found, versions, len(unfit)):
            out.print(sentence)
        failed = asyncio.run(_wait(bootstrap, settings, log, pending, timeout)) if wait and pending else 0
        if failed or unfit:
            raise typer.Exit(1)


def wanted_versions(log: RunLog, environment: str | None, version: str | None) -> dict[str, str]:
    """Environment -> version installed here, of the environments of the run that are asked for.

    Raises:
        UsageError: the run has no such environment, it is not installed, or not in that version.
    """
    names = {group.environment for group in log.ledger.groups.values()}
    if environment is not None and environment not in names:
        raise UsageError(f"run {log.ledger.run} has no environment {environment!r}; it has {', '.join(sorted(names))}")
    found = {}
    for name in sorted(names if environment is None else {environment}):
        try:
            found[name] = registry.load(name).version
        except Refused as error:
            raise UsageError(f"{error}; --environment chooses one of the run's: {', '.join(sorted(names))}") from None
        if version not in (None, found[name]):
            raise UsageError(
                f"expected environment {name} in version {version}, found {found[name]} installed here: "
                "install it, restart the verifier_workers, then regrade"
            )
    return found


def _chosen(settings: Settings, run: str, where: str) -> set[str]:
    name = run.replace("'", "''")
    with open_snapshot(settings.data_dir) as connection:
        answer = ask(connection, f"SELECT rollout_id FROM rollouts WHERE run_id = '{name}' AND ({where})")
        return {str(row[0]) for row in answer.rows}


async def _plan(
    bootstrap: str, settings: Settings, log: RunLog, versions: dict[str, str], only: Collection[str] | None, *, force: bool
) -> Regrade:
    graded = await Regrading(bootstrap, settings, log).graded()
    return plan_regrade(log.ledger, graded, log.ledger.episodes, versions, only=only, force=force)


async def _ask(bootstrap: str, settings: Settings, log: RunLog, found: Regrade) -> set[str]:
    async with EventProducer(bootstrap, settings.kafka, client_id="rollstream-cli") as producer:
        with progress_bar("asking", len(found.wanted)) as advance:
            return await Regrading(bootstrap, settings, log).ask(found.wanted, producer, advance)


def told(run: str, found: Regrade, versions: dict[str, str], unfit: int) -> Iterator[str]:
    """What happens, and what does not."""
    by = ", ".join(f"{name} {version}" for name, version in versions.items())
    if asked := len(found.wanted) - unfit:
        revisions = sorted({one.revision for one in found.wanted.values()})
        named = f"revision {revisions[0]}" if len(revisions) == 1 else f"revisions {revisions[0]} to {revisions[-1]}"
        yield f"run {run}: {asked} attempts are verified again by {by}, as {named}"
    if found.under_way:
        yield f"{len(found.under_way)} were asked for before, and are under way"
    if found.current:
        yield f"{found.current} have a verdict of {by} already; --force verifies them all the same"
    if reasons := ", ".join(left_alone(found, unfit)):
        yield f"left as they are: {reasons}"


def left_alone(found: Regrade, unfit: int = 0) -> Iterator[str]:
    """How many attempts stay as they are, by reason."""
    if found.not_ended:
        yield f"{found.not_ended} have not ended"
    if found.cancelled:
        yield f"{found.cancelled} were cancelled"
    if found.without_episode:
        yield f"{found.without_episode} failed before the agent had handed in"
    if unfit:
        yield f"{unfit} have an episode that is unreadable or too long"


async def _wait(bootstrap: str, settings: Settings, log: RunLog, asked: Mapping[str, Asked], timeout_s: float | None) -> int:
    """Follow the log until every attempt that was asked for has its new record; returns how many failed.

    Raises:
        NotFinished: `timeout_s` passed first.
        RollstreamError: the run was cancelled meanwhile.
    """
    run = log.ledger.run
    pending = {one.before.rollout_id: one for one in asked.values()}
    outcomes: Counter[str] = Counter()
    give_up = None if timeout_s is None else time.monotonic() + timeout_s
    look_at, noted = time.monotonic() + LOOK_INTERVAL_S, set[str]()
    async with open_reader(bootstrap, settings.kafka, [ROLLOUTS_SCORED]) as reader:
        if log.since is not None:
            await reader.seek_to_time(log.since)
        with progress_bar("verifying again", len(pending)) as advance:
            while pending:
                for record in await reader.poll():
                    one = Graded.of(record, run)
                    if one is not None and _fulfils(one, pending):
                        outcomes[_outcome(pending.pop(one.rollout_id).before, one)] += 1
                        advance(1)
                if give_up is not None and time.monotonic() > give_up and pending:
                    raise NotFinished(f"run {run}: {len(pending)} attempts are not verified again after {timeout_s:g} s")
                if pending and time.monotonic() > look_at:
                    look_at = time.monotonic() + LOOK_INTERVAL_S
                    for note in [note for note in await _notes(bootstrap, settings, run) if note not in noted]:
                        noted.add(note)
                        err.print(f"note: {note}")
    counts = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
    out.print(f"verified again: {counts}; `rollstream report {run}` has the numbers")
    return outcomes[FAILED]


def _fulfils(record: Graded, pending: dict[str, Asked]) -> bool:
    asked = pending.get(record.rollout_id)
    return asked is not None and (record.round, record.revision) >= (asked.before.round, asked.revision)


FAILED = "could not be scored"


def _outcome(before: Graded, after: Graded) -> str:
    if after.reward is None:
        return FAILED
    if before.reward is None:
        return "scored for the first time"
    if after.reward == before.reward:
        return "with the same reward"
    return "with a higher reward" if after.reward > before.reward else "with a lower reward"


async def _notes(bootstrap: str, settings: Settings, run: str) -> list[str]:
    """What stands in the way.

    Raises:
        RollstreamError: the run was cancelled meanwhile.
    """
    states = (await read_runs(bootstrap, settings.kafka)).states
    if states.cancelled(run):
        raise RollstreamError(
            f"run {run} was cancelled meanwhile: what was not verified again keeps its verdict; "
            f"`rollstream resume {run}`, then regrade again"
        )
    async with open_groups(bootstrap, settings) as groups:
        absent = [one for one in await groups.unattended() if (one.worker, one.topic) == ("verifier_worker", ROLLOUTS_RETRIES)]
    return [*held_up(run, states), *(f"nobody verifies: start a {one.worker} (`rollstream up`)" for one in absent)]
