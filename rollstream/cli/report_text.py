"""A report in words and tables, for people and for Markdown. What is shown where is decided here, once for both."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollstream.benchmarks import Benchmark
from rollstream.store.formats import visible
from rollstream.store.report.benchmarking import Result
from rollstream.store.report.comparison import Comparison, EnvironmentComparison, Flip
from rollstream.store.report.prices import Usage
from rollstream.store.report.report import PassAt, Report, Slice
from rollstream.store.report.statistics import Estimate

TASKS_SHOWN = 20
"""Of each list of tasks; --json has all."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table, and what it is about."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def headline(report: Report) -> str:
    told = (
        ("dataset", report.dataset),
        ("harness", report.harness),
        ("model", report.model),
        ("benchmark", report.benchmark),
    )
    return ", ".join([f"run {report.run}", *(f"{name} {value}" for name, value in told if value)])


def sentences(report: Report) -> Iterator[str]:
    """How far the run is, and whatever a reader must know before believing a number."""
    yield _progress(report)
    if report.missing_as_zero:
        missing = sum(part.attempted - part.scored for part in report.slices)
        yield f"--count-missing-as-zero: {missing} of {report.attempted} attempts have no reward and count as 0 below"
    yield from _revisions(report)
    if report.prices:
        prices = (
            f"{name} {price.input:g} in, {price.output:g} out, {price.cached:g} cached" for name, price in report.prices.items()
        )
        yield f"prices of a million tokens, from the settings: {'; '.join(prices)}"
    told = [usage for part in report.slices for usage in part.usage if usage.cost_usd is not None]
    if told:
        least = "; at least, where some calls said none" if any(usage.costs_told < usage.calls for usage in told) else ""
        yield f"costs in USD are those that calls said themselves, of models without a price in the settings{least}"


def _progress(report: Report) -> str:
    wall = "" if report.wall_s is None else f" in {seconds(report.wall_s)}"
    published = f"store published {report.published_at:%Y-%m-%d %H:%M:%S} UTC"
    waiting = f", {report.retries_waiting} wait for a retry" if report.retries_waiting else ""
    waiting += f", {report.regrades_waiting} are being verified again" if report.regrades_waiting else ""
    held = f"; {report.state}" if report.state != "active" else ""
    held += f": {visible(report.paused_because)}" if report.paused_because else ""
    return f"{report.ended} of {report.attempted} attempts ended{wall}{waiting}{held}; {published}"


def _revisions(report: Report) -> Iterator[str]:
    """Which verdicts count, once that is not plain: after a regrade, or with several versions of an environment."""
    for environment in sorted({each.environment for each in report.revisions}):
        found = [each for each in report.revisions if each.environment == environment]
        if len(found) > 1 or found[0].revision > 0:
            told = (
                f"revision {each.revision} (version {each.environment_version or 'unknown'}) of {each.attempts} attempts"
                for each in found
            )
            yield f"verdicts of {environment} that count: {', '.join(told)}"


def grids(report: Report) -> list[Grid]:
    """The tables of the report; those that would be empty are left out."""
    made = [_outcomes(report), _scores(report), _failures(report), _step_rewards(report), _time(report), _usage(report)]
    return [grid for grid in made if grid.rows]


def _labels(part: Slice) -> list[str]:
    return ["-" if label is None else label for label in part.labels]


def _outcomes(report: Report) -> Grid:
    names = ["tasks", "attempts", "completed", "truncated", "errored", "cancelled", "unfinished", "scored"]
    rows = [
        [
            *_labels(part),
            *(str(number) for number in (part.tasks, part.attempted, part.completed, part.truncated, part.errored)),
            *(str(number) for number in (part.cancelled, part.unfinished)),
            f"{part.scored} ({part.coverage:.0%})",
        ]
        for part in report.slices
    ]
    return Grid("attempts", [*report.by, *names], rows)


def _scores(report: Report) -> Grid:
    rows = []
    for part in report.slices:
        rows += [
            [*_labels(part), name, number(found.value), number(found.standard_error), interval(found), over]
            for name, found, over in _estimates(part, missing_as_zero=report.missing_as_zero)
        ]
        rows += [
            [*_labels(part), f"{name} (of the environment)", number(value), "-", "-", f"{part.scored} attempts"]
            for name, value in part.metrics
        ]
    return Grid("scores", [*report.by, "metric", "value", "s.e.", "95 % interval", "over"], rows)


def _estimates(part: Slice, *, missing_as_zero: bool) -> Iterator[tuple[str, Estimate, str]]:
    attempts = f"{part.attempted if missing_as_zero else part.scored} attempts"
    suffix = " (missing = 0)" if missing_as_zero else ""
    yield f"mean reward{suffix}", part.mean_reward, attempts
    yield f"success rate{suffix}", part.success_rate, attempts
    most = max((each.k for each in part.pass_at), default=1)
    for each in part.pass_at:
        average = f" [avg-of-{most}]" if each.k == 1 and most > 1 else ""
        yield f"pass@{each.k}{average}{suffix}", each.estimate, _groups(each, part)
    for each in part.pass_hat:
        yield f"pass^{each.k}{suffix}", each.estimate, _groups(each, part)


def _groups(each: PassAt, part: Slice) -> str:
    # Groups with fewer than k scored attempts are left out; the reader must see it, or the number misleads.
    partly = "" if each.groups == part.groups else f" of {part.groups}"
    return f"{each.groups}{partly} {'tasks' if part.groups == part.tasks else 'groups'}"


def _failures(report: Report) -> Grid:
    rows = [
        [*_labels(part), each.stage, each.kind, str(each.count), line(each.example)]
        for part in report.slices
        for each in part.failures
    ]
    return Grid("attempts without a reward", [*report.by, "failed at", "kind", "attempts", "for example"], rows)


def _step_rewards(report: Report) -> Grid:
    rows = [
        [*_labels(part), str(each.index), number(each.mean), str(each.attempts)]
        for part in report.slices
        for each in part.step_rewards
    ]
    return Grid("rewards by step", [*report.by, "step", "mean reward", "attempts"], rows)


def _time(report: Report) -> Grid:
    rows = []
    for part in report.slices:
        spent = sum(each.total for each in part.time)
        rows += [
            [*_labels(part), each.part, seconds(each.p50), seconds(each.p95), f"{each.total / spent:.0%}" if spent else "-"]
            for each in part.time
        ]
    return Grid("time of scored attempts", [*report.by, "part", "p50", "p95", "share"], rows)


def _usage(report: Report) -> Grid:
    known = any(cost is not None for part in report.slices for cost in (part.cost, part.cost_usd))
    names = ["role", "model", "calls", "calls/attempt", "prompt tokens", "cached", "completion tokens", *["cost"] * known]
    rows = []
    for part in report.slices:
        steps = "-" if part.steps_mean is None else f"{part.steps_mean:.1f} (most {part.steps_most})"
        for each in part.usage:
            counts = (each.prompt_tokens, each.cached_tokens, each.completion_tokens)
            calls = [f"{each.calls:,}", steps if each.role == "policy" else "-"]
            numbers = [f"{count:,}" for count in counts]
            rows.append([*_labels(part), each.role, each.model, *calls, *numbers, *[_cost(each)] * known])
    return Grid("model calls, of every try", [*report.by, *names], rows)


def _cost(usage: Usage) -> str:
    """A price goes before what calls said. Where only some said something, more was paid than that, or nobody knows."""
    if usage.cost is not None:
        return f"{usage.cost:,.4f}"
    if usage.cost_usd is None:
        return "no price"
    least = "at least " if usage.costs_told < usage.calls else ""
    return f"{least}{usage.cost_usd:,.4f} USD"


# Two runs.


def comparison_sentences(found: Comparison) -> Iterator[str]:
    """What is compared, and what else differs."""
    yield f"run {found.other} against run {found.base}: differences are {found.other} minus {found.base}, task by task"
    if found.missing_as_zero:
        yield "--count-missing-as-zero: attempts without a reward count as 0 in both"
    for difference in found.setup:
        yield f"the runs also differ in {line(difference, 200)}"
    for part in found.environments:
        yield from _not_compared(found, part)


def _not_compared(found: Comparison, part: EnvironmentComparison) -> Iterator[str]:
    left_out = (
        (part.only_base, f"only in {found.base}"),
        (part.only_other, f"only in {found.other}"),
        (part.unscored, "in both but not scored in both"),
    )
    for tasks, where in left_out:
        if tasks:
            yield f"{part.environment}: {len(tasks)} tasks are {where} and left out: {_some(tasks)}"


def comparison_grids(found: Comparison) -> list[Grid]:
    differences = Grid(
        "difference",
        ["environment", "metric", found.base, found.other, "difference", "s.e.", "95 % interval", "over"],
        [
            [part.environment, each.metric, number(each.base), number(each.other), signed(each.difference.value),
             number(each.difference.standard_error), interval(each.difference, sign=True), f"{part.paired} tasks"]
            for part in found.environments
            for each in part.differences
        ],
    )  # fmt: skip
    flips = Grid(
        "tasks by whether they are solved (half of the attempts succeed)",
        ["environment", "gained", "lost", "solved by both", "by neither"],
        [
            [part.environment, *map(str, (len(part.gained), len(part.lost), part.both_solved, part.neither_solved))]
            for part in found.environments
        ],
    )
    flipped = Grid(
        "tasks that flipped",
        ["environment", "flipped", "task", found.base, found.other],
        [row for part in found.environments for row in _flipped(part)],
    )
    return [grid for grid in (differences, flips, flipped) if grid.rows]


def _flipped(part: EnvironmentComparison) -> Iterator[list[str]]:
    for name, flips in (("gained", part.gained), ("lost", part.lost)):
        for flip in flips[:TASKS_SHOWN]:
            yield [part.environment, name, line(flip.task), *_scores_of(flip)]
        if len(flips) > TASKS_SHOWN:
            yield [part.environment, name, f"… and {len(flips) - TASKS_SHOWN} more", "", ""]


def _scores_of(flip: Flip) -> list[str]:
    return [f"{score.succeeded} of {score.scored}" for score in (flip.base, flip.other)]


# A benchmark.


def benchmark_grid(benchmark: Benchmark, run: str, result: Result) -> Grid:
    """The run's own number among the baselines, best first."""
    rows = [
        (each.value, [each.name, number(each.value), "-", _against(each.value, result), each.source])
        for each in benchmark.baselines
    ]
    own = [f"run {run}", number(result.estimate.value), interval(result.estimate), "", "this report"]
    rows.append((result.estimate.value if result.estimate.value is not None else float("-inf"), own))
    ordered = [row for _, row in sorted(rows, key=lambda row: -row[0])]
    verified = "verified" if benchmark.verified else "not verified"
    title = f"benchmark {benchmark.name} ({verified}), {benchmark.metric}"
    return Grid(title, ["", "value", "95 % interval", "this run", "source"], ordered)


def _against(value: float, result: Result) -> str:
    """Where the run stands beside a baseline, as far as its interval tells."""
    low, high = result.estimate.low, result.estimate.high
    if low is None or high is None:
        return "-"
    return "above" if low > value else "below" if high < value else "no clear difference"


# Cells.


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def interval(found: Estimate, *, sign: bool = False) -> str:
    if found.low is None or found.high is None:
        return "-"
    shown = signed if sign else number
    return f"{shown(found.low)} to {shown(found.high)}"


def seconds(value: float) -> str:
    if value < 60:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def line(text: str, limit: int = 80) -> str:
    found = visible(" ".join(text.split()))
    return found if len(found) <= limit else f"{found[: limit - 1]}…"


def _some(tasks: Sequence[str], limit: int = 5) -> str:
    more = f", … ({len(tasks) - limit} more)" if len(tasks) > limit else ""
    return ", ".join(line(task, 60) for task in tasks[:limit]) + more


def as_markdown(title: str, told: Iterable[str], tables: Iterable[Grid]) -> str:
    parts = [f"## {title}", *told]
    for grid in tables:
        lines = [grid.columns, ["---"] * len(grid.columns), *grid.rows]
        rows = "\n".join(f"| {' | '.join(map(_escaped, cells))} |" for cells in lines)
        parts += [f"### {grid.title}", rows]
    return "\n\n".join(parts) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
