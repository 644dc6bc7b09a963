"""Estimates with honest intervals from few tasks with several attempts each. Pure, and plain Python.

Attempts at one task are not independent of each other, so the unit of every standard error and of every interval is the task
(a cluster), never the attempt. `docs/reports.md` has the formulas with their sources.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from operator import itemgetter
from statistics import NormalDist
from typing import Literal

CONFIDENCE = 0.95
FEW_TASKS = 30
"""Below it, intervals are bootstrapped: the mean of so few may be far from normal."""
TOO_FEW_TASKS = 8
"""Below it, they are Student's all the same: so few can hardly be drawn in ways that differ, but his interval is wide."""
RESAMPLES = 4_000
SEED = 20_260_301
"""Of the bootstrap, so that the same data gives the same interval in any process."""

Method = Literal["t", "bootstrap", "wilson", "none"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What one task contributes: the sum of its values, and how many they are."""

    total: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its uncertainty. `value` is null where nothing was measured, the others where one task says nothing of it."""

    value: float | None
    standard_error: float | None
    low: float | None
    """Of the 95 % interval, as `high`."""
    high: float | None
    tasks: int
    method: Method
    """How the interval was made."""


NOTHING = Estimate(None, None, None, None, 0, "none")


def estimate(clusters: Sequence[Cluster], *, bounded: bool = False) -> Estimate:
    """The mean of all values, which come in clusters.

    The standard error is that of a ratio of two sums over clusters, linearised; with one value a cluster it is the usual
    one of a mean. Where all clusters agree it is 0 and says nothing: then a share gets Wilson's interval, and a reward none.

    Args:
        bounded: the values are shares, so the interval ends at 0 and 1.
    """
    count, weight = len(clusters), sum(cluster.weight for cluster in clusters)
    if not count or weight <= 0:
        return NOTHING
    value = sum(cluster.total for cluster in clusters) / weight
    if count == 1:
        return Estimate(value, None, None, None, 1, "none")
    residuals = [cluster.total - value * cluster.weight for cluster in clusters]
    error = math.sqrt(count / (count - 1) * sum(residual * residual for residual in residuals)) / weight
    # What is left of rounding must not pass for a difference between tasks.
    if error <= 1e-12 * max(1.0, abs(value)):
        low, high = wilson(value, count) if bounded else (None, None)
        return Estimate(value, 0.0, low, high, count, "wilson" if bounded else "none")
    method: Method = "t"
    if TOO_FEW_TASKS <= count < FEW_TASKS:
        method, (low, high) = "bootstrap", bootstrap_interval(clusters)
    else:
        margin = student_t(count - 1) * error
        low, high = value - margin, value + margin
    if bounded:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(value, error, low, high, count, method)


def mean(values: Iterable[float], *, bounded: bool = False) -> Estimate:
    """The mean of one value a task."""
    return estimate([Cluster(value) for value in values], bounded=bounded)


@lru_cache(maxsize=65_536)
def pass_at_k(attempts: int, successes: int, k: int) -> float | None:
    """Probability that one of k attempts succeeds, unbiased; None for fewer than k attempts.

    Source: Chen et al., 2021, "Evaluating large language models trained on code", equation 1.
    """
    return None if attempts < k else 1.0 - comb(attempts - successes, k) / comb(attempts, k)


@lru_cache(maxsize=65_536)
def pass_hat_k(attempts: int, successes: int, k: int) -> float | None:
    """Probability that all of k attempts succeed, unbiased; None for fewer than k attempts.

    Source: Yao et al., 2024, "tau-bench", section 3.
    """
    return None if attempts < k else comb(successes, k) / comb(attempts, k)


def bootstrap_interval(clusters: Sequence[Cluster]) -> tuple[float, float]:
    """The expanded percentile interval of the mean: clusters are drawn anew, with replacement.

    A plain percentile interval is too narrow for few clusters, by about as much as normal quantiles are against Student's.

    Source: Hesterberg, 2015, "What teachers should know about the bootstrap", section 4.2.
    """
    count = len(clusters)
    totals, weights = [cluster.total for cluster in clusters], [cluster.weight for cluster in clusters]
    means = sorted(sum(draw(totals)) / sum(draw(weights)) for draw in _draws(count))
    outside = NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_t(count - 1))
    return _quantile(means, outside), _quantile(means, 1.0 - outside)


@lru_cache(maxsize=FEW_TASKS)
def _draws(count: int) -> "tuple[itemgetter[Sequence[float]], ...]":
    """What takes each resample out of a list. Only `random()` is used, whose sequence Python promises to keep."""
    draw = random.Random(SEED).random
    return tuple(itemgetter(*(int(draw() * count) for _ in range(count))) for _ in range(RESAMPLES))


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share among `count`.

    Source: Wilson, 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    margin = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - margin), min(1.0, middle + margin)


@lru_cache(maxsize=4096)
def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors hold `confidence` of Student's distribution, both sides together.

    Source: Abramowitz and Stegun, 1964: 26.7.3 and 26.7.4 up to 200 degrees of freedom, 26.7.5 beyond (exact to 1e-7 there).
    """
    if freedom > 200:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return _solved(lambda t: _within(t, freedom), confidence)


def _within(t: float, freedom: int) -> float:
    """Probability that a variable of Student's distribution lies between -t and t."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2 == 0:
        term, total = 1.0, 1.0
        for n in range(2, freedom, 2):
            term *= (n - 1) / n * cosine**2
            total += term
        return sine * total
    term, total = cosine, 0.0
    for n in range(3, freedom + 2, 2):
        total += term
        term *= (n - 1) / n * cosine**2
    return 2 / math.pi * (angle + sine * total if freedom > 1 else angle)


def _solved(rising: Callable[[float], float], target: float) -> float:
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
