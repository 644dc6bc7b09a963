"""`rollstream publish`: a task file becomes a run. The options stand here once, for every command that publishes."""

import asyncio
import json
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from rollstream.benchmarks import NotThisBenchmark, read_benchmark
from rollstream.broker import find_broker
from rollstream.cli.common import Config, DataDir, err, interruptible, out, pairs, progress_bar, read_settings
from rollstream.cli.endpoints import ask
from rollstream.cli.own import Own, given_by_path
from rollstream.cli.progress import Snapshot
from rollstream.cli.stack import require_topics
from rollstream.cli.watch import follow, progress_display
from rollstream.errors import RollstreamError, UsageError
from rollstream.eventlog.producer import EventProducer
from rollstream.publishing import Plan, Published, RunRequest, check_request, plan_run, publish_run, run_name
from rollstream.settings import SamplingSettings, Settings
from schemas.events import describe
from schemas.values import Composition, EpisodeLimits, Sampling

REFUSALS_SHOWN = 20

File = Annotated[
    Path | None,
    typer.Argument(
        help="JSONL, JSON or Parquet, one task a row; the first two also gzipped.", metavar="FILE", show_default=False
    ),
]
Environment = Annotated[
    str | None,
    typer.Option(
        "--environment", "-e", help="A name, or path.py:Class. Default: what each row or the settings name.", show_default=False
    ),
]
Harness = Annotated[
    str | None,
    typer.Option("--harness", help="A name, or path.py:Class. Default: from the settings, else chat.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A name in [models], or an id that the default endpoint serves.", show_default=False),
]
Role = Annotated[
    list[str] | None, typer.Option("--role", help="Model of another role, e.g. user=small. Repeatable.", metavar="ROLE=MODEL")
]
Sandbox = Annotated[
    str | None,
    typer.Option(
        "--sandbox",
        help="Backend of the run's sandboxes, e.g. docker. Default where one is needed: from the settings.",
        show_default=False,
    ),
]
Attempts = Annotated[
    int | None,
    typer.Option("--attempts", "-k", min=1, max=10_000, help="Rollouts of each task. Default: 1.", show_default=False),
]
Run = Annotated[str | None, typer.Option("--run", help="Name of the run. Default: a new one.", show_default=False)]
Dataset = Annotated[str | None, typer.Option("--dataset", help="Default: the name of the file.", show_default=False)]
Split = Annotated[str | None, typer.Option("--split", help="For example train or test.", show_default=False)]
Epoch = Annotated[
    int | None,
    typer.Option("--epoch", min=0, help="Raise it to attempt the same tasks once more in one run.", show_default=False),
]
Field = Annotated[
    list[str] | None,
    typer.Option(
        "--field", help="Column of the file that holds a field of the environment. Repeatable.", metavar="FIELD=COLUMN"
    ),
]
SamplingOption = Annotated[
    list[str] | None,
    typer.Option("--sampling", help="For example temperature=1. Repeatable.", metavar="NAME=VALUE"),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only so many rows from the start.", show_default=False)]
MaxSteps = Annotated[int | None, typer.Option("--max-steps", min=1, help="Agent's limit on model calls.", show_default=False)]
AgentTimeout = Annotated[
    float | None, typer.Option("--agent-timeout", min=0.001, help="Agent's limit in seconds.", show_default=False)
]
BenchmarkFile = Annotated[
    Path | None,
    typer.Option("--benchmark", help="A benchmark in TOML, which names the tasks and the protocol.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line said of a run to publish; None leaves it to the settings."""

    file: Path | None
    environment: str | None
    harness: str | None
    model: str | None
    role: list[str] | None
    sandbox: str | None
    attempts: int | None
    run: str | None
    dataset: str | None
    split: str | None
    epoch: int | None
    field: list[str] | None
    sampling: list[str] | None
    limit: int | None
    max_steps: int | None
    agent_timeout: float | None
    benchmark: Path | None


def publish(
    file: File = None,
    environment: Environment = None,
    harness: Harness = None,
    model: Model = None,
    role: Role = None,
    sandbox: Sandbox = None,
    attempts: Attempts = None,
    run: Run = None,
    dataset: Dataset = None,
    split: Split = None,
    epoch: Epoch = None,
    field: Field = None,
    sampling: SamplingOption = None,
    limit: Limit = None,
    max_steps: MaxSteps = None,
    agent_timeout: AgentTimeout = None,
    benchmark: BenchmarkFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch it to its end; exit with 1 if an attempt failed.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Publish a task file as a run.

    Publishing the same file into the same run again changes nothing. Exits with 1 if a row was refused; the others are
    published.

    Example: rollstream publish gsm8k.jsonl -e math --field answer=solution -m small -k 8 --run gsm8k-small --wait
    """
    settings = read_settings(data_dir, config)
    options = Options(
        file, environment, harness, model, role, sandbox, attempts, run, dataset, split, epoch, field, sampling, limit,
        max_steps, agent_timeout, benchmark,
    )  # fmt: skip
    with interruptible():
        own, options = with_own(options, settings)
        settings = own.settings
        request = request_of(options, settings)
        bootstrap = find_broker(settings)
        # Before the file is read: nobody wants to hear after minutes that the broker is away.
        asyncio.run(require_topics(bootstrap, settings))
        plan = read_plan(request, settings)
        asyncio.run(send(request, plan, settings, bootstrap))
        if own.caveat():
            err.print(f"note: {own.caveat()}")
        failed = bool(plan.refusals)
        if wait:
            with progress_display() as show:
                snapshot = asyncio.run(follow(bootstrap, settings, request.run, show))
            failed |= not told_as_good(snapshot)
    if failed:
        raise typer.Exit(1)


def with_own(options: Options, settings: Settings, *, unsafe_local: bool = False) -> tuple[Own, Options]:
    """What is given on the command line alone, and the options with the names of what is given by path.

    Raises:
        UsageError: it cannot be loaded.
    """
    own, (environment,), (harness,) = given_by_path(
        settings, [options.environment], [options.harness], unsafe_local=unsafe_local
    )
    return own, replace(options, environment=environment, harness=harness)


def request_of(options: Options, settings: Settings) -> RunRequest:
    """What is to be published, checked as far as it can be before the file is read.

    Raises:
        UsageError: with one sentence on what was expected.
    """
    chosen = [(role, model) for role, model in pairs(options.role or [], "--role")]
    if "policy" in dict(chosen):
        raise UsageError("the policy is chosen with --model, and --role names the models of other roles")
    models = {"policy": options.model or settings.defaults.model, **dict(chosen)}
    request = _of_benchmark(options, models, settings) if options.benchmark else _of_file(options, models, settings)
    check_request(request, settings)
    for name in models.values():
        check_model(name, settings)
    return request


def _of_file(options: Options, models: dict[str, str], settings: Settings) -> RunRequest:
    if options.file is None:
        raise UsageError("expected a task file, or --benchmark and a benchmark file")
    return RunRequest(
        path=options.file,
        run=run_name(options.file, datetime.now(UTC)) if options.run is None else options.run,
        composition=Composition(
            harness=options.harness or settings.defaults.harness,
            models=models,
            sampling=_sampling(options.sampling or []),
            sandbox=options.sandbox,
        ),
        limits=_limits(options, settings),
        attempts=options.attempts or settings.defaults.attempts,
        environment=options.environment,
        dataset=options.dataset,
        split=options.split,
        epoch=options.epoch,
        fields=dict(pairs(options.field or [], "--field")),
        limit=options.limit,
    )


BESIDE_A_BENCHMARK = frozenset({"model", "role", "run", "sampling", "benchmark", "sandbox"})
"""Options that stand beside --benchmark, as far as it leaves them open; what the others would choose is for it to say."""


def _of_benchmark(options: Options, models: dict[str, str], settings: Settings) -> RunRequest:
    """A run as a benchmark asks for it, by a model that it does not.

    Raises:
        UsageError: the file is malformed, or an option would make it another experiment.
    """
    assert options.benchmark is not None
    benchmark = read_benchmark(options.benchmark)
    given = [
        name
        for name in (each.name for each in fields(options))
        if name not in BESIDE_A_BENCHMARK and getattr(options, name) is not None
    ]
    given += [f"sampling {name}" for name in _sampling(options.sampling or []).model_dump(exclude_none=True)
              if getattr(benchmark.sampling, name) is not None]  # fmt: skip
    given += ["sandbox"] if options.sandbox and benchmark.sandbox else []
    if given:
        raise UsageError(f"the benchmark {benchmark.name} says what {given[0].replace('_', '-')} is: leave it out")
    sampling = benchmark.sampling_over(_sampling(options.sampling or []))
    dataset = benchmark.dataset
    return RunRequest(
        path=dataset.path,
        run=run_name(Path(f"{benchmark.name}.toml"), datetime.now(UTC)) if options.run is None else options.run,
        composition=Composition(
            harness=benchmark.harness, models=models, sampling=sampling, sandbox=benchmark.sandbox or options.sandbox
        ),
        limits=benchmark.limits_over(settings.limits.for_episode()),
        attempts=benchmark.k,
        # Several environments stand in the rows.
        environment=next(iter(benchmark.environments)) if len(benchmark.environments) == 1 else None,
        dataset=dataset.name,
        split=dataset.split,
        fields=dataset.fields,
        benchmark=benchmark,
    )


def _limits(options: Options, settings: Settings) -> EpisodeLimits:
    given = {"max_steps": options.max_steps, "agent_timeout_s": options.agent_timeout}
    return settings.limits.for_episode().model_copy(update={name: value for name, value in given.items() if value is not None})


def _sampling(texts: list[str]) -> Sampling:
    """The options' texts are read as the settings would read them; `stop` may also be a JSON list."""
    values: dict[str, object] = dict(pairs(texts, "--sampling"))
    if isinstance(stop := values.get("stop"), str):
        values["stop"] = _stop_texts(stop)
    try:
        return Sampling.model_validate(SamplingSettings.model_validate(values).model_dump())
    except ValidationError as error:
        raise UsageError(f"--sampling knows {', '.join(Sampling.model_fields)}; found {describe(error)}") from None


def _stop_texts(text: str) -> list[object]:
    try:
        found = json.loads(text)
    except ValueError:
        return [text]
    return found if isinstance(found, list) else [text]


def check_model(name: str, settings: Settings) -> None:
    """Make sure that a model is declared, or that the default endpoint serves it.

    Raises:
        UsageError: neither, with the names there are.
    """
    if settings.model_named(name) is not None:
        return
    default = settings.model_named("default")
    assert default is not None, "`default` always resolves"
    endpoint = ask(default)
    if endpoint.serves(name) or endpoint.state in ("unlisted", "unauthorised"):
        return
    declared = ", ".join(sorted({*settings.models, "default"}))
    if endpoint.state == "unreachable":
        told = f"and the default endpoint {endpoint.base_url} {endpoint.detail} to say whether it serves it"
    else:
        told = f"and the default endpoint {endpoint.base_url} serves {', '.join(endpoint.models[:20]) or 'none'}"
    raise UsageError(f"no model is named {name!r}: [models] and `default` are {declared}, {told}")


def read_plan(request: RunRequest, settings: Settings) -> Plan:
    """Read the file, and say which of its rows are refused.

    Raises:
        RollstreamError: no row of the file can be published.
        NotThisBenchmark: the file is not the one that the benchmark means, or what is installed here is not.
    """
    plan = plan_run(request, settings, datetime.now(UTC))
    for refusal in plan.refusals[:REFUSALS_SHOWN]:
        err.print(f"line {refusal.line}: {refusal.reason}")
    if len(plan.refusals) > REFUSALS_SHOWN:
        err.print(f"… and {len(plan.refusals) - REFUSALS_SHOWN} more")
    if plan.refusals:
        err.print(f"{len(plan.refusals)} of {len(plan.refusals) + plan.manifest.groups} rows refused")
    for note in plan.notes:
        err.print(f"note: {note}")
    if request.benchmark is not None and (found := list(request.benchmark.differences(plan.manifest))):
        raise NotThisBenchmark(request.benchmark.name, f"what would be published of {request.path}", found)
    if not plan.manifest.groups:
        raise RollstreamError(f"no row of {request.path} can be published")
    return plan


async def send(request: RunRequest, plan: Plan, settings: Settings, bootstrap: str) -> None:
    """Publish what was planned, and say what happened."""
    async with EventProducer(bootstrap, settings.kafka, client_id="rollstream-cli") as producer:
        with progress_bar("publishing", plan.manifest.groups) as advance:
            published = await publish_run(request, plan, settings, bootstrap, producer, advance)
    out.print(summary(plan, published))
    if published.held_up:
        err.print(f"note: run {request.run} {published.held_up}")


def summary(plan: Plan, published: Published) -> str:
    """What became of a run that was published, in one line."""
    run, manifest = plan.manifest.run, plan.manifest
    if published.resumed and not published.groups:
        return f"run {run} already has all {manifest.groups} tasks; nothing published"
    rollouts = published.groups * manifest.attempts
    was = f"; {published.already} were there already" if published.resumed else ""
    return f"run {run}: published {published.groups} tasks x {manifest.attempts} attempts = {rollouts} rollouts{was}"


def told_as_good(snapshot: Snapshot) -> bool:
    """Whether every attempt had an outcome; if not, say how many had none."""
    if snapshot.failed:
        err.print(f"{snapshot.failed} of {snapshot.total} attempts failed and have no reward")
    return not snapshot.failed
