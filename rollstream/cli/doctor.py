"""`rollstream doctor`: everything a run needs, checked, each with what to do about it.

A check never raises: what it finds is its result.
"""

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import get_args
from uuid import uuid4

import typer
from rich.text import Text

from rollstream.broker import EmbeddedBroker, find_broker
from rollstream.broker.jars import jars_dir, kafka_version, pom_path
from rollstream.broker.runtime import Surroundings, choose_runtime, look_around
from rollstream.cli.common import Config, DataDir, out, read_settings, table
from rollstream.cli.endpoints import Endpoint, ask
from rollstream.cli.pools import nobody_serves, remedy
from rollstream.cli.progress import duration
from rollstream.cli.stack import home
from rollstream.errors import BoundaryFailure, BrokerUnavailable, SandboxUnavailable, UsageError
from rollstream.eventlog import provisioning
from rollstream.eventlog.backlog import Backlog, read_backlog
from rollstream.eventlog.connection import close_admin, connect_admin
from rollstream.eventlog.groups import GroupState, open_groups
from rollstream.eventlog.pools import Pools
from rollstream.eventlog.provisioning import TopicState
from rollstream.health import ProcessHealth, ask_all
from rollstream.ledger import owning
from rollstream.runs import read_runs
from rollstream.sandboxes import registry
from rollstream.sandboxes.protocol import Enforces, Limit, SandboxTag
from rollstream.settings import DEFAULT_POOL, ModelSettings, Settings
from schemas.envelope import now
from schemas.run import RunPaused
from schemas.sandbox import NetworkPolicy, SandboxHolder, SandboxSpec
from topics.catalogue import ENV_ACTIONS, ROLLOUTS_RETRIES, RUNS_CONTROL

GIB = 1024**3
MIN_FREE_GIB = 1
OUTAGE_S = 24 * 3600
"""For which the log should keep what an episode needs, beyond the episode itself."""
SNAPSHOT = "trajectories.duckdb"
TRIED_S = 60.0
"""After which a box that was started to see whether it can be is gone, whatever happens."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    found: str
    remedy: str = ""
    required: bool = True

    @property
    def mark(self) -> str:
        return "ok" if self.passed else "missing" if self.required else "note"


def doctor(data_dir: DataDir = None, config: Config = None) -> None:
    """Check everything a run needs, with a remedy for what is missing. Exits with 1 if something required is.

    Example: rollstream doctor
    """
    settings = read_settings(data_dir, config)
    checks = list(all_checks(settings))
    shown = table("check", "", "found", "what to do")
    for check in checks:
        style = {"ok": "green", "missing": "red", "note": "yellow"}[check.mark]
        shown.add_row(check.name, Text(check.mark, style=style), check.found, "" if check.passed else check.remedy)
    out.print(shown)
    if any(check.mark == "missing" for check in checks):
        raise typer.Exit(1)


def all_checks(settings: Settings) -> Iterator[Check]:
    """Every check, in the order in which a newcomer would mend things."""
    surroundings = look_around(jars=jars_dir(kafka_version(pom_path().read_text(encoding="utf-8"))))
    yield runtime_check(surroundings, needed=settings.bootstrap_servers is None)
    yield disk_check(home(settings))
    try:
        bootstrap = find_broker(settings)
        told = asyncio.run(_ask_broker(bootstrap, settings))
    except BrokerUnavailable as error:
        yield Check("broker", False, str(error), "rollstream up")
    else:
        yield Check("broker", True, _described(bootstrap, settings))
        yield topics_check(told.topics, settings)
        yield retention_check(told.topics, settings)
        of_default = [state for state in told.groups if state.consumption.pool == DEFAULT_POOL]
        yield from (group_check(state, shared=bool(settings.pools)) for state in of_default)
        yield from pool_checks(Pools.of(settings), told.groups, told.backlog)
        yield from map(pause_check, told.paused)
    yield from map(process_check, ask_all(settings.data_dir))
    yield from _model_checks(settings)
    yield from sandbox_checks(settings)
    yield snapshot_check(home(settings) / SNAPSHOT, time.time())


@dataclass(frozen=True, slots=True)
class _Broker:
    """What the broker told."""

    topics: list[TopicState]
    groups: list[GroupState]
    paused: list[RunPaused] = field(default_factory=list)
    backlog: Backlog | None = None
    """What waits for pools that are missing workers; None where only the default one is declared."""


async def _ask_broker(bootstrap: str, settings: Settings) -> _Broker:
    admin = await connect_admin(bootstrap)
    try:
        topics = await provisioning.describe(admin, settings.kafka)
    finally:
        await close_admin(admin)
    async with open_groups(bootstrap, settings) as groups:
        states = await groups.describe()
        done = await groups.done() if settings.pools else None
    # Asked last, and only of topics that are there: asking for a missing one may create it.
    there = {state.topic for state in topics if state.partitions}
    paused = (await read_runs(bootstrap, settings.kafka)).states.paused_runs() if RUNS_CONTROL in there else {}
    backlog = None
    if done is not None and len(there) == len(topics):
        absent = {state.consumption.pool for state in states if not state.members}
        backlog = await read_backlog(bootstrap, settings.kafka, absent, done, owning(settings))
    return _Broker(topics, states, list(paused.values()), backlog)


def _described(bootstrap: str, settings: Settings) -> str:
    embedded = None if settings.bootstrap_servers else EmbeddedBroker(home(settings)).status()
    return f"answers at {bootstrap}" + (f", Apache Kafka {embedded.version} (embedded)" if embedded else "")


def runtime_check(found: Surroundings, *, needed: bool) -> Check:
    """What can run an embedded broker here."""
    try:
        via = choose_runtime(found)
    except BrokerUnavailable as error:
        found_text, _, remedy = str(error).partition("; ")
        return Check("broker runtime", False, found_text, remedy, required=needed)
    return Check("broker runtime", True, f"Java {found.java_version}" if via == "java" else "Docker")


def sandbox_checks(settings: Settings) -> Iterator[Check]:
    """Which sandbox backends work here. One that runs have to name may be missing; the one that settings name may not."""
    named = {settings.sandboxes.provider, settings.defaults.sandbox}
    for name in registry.names():
        if name != "local" or settings.sandboxes.unsafe_local or name in named:
            yield sandbox_check(settings, name, required=name in named)


def sandbox_check(settings: Settings, name: str, *, required: bool = True) -> Check:
    """What a sandbox backend holds here, as a box that is started and closed shows."""
    title = f"sandboxes {name}"
    try:
        can = asyncio.run(_tried(settings, name))
    except (BoundaryFailure, UsageError) as error:
        return Check(title, False, str(error), "docs/sandboxes.md says what each backend needs", required)
    held = ", ".join(sorted(can.limits)) or "no limits"
    return Check(title, True, f"holds {held}; networks {', '.join(sorted(can.networks))}")


async def _tried(settings: Settings, name: str) -> Enforces:
    """Start a box, run a command in it and close it.

    Raises:
        BoundaryFailure: one of it does not work.
    """
    provider = registry.load(settings.sandboxes, "admission", name)
    try:
        can = await provider.enforces()
        limits = {limit: None for limit in get_args(Limit) if limit not in can.limits}
        network: NetworkPolicy = "none" if "none" in can.networks else "public"
        spec = SandboxSpec.model_validate({**limits, "network": network, "ttl_s": TRIED_S})
        holder = SandboxHolder(worker=f"doctor@{socket.gethostname()}:{os.getpid()}")
        tag = SandboxTag("doctor/", await provider.host(), holder, now() + timedelta(seconds=TRIED_S))
        box = provider.create(f"doctor-{uuid4().hex}", spec, tag)
        try:
            await box.start()
            done = await box.exec(["true"], timeout_s=TRIED_S)
        finally:
            await box.close()
        if not done.ok:
            raise SandboxUnavailable(
                f"expected a box of {name} to run `true`, found exit code {done.exit_code}", stage="admission"
            )
        return can
    finally:
        await provider.close()


def disk_check(data_dir: Path) -> Check:
    """Room for the log, where it is or will be."""
    existing = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / GIB
    remedy = "free some space, or move the data with ROLLSTREAM_DATA_DIR"
    return Check("disk", free_gib >= MIN_FREE_GIB, f"{free_gib:.1f} GiB free in {data_dir}", remedy)


def topics_check(states: list[TopicState], settings: Settings) -> Check:
    missing = [state.name for state in states if state.partitions is None]
    wrong = provisioning.compare(states, settings.kafka)
    if wrong:
        return Check("topics", False, "; ".join(wrong), "follow the sentence, or set another kafka.topic_prefix")
    if missing:
        return Check("topics", False, f"missing: {', '.join(missing)}", "rollstream topics ensure")
    return Check("topics", True, f"{len(states)} as in the catalogue")


def retention_check(states: list[TopicState], settings: Settings) -> Check:
    """Whether the log keeps a record for as long as somebody may still need it.

    What a worker has in hand is not committed, so after a crash it is read again, however long ago it was written.
    """
    needed_s = settings.limits.default_episode_timeout_seconds + OUTAGE_S
    kept = {state.name: int(state.config.get("retention.ms", "-1")) / 1000 for state in states}
    short = [f"{name} for {duration(kept_s)}" for name, kept_s in kept.items() if 0 <= kept_s < needed_s]
    if not short:
        return Check("retention", True, "longer than any episode")
    found = f"records are kept on {', '.join(short)}, and may be needed for {duration(needed_s)}: an episode and an outage"
    return Check("retention", False, found, "raise retention.ms, or lower limits.default_episode_timeout_seconds")


def process_check(process: ProcessHealth) -> Check:
    """How a worker process of this host and data directory is."""
    names = ", ".join(worker.worker for worker in process.workers) or "worker"
    lanes = [lane for worker in process.workers for lane in worker.lanes]
    in_flight = sum(lane.in_flight for lane in lanes)
    oldest_s = max((lane.mark_age_s for lane in lanes), default=0.0)
    well = f"{in_flight} records in flight, the oldest for about {duration(oldest_s)}"
    found = "; ".join(process.hindrances) or well
    return Check(f"{names} ({process.pid})", not process.hindrances, found, "look in its log; end it, it is started again")


def group_check(state: GroupState, *, shared: bool = False) -> Check:
    """Whether somebody consumes a topic, and how much waits there: others' records too, where pools share the topic."""
    topic = state.consumption.topic.name
    what = "retries waiting or under way" if state.consumption.topic is ROLLOUTS_RETRIES else "records open"
    what += ", other pools' among them" if shared and not state.members else ""
    waiting = "" if not state.lag else f", {state.lag} {what}"
    found = f"{len(state.members)} on {topic}{waiting}" if state.members else f"nobody consumes {topic}{waiting}"
    return Check(state.consumption.worker, bool(state.members), found, "rollstream up")


def pool_checks(pools: Pools, states: Sequence[GroupState], backlog: Backlog | None) -> Iterator[Check]:
    """Whether somebody serves each declared pool. One that nobody serves is no fault: its work waits."""
    for pool in pools.declared:
        of_pool = [state for state in states if state.consumption.pool == pool]
        absent = [state.consumption for state in of_pool if not state.members]
        records = "" if backlog is None else f"{backlog.of(pool)} records"
        if len(absent) == len(of_pool):
            _, _, found = nobody_serves(pools, pool, records).partition(": ")
        elif absent:
            topics = ", ".join(one.topic.name for one in absent)
            found = f"nobody consumes {topics}{f', {records} wait' if records else ''} ({pools.describe(pool)})"
        else:
            # A worker is a member of one group for each topic, and every worker has one that is its first.
            beside = (ROLLOUTS_RETRIES, ENV_ACTIONS)
            members = sum(len(state.members) for state in of_pool if state.consumption.topic not in beside)
            open_ = sum(state.lag or 0 for state in of_pool)
            found = f"{members} workers, {open_} records open ({pools.describe(pool)})"
        yield Check(f"pool {pool}", not absent, found, f"{remedy(pool)}, where its plug-ins are", required=False)


def pause_check(pause: RunPaused) -> Check:
    """A run that waits for somebody."""
    return Check(f"run {pause.run}", False, f"paused: {pause.reason}", f"rollstream resume {pause.run}", required=False)


def _model_checks(settings: Settings) -> Iterator[Check]:
    names = list(dict.fromkeys([*settings.models, "default"]))
    for name in names:
        model = settings.model_named(name)
        assert model is not None, "declared names and `default` always resolve"
        yield model_check(name, model, ask(model), required=name in settings.models or name == settings.defaults.model)


def model_check(name: str, model: ModelSettings, endpoint: Endpoint, *, required: bool = True) -> Check:
    """Whether a model's endpoint answers, takes the key and serves the model."""
    title, url = f"model {name}", model.base_url
    if endpoint.state == "unauthorised":
        key_is_set = bool(os.environ.get(model.api_key_env))
        remedy = f"{model.api_key_env} holds a wrong key" if key_is_set else f"export {model.api_key_env}=…"
        return Check(title, False, f"{url} {endpoint.detail}", remedy, required)
    if endpoint.state == "unreachable":
        remedy = "start the model server, or set OPENAI_BASE_URL" if name == "default" else f"correct models.{name}.base_url"
        return Check(title, False, f"{url} {endpoint.detail}", remedy, required)
    if endpoint.serves(model.model) is False:
        served = ", ".join(endpoint.models[:5]) or "none"
        remedy = f"set {'OPENAI_MODEL' if name == 'default' else f'models.{name}.model'} to one that it serves"
        return Check(title, False, f"{url} does not list {model.model!r}, but: {served}", remedy, required=False)
    return Check(title, True, f"{url} {endpoint.detail or f'serves {model.model}'}")


def snapshot_check(path: Path, now_s: float) -> Check:
    """The published store, which is only as new as the last change of the log."""
    if not path.exists():
        return Check("store", False, "not published yet", "rollstream up, and publish a run", required=False)
    return Check("store", True, f"published {duration(max(0.0, now_s - path.stat().st_mtime))} ago")
