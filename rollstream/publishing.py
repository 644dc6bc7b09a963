"""From a task file to a run on the log.

The file is read twice and never held: once to validate every row and to know the run's manifest, once to publish. Both passes
are the same function of the same file, so whatever is interrupted can be published again: ids come out the same, and only
what is missing is sent. What a row names beside the file becomes part of it, or a blob that the second pass keeps before the
task that refers to it.
"""

import asyncio
import hashlib
import platform
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

import rollstream
from rollstream.admission import Admission
from rollstream.benchmarks import Benchmark
from rollstream.blobs import BlobReference, BlobStore
from rollstream.datasets import BadLine, Row, read_rows
from rollstream.environments import registry
from rollstream.environments.intake import NormalisedTask, Unreadable, normalise_row
from rollstream.environments.protocol import Environment, LocalisesRows, Seeded
from rollstream.errors import Refused, UsageError
from rollstream.eventlog.producer import Publisher
from rollstream.runs import Runs, published_groups, read_runs
from rollstream.settings import Settings
from schemas import identities
from schemas.run import DatasetManifest, RunPublished
from schemas.task import TaskSubmitted
from schemas.values import Composition, EpisodeLimits, TaskRef

BATCH_ROWS = 500
BATCH_BYTES = 4 * 1024 * 1024
ENVELOPE_BYTES = 64 * 1024
"""Room for ids and headers around a row, within one record."""
MAX_RUN_NAME = 200

Keep = Callable[[bytes], BlobReference]
"""What is done with content that is too long for a row; says what to call it there."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What somebody wants to be attempted."""

    path: Path
    run: str
    composition: Composition
    limits: EpisodeLimits
    attempts: int
    environment: str | None = None
    """None when every row names its own."""
    dataset: str | None = None
    """None for what a row says, or the name of the file; likewise the next two."""
    split: str | None = None
    epoch: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of the environment -> column of the file."""
    limit: int | None = None
    """Only so many rows from the start of the file."""
    benchmark: Benchmark | None = None
    """What the run must be, to the letter."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A row that is published."""

    task: TaskSubmitted
    canonical: bytes
    """Its row as one line of JSON that does not depend on how the file was written."""
    prompt: bytes | None
    """What the agent sees first, likewise; None where the environment is not here to say."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is not published."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What the first pass over the file found."""

    manifest: RunPublished
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()
    """What is published and could not be checked here, a sentence each."""


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a plan."""

    groups: int
    """Groups that were sent now."""
    already: int
    """Groups that stood on the log before."""
    resumed: bool
    """Whether the run was announced before."""
    held_up: str = ""
    """Why the run does not go on, and what to do about it; empty when nothing holds it up."""


class RunDiffers(UsageError):
    """The run exists, and is another experiment."""

    def __init__(self, run: str, difference: list[str]) -> None:
        lines = "\n".join(f"  {line}" for line in difference)
        super().__init__(
            f"run {run} exists and is another experiment (published -> now):\n{lines}\n"
            "choose another name with --run, or publish exactly what was published"
        )


class RunIsOver(UsageError):
    """The run was cancelled."""

    def __init__(self, run: str) -> None:
        super().__init__(
            f"run {run} is cancelled, and nobody would run more of its tasks: `rollstream resume {run}` first, "
            "or choose another name with --run"
        )


def run_name(path: Path, at: datetime) -> str:
    """A readable name that nobody has used: file, time and four random characters."""
    return f"{stem_of(path)[:60]}-{at.astimezone(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def stem_of(path: Path) -> str:
    """The file's name without its suffixes, as a name: `data/GSM8K test.jsonl.gz` is `GSM8K-test`."""
    stem = path.name.removesuffix(".gz")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(stem).stem).strip("-.") or "tasks"


def check_request(request: RunRequest, settings: Settings) -> None:
    """What can be known to be wrong before the file is read.

    Raises:
        UsageError: with one sentence on what was expected.
    """
    if not request.run.strip() or len(request.run) > MAX_RUN_NAME or not request.run.isprintable():
        raise UsageError(f"a run's name has 1 to {MAX_RUN_NAME} printable characters, found {request.run[:40]!r}")
    read_rows(request.path)  # refuses what is no task file; rows are read later
    Admission.of(settings).check_names(request.environment, request.composition)


def tasks_of(
    request: RunRequest,
    settings: Settings,
    at: datetime,
    admission: Admission | None = None,
    keep: Keep = BlobReference.of,
) -> Iterator[Accepted | Refusal]:
    """Every row of the file as what would be published, or why it is not.

    Args:
        admission: is left with what could not be checked here.
        keep: of what rows name beside the file; by default it is only looked at.
    """
    admission = admission or Admission.of(settings)
    ordinals = _Ordinals()
    for row in read_rows(request.path):
        if request.limit is not None and row.index >= request.limit:
            return
        if isinstance(row, BadLine):
            yield Refusal(row.line, row.reason)
            continue
        try:
            yield _accepted(row, request, settings, at, admission, ordinals, keep)
        except (Refused, Unreadable) as error:
            yield Refusal(row.line, str(error))


def _accepted(
    row: Row,
    request: RunRequest,
    settings: Settings,
    at: datetime,
    admission: Admission,
    ordinals: "_Ordinals",
    keep: Keep,
) -> Accepted:
    normal = normalise_row(row.content, environment=request.environment, fields=request.fields, defaults=settings.defaults)
    environment = admission.environment(normal.environment, request.composition)
    normal = localised(normal, environment, request.path.parent, keep)
    admitted = admission.check(normal.environment, request.composition, normal.row)
    dataset = request.dataset or normal.dataset or stem_of(request.path)
    epoch = normal.epoch if request.epoch is None else request.epoch
    # What a row asks for holds where the run says nothing.
    sampling = normal.sampling.model_copy(update=request.composition.sampling.model_dump(exclude_none=True))
    canonical = orjson.dumps(normal.row, option=orjson.OPT_SORT_KEYS)
    if len(canonical) + ENVELOPE_BYTES > settings.kafka.max_record_bytes:
        limit = settings.kafka.max_record_bytes - ENVELOPE_BYTES
        raise Refused(f"expected a row of at most {limit} bytes (kafka.max_record_bytes), found {len(canonical)}")
    submitted = TaskSubmitted.create(
        run=request.run,
        environment=normal.environment,
        task=TaskRef(
            id=ordinals.unique(normal.task_id, normal.environment, dataset, epoch),
            dataset=dataset,
            split=request.split or normal.split,
            index=row.index,
            epoch=epoch,
        ),
        row=normal.row,
        at=at,
        attempts=request.attempts,
        composition=admitted.composition.model_copy(update={"sampling": sampling}),
        limits=request.limits,
    )
    return Accepted(submitted, canonical, None if admitted.seeded is None else _prompt_of(admitted.seeded))


def localised(normal: NormalisedTask, environment: Environment[Any] | None, folder: Path, keep: Keep) -> NormalisedTask:
    """A row that names nothing which only this machine has. Its id follows its content, if it was given none.

    Raises:
        Refused: what it names is missing or too big.
    """
    if not isinstance(environment, LocalisesRows):
        return normal
    row = environment.localise(normal.row, folder, keep)
    by_content = normal.task_id == identities.task_id_of(normal.row)
    return replace(normal, row=row, task_id=identities.task_id_of(row) if by_content else normal.task_id)


def _prompt_of(seeded: Seeded) -> bytes:
    return orjson.dumps({"messages": seeded.messages, "tools": seeded.tools}, option=orjson.OPT_SORT_KEYS)


class _Ordinals:
    """Task ids of one file, made unique in the order of its rows."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, str, int, str], int] = {}

    def unique(self, task_id: str, environment: str, dataset: str, epoch: int) -> str:
        """The id itself for the first row that has it, and an id with an ordinal for every other."""
        ordinal = self._next.get((environment, dataset, epoch, task_id), 0)
        while (environment, dataset, epoch, identities.repeated(task_id, ordinal)) in self._next:
            ordinal += 1
        made = identities.repeated(task_id, ordinal)
        self._next[environment, dataset, epoch, task_id] = ordinal + 1
        self._next.setdefault((environment, dataset, epoch, made), 1)
        return made


def plan_run(request: RunRequest, settings: Settings, at: datetime) -> Plan:
    """Read the whole file once, and say what the run would be.

    Raises:
        UsageError: the file cannot be read.
    """
    rows, prompts = hashlib.sha256(), hashlib.sha256()
    all_prompts_known = True
    groups: list[str] = []
    environments: Counter[str] = Counter()
    composition = request.composition
    refusals: list[Refusal] = []
    admission = Admission.of(settings)
    for row in tasks_of(request, settings, at, admission):
        if isinstance(row, Refusal):
            refusals.append(row)
            continue
        rows.update(row.canonical + b"\n")
        all_prompts_known &= row.prompt is not None
        prompts.update((row.prompt or b"") + b"\n")
        groups.append(row.task.group)
        environments[row.task.environment] += 1
        if composition.sandbox is None:
            composition = composition.model_copy(update={"sandbox": row.task.composition.sandbox})
    versions = {name: found.version for name in sorted(environments) if (found := registry.find(name)) is not None}
    manifest = RunPublished.create(
        run=request.run,
        occurred_at=at,
        dataset=DatasetManifest(name=request.dataset or stem_of(request.path), sha256=rows.hexdigest(), rows=len(groups)),
        groups=len(groups),
        groups_sha256=hashlib.sha256("".join(f"{group}\n" for group in sorted(groups)).encode()).hexdigest(),
        attempts=request.attempts,
        environments=dict(sorted(environments.items())),
        composition=composition,
        limits=request.limits,
        versions={"rollstream": rollstream.__version__, "python": platform.python_version(), **versions},
        prompts_sha256=prompts.hexdigest() if all_prompts_known else None,
        benchmark=None if request.benchmark is None else request.benchmark.name,
    )
    return Plan(manifest, tuple(refusals), admission.notes())


async def publish_run(
    request: RunRequest,
    plan: Plan,
    settings: Settings,
    bootstrap: str,
    publisher: Publisher,
    advance: Callable[[int], None] = lambda groups: None,
) -> Published:
    """Announce a run and publish its tasks; of a run that exists, only what is missing.

    Args:
        advance: is told how many more groups stand on the log.

    Raises:
        RunDiffers: the run exists with another manifest.
        RunIsOver: the run was cancelled, and is to get tasks that nobody would run.
        UsageError: the file changed between the two passes.
    """
    runs = await read_runs(bootstrap, settings.kafka)
    known = runs.known.get(request.run)
    cancelled = runs.states.cancelled(request.run)
    present: Mapping[str, int] = {}
    if known is None:
        # Before the tasks: whoever sees one of them can know how many there will be.
        await publisher.publish([plan.manifest])
    else:
        if difference := known.manifest.difference(plan.manifest):
            raise RunDiffers(request.run, difference)
        present = await published_groups(bootstrap, settings.kafka, request.run, known.read_from)
    sent = already = 0
    keep = BlobStore.of(settings).keep
    batches = _batches(tasks_of(request, settings, plan.manifest.occurred_at, keep=keep))
    # In a thread: repositories that rows name take their time to read and to keep.
    while batch := await asyncio.to_thread(next, batches, None):
        missing = [task for task in batch if task.group not in present]
        if missing and cancelled:
            raise RunIsOver(request.run)
        await publisher.publish(missing)
        sent, already = sent + len(missing), already + len(batch) - len(missing)
        advance(len(batch))
    if sent + already != plan.manifest.groups:
        raise UsageError(
            f"{request.path} changed while it was published: it had {plan.manifest.groups} tasks and now has {sent + already}; "
            "publish it again under another name"
        )
    return Published(sent, already, resumed=known is not None, held_up=_held_up(request.run, runs))


def _held_up(run: str, runs: Runs) -> str:
    if runs.states.cancelled(run):
        return f"is cancelled: `rollstream resume {run} --cancelled` drives it again"
    pause = runs.states.paused(run)
    return "" if pause is None else f"is paused: {pause.reason}"


def _batches(rows: Iterator[Accepted | Refusal]) -> Iterator[list[TaskSubmitted]]:
    batch: list[TaskSubmitted] = []
    size = 0
    for row in rows:
        if isinstance(row, Refusal):
            continue
        batch.append(row.task)
        size += len(row.canonical)
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
