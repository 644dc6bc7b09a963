"""Benchmarks: a frozen task set, how it is to be attempted, and what others got.

A benchmark file says what a run must be so that its number may stand beside the baselines. What it names must match to the
letter; what it leaves out may be anything. A run is held against it by its manifest, so nobody has to trust a label.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from rollstream.errors import UsageError
from schemas.events import describe
from schemas.run import RunPublished
from schemas.values import EpisodeLimits, Name, Sampling

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_METRIC = re.compile(r"mean_reward|success_rate|pass[@^][1-9][0-9]{0,4}")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BenchmarkDataset(_Section):
    """`[dataset]`: the tasks."""

    path: Path
    """Of the task file, from the folder of the benchmark file."""
    sha256: Sha256
    """Of the rows as published (`dataset.sha256` of a run's manifest): re-compressing the file changes nothing."""
    name: Name | None = None
    """None for what a row says, or the name of the file."""
    split: Name | None = None
    fields: dict[str, str] = {}
    """Field of the environment -> column of the file."""


class BenchmarkLimits(_Section):
    """`[limits]`: those of `EpisodeLimits` that the protocol fixes."""

    episode_timeout_s: Annotated[float, Field(gt=0)] | None = None
    agent_timeout_s: Annotated[float, Field(gt=0)] | None = None
    max_steps: Annotated[int, Field(ge=1)] | None = None
    max_model_tokens: Annotated[int, Field(ge=1)] | None = None
    max_output_bytes: Annotated[int, Field(ge=1024)] | None = None


class BenchmarkSampling(Sampling):
    """`[sampling]`: what the protocol fixes of it."""

    model_config = ConfigDict(extra="forbid")


class Baseline(_Section):
    """`[[baselines]]`: what somebody got."""

    name: Name
    value: float
    source: Annotated[str, StringConstraints(min_length=1)]
    """Where the number comes from, so that it can be checked."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a benchmark is judged by."""

    kind: Literal["mean_reward", "success_rate", "pass@", "pass^"]
    k: int = 1


class Benchmark(_Section):
    """A benchmark file. Create it with `read_benchmark`."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    description: str = ""
    dataset: BenchmarkDataset
    environments: Annotated[dict[Name, Name], Field(min_length=1)]
    """Environment -> the version that must have graded."""
    prompts_sha256: Sha256 | None = None
    """Of everything that the agent sees first (`prompts_sha256` of a run's manifest)."""
    harness: Name = "chat"
    sandbox: Name | None = None
    """Backend of its sandboxes, if it must be a certain one."""
    limits: BenchmarkLimits = BenchmarkLimits()
    sampling: BenchmarkSampling = BenchmarkSampling()
    k: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Attempts at each task."""
    metric: str = "pass@1"
    """`mean_reward`, `success_rate`, `pass@K` or `pass^K`, with K no more than k."""
    verified: bool = False
    """Whether somebody has got a baseline again with this file."""
    baselines: list[Baseline] = []

    @model_validator(mode="after")
    def _can_be_measured(self) -> "Benchmark":
        if not _METRIC.fullmatch(self.metric):
            raise ValueError(f"metric: expected mean_reward, success_rate, pass@K or pass^K, found {self.metric!r}")
        if self.measured.k > self.k:
            raise ValueError(f"metric: {self.metric} needs at least {self.measured.k} attempts at each task, and k is {self.k}")
        return self

    @property
    def measured(self) -> Metric:
        for kind in ("pass@", "pass^"):
            if self.metric.startswith(kind):
                return Metric(kind, int(self.metric.removeprefix(kind)))
        return Metric("mean_reward" if self.metric == "mean_reward" else "success_rate")

    def limits_over(self, limits: EpisodeLimits) -> EpisodeLimits:
        """`limits`, but for those that the benchmark fixes."""
        return limits.model_copy(update=self.limits.model_dump(exclude_none=True))

    def sampling_over(self, sampling: Sampling) -> Sampling:
        """`sampling`, but for what the benchmark fixes."""
        return sampling.model_copy(update=self.sampling.model_dump(exclude_none=True))

    def differences(self, manifest: RunPublished) -> Iterator[str]:
        """Everything in which a run is not this benchmark, a line each."""
        fixed: list[tuple[str, object, object]] = [
            ("dataset.sha256", self.dataset.sha256, manifest.dataset.sha256),
            ("dataset.name", self.dataset.name, manifest.dataset.name),
            ("environments", sorted(self.environments), sorted(manifest.environments)),
            ("prompts_sha256", self.prompts_sha256, manifest.prompts_sha256),
            ("harness", self.harness, manifest.composition.harness),
            ("sandbox", self.sandbox, manifest.composition.sandbox),
            ("k", self.k, manifest.attempts),
        ]
        fixed += [
            (f"environments.{name}", version, manifest.versions.get(name))
            for name, version in self.environments.items()
            if name in manifest.environments
        ]
        for section, mine, theirs in (
            ("limits", self.limits, manifest.limits),
            ("sampling", self.sampling, manifest.composition.sampling),
        ):
            fixed += [(f"{section}.{name}", value, getattr(theirs, name)) for name, value in mine.model_dump().items()]
        for name, expected, found in fixed:
            if expected is not None and expected != found:
                yield f"{name}: expected {_told(expected)}, found {_told(found)}"

    def differences_of_results(
        self, splits: frozenset[str | None], versions: Mapping[str, frozenset[str | None]]
    ) -> Iterator[str]:
        """Everything in which what happened is not this benchmark, whatever the manifest said.

        Args:
            splits: of the tasks of the run.
            versions: environment -> versions that gave the verdicts that count.
        """
        if self.dataset.split is not None and splits - {self.dataset.split}:
            found = ", ".join(sorted(str(split or "none") for split in splits))
            yield f"dataset.split: expected {self.dataset.split}, found {found}"
        for name, version in self.environments.items():
            if others := versions.get(name, frozenset()) - {version}:
                found = ", ".join(sorted(str(other or "unknown") for other in others))
                yield f"environments.{name}: expected verdicts of version {version}, found some of {found}: regrade the run"


def _told(value: object) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


class NotThisBenchmark(UsageError):
    """A run, or what is to become one, is another experiment than a benchmark asks for."""

    def __init__(self, benchmark: str, what: str, differences: list[str]) -> None:
        lines = "\n".join(f"  {line}" for line in differences)
        super().__init__(f"{what} is not the benchmark {benchmark}:\n{lines}")


def read_benchmark(path: Path) -> Benchmark:
    """The benchmark in a TOML file; the path of its task file becomes one from here.

    Raises:
        UsageError: there is none, or it is malformed; the sentence names what.
    """
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"expected a benchmark in TOML in {path}, found {error}") from None
    try:
        benchmark = Benchmark.model_validate(found)
    except ValidationError as error:
        raise UsageError(f"{path} is no benchmark: {describe(error)}") from None
    dataset = benchmark.dataset.model_copy(update={"path": path.parent / benchmark.dataset.path})
    if not dataset.path.is_file():
        raise UsageError(f"{path}: expected the task file of the benchmark at {dataset.path}, found none")
    return benchmark.model_copy(update={"dataset": dataset})
