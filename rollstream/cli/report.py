"""`rollstream report`: the numbers of a run. A mean is never over attempts that failed."""

import sys
from dataclasses import asdict
from typing import Annotated

import orjson
import typer

from rollstream.cli.common import Config, DataDir, out, read_settings, table
from rollstream.store.formats import visible
from rollstream.store.reader import open_snapshot
from rollstream.store.report import EnvironmentReport, PassAt, Report, read_report

Grid = tuple[list[str], list[list[str]]]
"""Names of columns, and rows."""


def report(
    run: Annotated[str | None, typer.Argument(help="Default: the run published last.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, everything.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Print the numbers of a run: reward, pass@k, failures, usage.

    Example: rollstream report nightly
    """
    with open_snapshot(read_settings(data_dir, config).data_dir) as connection:
        found = read_report(connection, run)
    if json:
        sys.stdout.write(as_json(found))
    elif markdown:
        sys.stdout.write(as_markdown(found))
    else:
        print_report(found)


def print_report(report: Report) -> None:
    """The report as tables for people."""
    out.print(f"{headline(report)}\n{progress(report)}")
    for columns, rows in grids(report):
        made = table(*columns)
        for row in rows:
            made.add_row(*row)
        out.print(made)


def as_json(report: Report) -> str:
    body = asdict(report) | {"attempted": report.attempted, "ended": report.ended, "complete": report.complete}
    for environment, told in zip(report.environments, body["environments"], strict=True):
        told |= {"ended": environment.ended, "unfinished": environment.unfinished, "coverage": environment.coverage}
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z).decode() + "\n"


def as_markdown(report: Report) -> str:
    parts = [f"## {headline(report)}", progress(report)]
    for columns, rows in grids(report):
        lines = [columns, ["---"] * len(columns), *rows]
        parts.append("\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def headline(report: Report) -> str:
    told = (("dataset", report.dataset), ("harness", report.harness), ("model", report.model))
    return ", ".join([f"run {report.run}", *(f"{name} {value}" for name, value in told if value)])


def progress(report: Report) -> str:
    wall = "" if report.wall_s is None else f" in {_seconds(report.wall_s)}"
    published = f"store published {report.published_at:%Y-%m-%d %H:%M:%S} UTC"
    waiting = f", {report.retries_waiting} wait for a retry" if report.retries_waiting else ""
    held = f"; {report.state}" if report.state != "active" else ""
    held += f": {visible(report.paused_because)}" if report.paused_because else ""
    return f"{report.ended} of {report.attempted} attempts ended{wall}{waiting}{held}; {published}"


def grids(report: Report) -> list[Grid]:
    """The tables of the report: outcomes, failures if there are any, time, tokens."""
    each = report.environments
    outcomes: Grid = (
        ["environment", "tasks", "attempts", "completed", "truncated", "errored", "cancelled", "unfinished", "scored",
         "mean reward", *(f"pass@{k}" for k in _ks(report))],
        [_outcome(environment, _ks(report)) for environment in each],
    )  # fmt: skip
    failures: Grid = (
        ["environment", "failed at", "kind", "attempts", "for example"],
        [[e.environment, f.stage, f.kind, str(f.count), _line(f.example)] for e in each for f in e.failures],
    )
    time: Grid = (
        ["environment", *(f"{part.part} p50 / p95" for part in next((e.time for e in each if e.time), ()))],
        [[e.environment, *(f"{_seconds(part.p50)} / {_seconds(part.p95)}" for part in e.time)] for e in each if e.time],
    )
    tokens: Grid = (
        ["environment", "model calls", "prompt tokens", "completion tokens"],
        [[e.environment, f"{e.model_calls:,}", f"{e.prompt_tokens:,}", f"{e.completion_tokens:,}"] for e in each],
    )
    return [grid for grid in (outcomes, failures, time, tokens) if grid[1]]


def _ks(report: Report) -> list[int]:
    return sorted({estimate.k for environment in report.environments for estimate in environment.pass_at})


def _outcome(environment: EnvironmentReport, ks: list[int]) -> list[str]:
    counts = (environment.tasks, environment.attempted, environment.completed, environment.truncated, environment.errored,
              environment.cancelled, environment.unfinished)  # fmt: skip
    by_k = {estimate.k: estimate for estimate in environment.pass_at}
    return [
        environment.environment,
        *map(str, counts),
        f"{environment.scored} ({environment.coverage:.0%})",
        _number(environment.mean_reward),
        *(_estimate(by_k.get(k), environment.tasks) for k in ks),
    ]


def _estimate(estimate: PassAt | None, tasks: int) -> str:
    if estimate is None or estimate.estimate is None:
        return "-"
    # Tasks with fewer than k scored attempts are left out; the reader must see it, or the number misleads.
    partly = "" if estimate.tasks == tasks else f" ({estimate.tasks} of {tasks} tasks)"
    return f"{_number(estimate.estimate)}{partly}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _seconds(value: float) -> str:
    if value < 60:
        return f"{value:.2f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _line(text: str, limit: int = 80) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
