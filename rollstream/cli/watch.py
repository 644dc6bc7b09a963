"""`rollstream watch`: a run's progress, read from the log. The thin shell around `progress`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, interruptible, out, read_settings
from rollstream.cli.pools import PoolsOfRun, nobody_serves, remedy, unserved
from rollstream.cli.progress import RunProgress, Session, Snapshot, line, outcome_of
from rollstream.errors import BrokerUnavailable, RollstreamError
from rollstream.eventlog.control import RunStates
from rollstream.eventlog.groups import Consumption, open_groups
from rollstream.eventlog.pools import Pools
from rollstream.eventlog.reading import Record, open_reader
from rollstream.runs import Runs, UnknownRun, read_runs
from rollstream.settings import DEFAULT_POOL, Settings
from schemas.envelope import session_ids_from
from schemas.events import UndecodableEvent, decode_any
from topics.catalogue import ROLLOUTS_RETRIES, ROLLOUTS_SCORED, RUNS_CONTROL, SESSIONS_READY, TASKS_IN, Topic

REFRESH_S = 0.25
LINE_INTERVAL_S = 2.0
ATTENDANCE_INTERVAL_S = 2.0

Show = Callable[[Snapshot, Sequence[str]], None]


class NotFinished(RollstreamError):
    """The time that a command was given to wait for a run has passed."""


def watch(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait; then exit with 1. Default: for ever.", min=0, show_default=False)
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Follow a run from the log until every attempt is terminal.

    Example: rollstream watch my-run --timeout 600
    """
    settings = read_settings(data_dir, config)
    with interruptible(), progress_display() as show:
        asyncio.run(follow(find_broker(settings), settings, run, show, timeout_s=timeout))


async def follow(
    bootstrap: str,
    settings: Settings,
    run: str,
    show: Show,
    *,
    timeout_s: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Snapshot:
    """Read the log until every attempt of `run` is terminal.

    Args:
        show: is given the state several times a second, with sentences on what stands in the way.
        meanwhile: is called as often; what it raises ends the watch.

    Raises:
        UnknownRun: nothing in the log belongs to such a run.
        NotFinished: `timeout_s` passed first.
    """
    give_up = None if timeout_s is None else time.monotonic() + timeout_s
    runs = await read_runs(bootstrap, settings.kafka)
    known = runs.known.get(run)
    progress = RunProgress(None if known is None else known.manifest.groups * known.manifest.attempts)
    pools = PoolsOfRun(Pools.of(settings), None if known is None else known.manifest)
    topics = (SESSIONS_READY, ROLLOUTS_RETRIES, ROLLOUTS_SCORED, *(() if known else (TASKS_IN,)))
    if known is None:
        await _read_past(bootstrap, settings, run, topics, progress, pools, since=None)
        _require_traces(progress, run, runs)
    async with (
        open_reader(bootstrap, settings.kafka, (*topics, RUNS_CONTROL)) as reader,
        _attendance(bootstrap, settings) as attendance,
    ):
        # The end is marked before the past is read, so that nothing falls between them; what is read twice counts once.
        await reader.seek_to_end()
        await _read_past(bootstrap, settings, run, topics, progress, pools, since=known.read_from if known else None)
        states = (await read_runs(bootstrap, settings.kafka)).states
        while True:
            records = await reader.poll(REFRESH_S)
            _apply(progress, pools, run, records)
            _learn(states, records)
            meanwhile()
            snapshot = progress.snapshot(time.time())
            sentences = [*attendance.problems, *held_up(run, states), *notices(snapshot, attendance.unattended, pools)]
            show(snapshot, [] if snapshot.is_complete else sentences)
            if snapshot.is_complete:
                return snapshot
            if give_up is not None and time.monotonic() > give_up:
                raise NotFinished(f"run {run} is not finished after {timeout_s:g} s: {line(snapshot)}")


def held_up(run: str, states: RunStates) -> list[str]:
    """Why a run does not go on, if somebody said so."""
    if states.cancelled(run):
        return [f"run {run} is cancelled: what has not ended is being recorded so; `rollstream cancel {run}` makes sure"]
    pause = states.paused(run)
    return [] if pause is None else [f"run {run} is paused: {pause.reason}"]


def notices(snapshot: Snapshot, unattended: Sequence[Consumption], pools: PoolsOfRun | None = None) -> list[str]:
    """A sentence for each topic that an unfinished run needs somebody to consume, and for each pool that nobody serves.

    Args:
        pools: which ones the run needs; None where there is but the default one.
    """
    waiting = {DEFAULT_POOL: snapshot.total} if pools is None or not pools.pools.declared else pools.waiting()

    def is_needed(one: Consumption) -> bool:
        if one.pool not in waiting:
            return False
        if one.topic is ROLLOUTS_RETRIES:
            return snapshot.waiting > 0
        return one.topic is not TASKS_IN or snapshot.seeded < snapshot.total or not snapshot.total

    absent = [] if pools is None else [pool for pool in unserved(pools.pools, unattended) if pool in waiting]
    absent = [pool for pool in absent if pool != DEFAULT_POOL]
    return [_nobody_consumes(one) for one in unattended if is_needed(one) and one.pool not in absent] + [
        f"{nobody_serves(pools.pools, pool, f'{waiting[pool]} attempts')}: `{remedy(pool)}` where its plug-ins are"
        for pool in absent
        if pools is not None
    ]


def _nobody_consumes(one: Consumption) -> str:
    what = one.topic.name if one.pool == DEFAULT_POOL else f"{one.topic.name} for pool {one.pool}"
    return f"nobody consumes {what}: start {'an' if one.worker[0] in 'ae' else 'a'} {one.worker} (`{remedy(one.pool)}`)"


async def _read_past(
    bootstrap: str,
    settings: Settings,
    run: str,
    topics: Sequence[Topic],
    progress: RunProgress,
    pools: PoolsOfRun,
    *,
    since: datetime | None,
) -> None:
    async with open_reader(bootstrap, settings.kafka, topics) as reader:
        if since is not None:
            await reader.seek_to_time(since)
        async for batch in reader.to_end():
            _apply(progress, pools, run, batch)


def _apply(progress: RunProgress, pools: PoolsOfRun, run: str, records: Sequence[Record]) -> None:
    for record in records:
        headers = record.header_map()
        if headers.get("run_id") != run:
            continue
        pools.take(headers)
        size = headers.get("group_size", "")
        if size.isdigit() and "group_id" in headers:
            progress.group_seen(headers["group_id"], int(size))
        if record.topic == SESSIONS_READY.name and (ids := session_ids_from(headers)):
            progress.rollout_seeded(ids.rollout, (ids.round, ids.try_))
        elif record.topic == ROLLOUTS_RETRIES.name and (following := _following(headers)):
            verification = headers.get("stage") == "verification"
            progress.retry_scheduled(headers.get("rollout_id", ""), following, verification=verification)
        elif record.topic == ROLLOUTS_SCORED.name and (outcome := outcome_of(record.value, record.headers)):
            progress.rollout_ended(outcome, record.timestamp_ms / 1000)


def _following(headers: Mapping[str, str]) -> Session | None:
    numbers = [headers.get(name, "") for name in ("next_round", "next_try")]
    return (int(numbers[0]), int(numbers[1])) if all(number.isdigit() for number in numbers) else None


def _learn(states: RunStates, records: Sequence[Record]) -> None:
    for record in records:
        if record.topic == RUNS_CONTROL.name:
            with suppress(UndecodableEvent):
                states.learn(decode_any(record.value, RUNS_CONTROL.events))


def _require_traces(progress: RunProgress, run: str, runs: Runs) -> None:
    if not progress.snapshot(time.time()).total:
        raise UnknownRun(run, runs)


@dataclass(slots=True)
class _Attendance:
    """Who is there at the moment, kept up to date by `_attendance`."""

    unattended: list[Consumption] = field(default_factory=list)
    """Topics that nobody consumed at two looks in a row: one look may fall into a hand-over."""
    problems: list[str] = field(default_factory=list)
    """Why nobody can say."""


@asynccontextmanager
async def _attendance(bootstrap: str, settings: Settings) -> AsyncIterator[_Attendance]:
    attendance = _Attendance()

    async def look() -> None:
        before: list[Consumption] = []
        async with open_groups(bootstrap, settings) as groups:
            while True:
                found = await groups.unattended()
                attendance.unattended = [one for one in found if one in before]
                attendance.problems = []
                before = found
                await asyncio.sleep(ATTENDANCE_INTERVAL_S)

    async def keep_looking() -> None:
        while True:
            try:
                await look()
            except BrokerUnavailable as error:
                # The run goes on when the broker is back, and so does the watch.
                attendance.problems, attendance.unattended = [str(error)], []
                await asyncio.sleep(ATTENDANCE_INTERVAL_S)

    looking = asyncio.create_task(keep_looking())
    try:
        yield attendance
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


@contextmanager
def progress_display() -> Iterator[Show]:
    """Where progress is shown: drawn in place on a terminal, and otherwise a line every now and then."""
    if not out.is_terminal:
        yield _lines()
        return
    with Live(console=out, auto_refresh=False, transient=True) as live:
        last: list[Snapshot] = []

        def draw(snapshot: Snapshot, sentences: Sequence[str]) -> None:
            last[:] = [snapshot]
            bar = ProgressBar(total=max(1, snapshot.total), completed=snapshot.done)
            warnings = [Text(sentence, style="yellow") for sentence in sentences]
            live.update(Group(bar, Text(line(snapshot)), *warnings), refresh=True)

        yield draw
    for snapshot in last:
        out.print(line(snapshot))


def _lines() -> Show:
    shown_at, shown = 0.0, ""

    def show(snapshot: Snapshot, sentences: Sequence[str]) -> None:
        nonlocal shown_at, shown
        text = "\n".join([line(snapshot), *sentences])
        due = time.monotonic() - shown_at >= LINE_INTERVAL_S or snapshot.is_complete
        if due and text != shown:
            out.print(text)
            shown_at, shown = time.monotonic(), text

    return show
