"""`rollstream report`: the numbers of a run. A mean is never over attempts that failed, unless somebody says so."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import duckdb
import orjson
import typer

from rollstream.benchmarks import Benchmark, read_benchmark
from rollstream.cli import report_text as text
from rollstream.cli.common import Config, DataDir, err, out, read_settings, table
from rollstream.environments import registry
from rollstream.environments.protocol import AggregatesMetrics, ScoredVerdict
from rollstream.errors import Refused, UsageError
from rollstream.settings import Settings
from rollstream.store.reader import open_snapshot
from rollstream.store.report import Report, read_report
from rollstream.store.report.attempts import DIMENSIONS, Dimension
from rollstream.store.report.benchmarking import Result, measure
from rollstream.store.report.comparison import Comparison, read_comparison
from rollstream.store.report.prices import prices_in

BY_ENVIRONMENT: tuple[Dimension, ...] = ("environment",)


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that was asked for."""

    report: Report
    comparison: Comparison | None = None
    benchmark: Benchmark | None = None
    result: Result | None = None


def report(
    run: Annotated[str | None, typer.Argument(help="Default: the run published last.", show_default=False)] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="Another run, compared with this one task by task.", metavar="RUN")
    ] = None,
    by: Annotated[
        str, typer.Option("--by", help=f"What to tell apart, with commas between: {', '.join(DIMENSIONS)}.")
    ] = "environment",
    benchmark: Annotated[
        Path | None, typer.Option("--benchmark", help="Hold the run against a benchmark file.", show_default=False)
    ] = None,
    missing: Annotated[
        bool, typer.Option("--count-missing-as-zero", help="Attempts without a reward count as 0, and the report says so.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, everything.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Print the numbers of a run: reward, pass@k, failures, usage.

    Intervals are of 95 %, over tasks. With --compare, differences are RUN2 minus RUN.

    Example: rollstream report nightly --compare nightly-2
    """
    settings = read_settings(data_dir, config)
    dimensions = _dimensions(by)
    wanted = None if benchmark is None else read_benchmark(benchmark)
    with open_snapshot(settings.data_dir) as connection:
        result = None if wanted is None else measure(connection, run, wanted, missing_as_zero=missing)
        first = full_report(connection, run, settings, by=dimensions, missing_as_zero=missing)
        compared = read_comparison(connection, first.run, compare, missing_as_zero=missing) if compare else None
    found = Found(first, compared, wanted, result)
    if json:
        sys.stdout.write(as_json(found))
    elif markdown:
        sys.stdout.write(text.as_markdown(text.headline(first), sentences(found), grids(found)))
    else:
        print_found(found)


def _dimensions(by: str) -> tuple[Dimension, ...]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    found = tuple(known for name in names for known in DIMENSIONS if known == name)
    if not found or len(set(found)) < len(names):
        raise UsageError(f"--by expects some of {', '.join(DIMENSIONS)}, each once, with commas between; found {by!r}")
    return found


def full_report(
    connection: duckdb.DuckDBPyConnection,
    run: str | None,
    settings: Settings,
    *,
    by: Sequence[Dimension] = BY_ENVIRONMENT,
    missing_as_zero: bool = False,
) -> Report:
    """A report with the prices of the settings and with what the installed environments add."""
    prices = prices_in(settings)
    return read_report(connection, run, by=by, missing_as_zero=missing_as_zero, prices=prices, aggregate=metrics_of_environment)


def metrics_of_environment(name: str, verdicts: Iterable[ScoredVerdict]) -> Mapping[str, float]:
    """What an environment makes of its verdicts; nothing where it is not installed here or has no metrics.

    A metric that fails is told on stderr, and the report goes on without it: the other numbers are none the worse.
    """
    try:
        environment = registry.load(name)
    except Refused:
        return {}
    if not isinstance(environment, AggregatesMetrics):
        return {}
    try:
        found = dict(environment.aggregate_metrics(verdicts))
    except Exception as error:
        err.print(f"note: aggregate_metrics of environment {name} raised {type(error).__name__}: {error}")
        return {}
    bad = [metric for metric, value in found.items() if not _is_number(value)]
    for metric in bad:
        err.print(f"note: aggregate_metrics of environment {name}: expected a finite number as {metric}, found another value")
    return {metric: float(value) for metric, value in found.items() if metric not in bad}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def sentences(found: Found) -> Iterable[str]:
    yield from text.sentences(found.report)
    if found.benchmark is not None and found.result is not None:
        told = f"matches the benchmark {found.benchmark.name}"
        if not found.result.whole:
            counted = "the others count as 0" if found.result.missing_as_zero else "the number is over those alone"
            told += f", but only {found.result.scored} of {found.result.attempted} attempts were scored: {counted}"
        yield told
    if found.comparison is not None:
        yield from text.comparison_sentences(found.comparison)


def grids(found: Found) -> Iterable[text.Grid]:
    if found.benchmark is not None and found.result is not None:
        yield text.benchmark_grid(found.benchmark, found.report.run, found.result)
    yield from text.grids(found.report)
    if found.comparison is not None:
        yield from text.comparison_grids(found.comparison)


def print_found(found: Found) -> None:
    """The report as tables for people."""
    out.print(text.headline(found.report))
    for sentence in sentences(found):
        out.print(sentence)
    for grid in grids(found):
        made = table(*grid.columns)
        for row in grid.rows:
            made.add_row(*row)
        out.print(f"\n{grid.title}")
        out.print(made)


def as_json(found: Found) -> str:
    report = found.report
    body = asdict(report) | {"attempted": report.attempted, "ended": report.ended, "complete": report.complete}
    for part, told in zip(report.slices, body["slices"], strict=True):
        told["labels"] = dict(zip(report.by, part.labels, strict=True))
        told["metrics"] = dict(part.metrics)
        told |= {"ended": part.ended, "unfinished": part.unfinished, "coverage": part.coverage}
        told |= {"cost": part.cost, "cost_usd": part.cost_usd}
    if found.comparison is not None:
        body["comparison"] = asdict(found.comparison)
    if found.benchmark is not None and found.result is not None:
        told = found.benchmark.model_dump(mode="json", include={"name", "metric", "k", "verified", "baselines"})
        body["held_against"] = told | {"result": asdict(found.result), "whole": found.result.whole}
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z).decode() + "\n"
