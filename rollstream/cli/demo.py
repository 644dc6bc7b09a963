"""`rollstream demo`: everything end to end on one machine, with a model that needs neither network nor GPU.

The demo's model gets a name of its own, so that it never depends on what the user's settings call `default`.
"""

import asyncio
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

import rollstream
from rollstream.cli.common import Config, DataDir, err, interruptible, out, read_settings
from rollstream.cli.endpoints import ask
from rollstream.cli.progress import Snapshot
from rollstream.cli.publish import read_plan, told_as_good
from rollstream.cli.run import conclude, hints, play, print_hints
from rollstream.cli.show import print_trajectory
from rollstream.cli.stack import found_or_started, home
from rollstream.errors import UsageError
from rollstream.models.local import DEFAULT_SLOTS, MODEL_NAME, LocalModelServer
from rollstream.publishing import RunRequest
from rollstream.runs import known_runs
from rollstream.settings import ModelSettings, Settings
from rollstream.store.reader import open_snapshot
from rollstream.store.trajectory import choose_rollouts
from rollstream.supervisor import plan as plan_workers, running
from schemas.values import Composition, Sampling

TASKS = "demo.jsonl"
MODEL = "demo"
SAMPLING = Sampling(temperature=0.7, max_tokens=48)
HURRY = {"ROLLSTREAM_KAFKA__DRAIN_TIMEOUT_S": "3"}
"""Whoever interrupts a demo does not wait for its model."""
FEW_AT_ONCE = {"ROLLSTREAM_LIMITS__MAX_CONCURRENT_EPISODES": str(2 * DEFAULT_SLOTS)}
"""What waits, waits in the log and not inside a small model server, where its time would run out on a slow machine."""


@dataclass(frozen=True, slots=True)
class _Policy:
    """The model that the demo samples from."""

    name: str
    environment: dict[str, str]
    """What workers need to know of it."""


def demo(
    base_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server of your own instead of the local one.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model id on that server.", show_default=False)] = None,
    attempts: Annotated[int, typer.Option("--attempts", "-k", min=1, max=100, help="Rollouts of each task.")] = 4,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many tasks.", show_default=False)] = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Run a small task set end to end on this machine, with a local model.

    Starts broker, workers and model as needed, and stops them afterwards. Exits with 0 if every attempt had an outcome.

    Example: rollstream demo
    """
    settings = read_settings(data_dir, config)
    tasks = example(TASKS)
    with (
        interruptible(),
        _policy(settings, base_url, model) as policy,
        found_or_started(settings, plan_workers([], pool=settings.pool), out.print, policy.environment | HURRY) as stack,
    ):
        request = RunRequest(
            path=tasks,
            run=next_name(asyncio.run(known_runs(stack.bootstrap, settings.kafka))),
            composition=Composition(models={"policy": policy.name}, sampling=SAMPLING),
            limits=settings.limits.for_episode(),
            attempts=attempts,
            limit=limit,
        )
        snapshot = play(request, read_plan(request, settings), settings, stack)
        conclude(request.run, snapshot, settings, stack)
    _print_best(request.run, settings)
    print_hints("rollstream demo", *hints(request.run), data_dir=data_dir)
    if not (told_as_good(snapshot) and _is_whole(snapshot)):
        raise typer.Exit(1)


@contextmanager
def _policy(settings: Settings, base_url: str | None, model: str | None) -> Iterator[_Policy]:
    """The model to sample from: what running workers have, the user's own server, or else the local one while it is needed."""
    found = running(home(settings), settings.pool)
    if found is not None:
        yield _of_running_workers(settings, found.supervisor.pid, base_url)
    elif base_url is not None:
        yield _declared(base_url, model or _only_model(base_url))
    else:
        with LocalModelServer(home(settings)) as url:
            out.print(f"using the local model {MODEL_NAME} at {url}")
            policy = _declared(url, MODEL_NAME)
            yield replace(policy, environment=policy.environment | FEW_AT_ONCE)


def _declared(base_url: str, model: str) -> _Policy:
    prefix = f"ROLLSTREAM_MODELS__{MODEL.upper()}__"
    return _Policy(MODEL, {f"{prefix}BASE_URL": base_url, f"{prefix}MODEL": model})


def _of_running_workers(settings: Settings, pid: int, base_url: str | None) -> _Policy:
    """Workers that run have the models that they were started with; nothing can be added.

    Raises:
        UsageError: another server was asked for, or theirs does not answer.
    """
    name = settings.defaults.model
    model = settings.model_named(name)
    stop = "stop them with `rollstream down`, and the demo starts its own"
    if base_url is not None:
        raise UsageError(f"the workers of {home(settings)} run already (pid {pid}) with models of their own: {stop}")
    if model is None or (endpoint := ask(model)).state == "unreachable":
        told = f"{endpoint.base_url} {endpoint.detail}" if model else "is not declared"
        raise UsageError(f"the workers of {home(settings)} run already (pid {pid}), and their model {name} {told}: {stop}")
    return _Policy(name, {})


def _only_model(base_url: str) -> str:
    endpoint = ask(ModelSettings(base_url=base_url))
    if len(endpoint.models) != 1:
        told = f"serves {', '.join(endpoint.models[:20])}" if endpoint.models else endpoint.detail or "serves none"
        raise UsageError(f"name the model with --model: {base_url} {told}")
    return endpoint.models[0]


def next_name(names: Collection[str]) -> str:
    """`demo-1`, or the number after the highest there is."""
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(r"demo-(\d{1,9})", name))]
    return f"demo-{max(numbers, default=0) + 1}"


def example(name: str) -> Path:
    """A file of `examples/`: beside the package in a checkout, inside it in a wheel.

    Raises:
        UsageError: it was not installed.
    """
    package = Path(rollstream.__file__).parent
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise UsageError(f"the example tasks {name} were not installed with rollstream: run this in a checkout of the repository")


def _print_best(run: str, settings: Settings) -> None:
    """One trajectory, so that the numbers have a face."""
    try:
        with open_snapshot(home(settings)) as connection:
            best = choose_rollouts(connection, run, "best", 20)
    except UsageError:
        # Nothing was scored, or nothing is published; the report has said so.
        return
    print_trajectory(next((one for one in best if one.status == "completed"), best[0]))


def _is_whole(snapshot: Snapshot) -> bool:
    """Whether every attempt ended and a model really was called; if not, say what is missing."""
    if not snapshot.tokens:
        err.print("no model token was used: the model server answered without a usage, or was never asked")
    return snapshot.is_complete and snapshot.tokens > 0
