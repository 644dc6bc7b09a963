"""Estimates against values that are known exactly, and intervals against what they promise."""

import math
import random
from fractions import Fraction
from itertools import combinations
from statistics import mean as plain_mean, stdev

import pytest
from hypothesis import given, settings, strategies as st

from rollstream.store.report.statistics import (
    FEW_TASKS,
    Cluster,
    bootstrap_interval,
    estimate,
    mean,
    pass_at_k,
    pass_hat_k,
    student_t,
    wilson,
)

VALUES = st.lists(st.floats(-100, 100).map(lambda value: round(value, 3)), min_size=2, max_size=60)
COUNTS = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@settings(deadline=None, max_examples=50)
@given(VALUES)
def test_with_one_value_a_task_the_standard_error_is_the_usual_one(values: list[float]) -> None:
    found = mean(values)
    assert found.value == pytest.approx(plain_mean(values), abs=1e-9)
    assert found.standard_error == pytest.approx(stdev(values) / math.sqrt(len(values)), abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(VALUES, st.integers(1, 8))
def test_repeating_every_attempt_of_every_task_makes_nothing_more_certain(values: list[float], times: int) -> None:
    once, repeated = mean(values), estimate([Cluster(value * times, times) for value in values])
    assert repeated.standard_error == pytest.approx(once.standard_error, abs=1e-9)
    assert repeated.value == pytest.approx(once.value, abs=1e-9)


def test_the_standard_error_of_unequal_clusters_is_worked_out_by_hand() -> None:
    # Task a: 1, 1, 0; task b: 0. The mean is 1/2, residuals are 2 - 3/2 = 1/2 and 0 - 1/2: under the root is 2/1 (1/4 + 1/4).
    found = estimate([Cluster(2, 3), Cluster(0, 1)])
    assert (found.value, found.standard_error, found.tasks) == (0.5, 1 / 4, 2)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (29, 2.04523), (30, 2.04227)],
)
def test_students_quantile_is_the_one_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=1e-5)


def test_students_quantile_goes_over_into_the_normal_one_without_a_step() -> None:
    assert student_t(200) == pytest.approx(1.971896, rel=1e-6)
    assert 0 < student_t(200) - student_t(201) < 1e-4
    assert student_t(10**6) == pytest.approx(1.959964, rel=1e-5)


def test_wilsons_interval_of_ten_successes_in_ten_is_the_known_one() -> None:
    assert wilson(1.0, 10) == (pytest.approx(0.72247, rel=1e-4), 1.0)
    assert wilson(0.0, 10) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.27753, rel=1e-4))
    assert wilson(0.5, 10) == (pytest.approx(0.23659, rel=1e-4), pytest.approx(0.76341, rel=1e-4))


@given(COUNTS)
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_success(counts: tuple[int, int, int]) -> None:
    n, c, k = counts
    choices = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(float(Fraction(sum(map(any, choices)), len(choices))))
    assert pass_hat_k(n, c, k) == pytest.approx(float(Fraction(sum(map(all, choices)), len(choices))))


@given(COUNTS)
def test_the_estimators_are_unbiased(counts: tuple[int, int, int]) -> None:
    n, numerator, k = counts
    p = Fraction(numerator, n)
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for estimator, truth in ((pass_at_k, 1 - (1 - p) ** k), (pass_hat_k, p**k)):
        expected = sum(float(chance[c]) * float(estimator(n, c, k) or 0) for c in range(n + 1))
        assert expected == pytest.approx(float(truth))


def test_fewer_attempts_than_k_estimate_nothing() -> None:
    assert (pass_at_k(3, 3, 4), pass_hat_k(3, 3, 4)) == (None, None)


def test_nothing_and_a_single_task_have_no_interval() -> None:
    assert (mean([]).value, mean([]).tasks) == (None, 0)
    alone = mean([0.5])
    assert (alone.value, alone.standard_error, alone.low, alone.method) == (0.5, None, None, "none")


def test_where_all_tasks_agree_a_share_is_not_taken_for_certain() -> None:
    found = mean([1.0] * 12, bounded=True)
    assert (found.value, found.method, found.high) == (1.0, "wilson", 1.0)
    assert found.low == pytest.approx(wilson(1.0, 12)[0])
    rewards = mean([3.5] * 12)
    assert (rewards.low, rewards.high, rewards.method) == (None, None, "none")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=FEW_TASKS + 10))
def test_an_interval_holds_its_estimate_and_a_share_stays_one(values: list[float]) -> None:
    found = mean(values, bounded=True)
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert 0.0 <= found.low <= found.value + 1e-12
    assert found.value - 1e-12 <= found.high <= 1.0


def test_the_same_data_gives_the_same_interval() -> None:
    clusters = [Cluster(value) for value in (0.0, 0.25, 1.0, 1.0, 0.75, 0.5)]
    assert bootstrap_interval(clusters) == bootstrap_interval(list(clusters))


@pytest.mark.parametrize(("tasks", "method"), [(10, "bootstrap"), (20, "bootstrap"), (40, "t")])
def test_about_95_of_100_intervals_hold_the_truth(tasks: int, method: str) -> None:
    """Tasks of very different difficulty, four attempts each; the truth is the mean difficulty."""
    draw = random.Random(7)
    held, runs = 0, 400
    for _ in range(runs):
        difficulties = [draw.betavariate(1.0, 1.0) for _ in range(tasks)]
        found = mean([sum(draw.random() < p for _ in range(4)) / 4 for p in difficulties], bounded=True)
        assert found.method == method
        held += found.low is not None and found.high is not None and found.low <= 0.5 <= found.high
    assert 0.92 <= held / runs <= 0.98


def test_intervals_over_attempts_as_if_they_were_independent_would_not() -> None:
    """What clustering is for: the same attempts, each taken for a task of its own, promise too much."""
    draw = random.Random(7)
    held, runs = 0, 400
    for _ in range(runs):
        difficulties = [draw.betavariate(0.3, 0.3) for _ in range(20)]
        attempts = [float(draw.random() < p) for p in difficulties for _ in range(8)]
        found = mean(attempts, bounded=True)
        held += found.low is not None and found.high is not None and found.low <= 0.5 <= found.high
    assert held / runs < 0.75
