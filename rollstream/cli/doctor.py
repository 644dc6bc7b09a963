"""`rollstream doctor`: everything a run needs, checked, each with what to do about it.

A check never raises: what it finds is its result.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.text import Text

from rollstream.broker import EmbeddedBroker, find_broker
from rollstream.broker.jars import jars_dir, kafka_version, pom_path
from rollstream.broker.runtime import Surroundings, choose_runtime, look_around
from rollstream.cli.common import Config, DataDir, out, read_settings, table
from rollstream.cli.endpoints import Endpoint, ask
from rollstream.cli.progress import duration
from rollstream.cli.stack import home
from rollstream.errors import BrokerUnavailable
from rollstream.eventlog import provisioning
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.groups import GroupState, open_groups
from rollstream.eventlog.provisioning import TopicState
from rollstream.runs import read_runs
from rollstream.settings import ModelSettings, Settings
from schemas.run import RunPaused
from topics.catalogue import ROLLOUTS_RETRIES, RUNS_CONTROL

GIB = 1024**3
MIN_FREE_GIB = 1
SNAPSHOT = "trajectories.duckdb"


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
    yield docker_check(surroundings)
    yield disk_check(home(settings))
    try:
        bootstrap = find_broker(settings)
        topics, groups, paused = asyncio.run(_ask_broker(bootstrap, settings))
    except BrokerUnavailable as error:
        yield Check("broker", False, str(error), "rollstream up")
    else:
        yield Check("broker", True, _described(bootstrap, settings))
        yield topics_check(topics, settings)
        yield from map(group_check, groups)
        yield from map(pause_check, paused)
    yield from _model_checks(settings)
    yield snapshot_check(home(settings) / SNAPSHOT, time.time())


async def _ask_broker(bootstrap: str, settings: Settings) -> tuple[list[TopicState], list[GroupState], list[RunPaused]]:
    admin = await connect_admin(bootstrap)
    try:
        topics = await provisioning.describe(admin, settings.kafka)
    finally:
        await admin.close()
    async with open_groups(bootstrap, settings.kafka) as groups:
        states = await groups.describe()
    # Asked last, and only of a topic that is there: asking for a missing one may create it.
    has_runs = any(state.topic is RUNS_CONTROL and state.partitions for state in topics)
    paused = (await read_runs(bootstrap, settings.kafka)).states.paused_runs() if has_runs else {}
    return topics, states, list(paused.values())


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


def docker_check(found: Surroundings) -> Check:
    text = "engine answers" if found.docker_answers else "no engine answers" if found.docker else "not installed"
    return Check("docker", found.docker_answers, text, "only for sandboxed environments: start a Docker engine", required=False)


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


def group_check(state: GroupState) -> Check:
    """Whether somebody consumes a topic, and how much waits there."""
    topic = state.consumption.topic.name
    what = "retries waiting or under way" if state.consumption.topic is ROLLOUTS_RETRIES else "records open"
    waiting = "" if not state.lag else f", {state.lag} {what}"
    found = f"{len(state.members)} on {topic}{waiting}" if state.members else f"nobody consumes {topic}{waiting}"
    return Check(state.consumption.worker, bool(state.members), found, "rollstream up")


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
