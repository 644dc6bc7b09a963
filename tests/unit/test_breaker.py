"""The circuit breaker against a clock of the test's own."""

import pytest

from rollstream.models.breaker import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(threshold=3, first_s=2, most_s=5, clock=clock)


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        assert breaker.wait_s() == 0
        breaker.failed()


def test_failures_in_a_row_open_it_and_a_success_between_starts_the_count_again(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert not breaker.is_open
    fail(breaker)
    assert breaker.wait_s() == 2


def test_after_the_wait_one_call_finds_out_and_the_others_wait_for_it(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now = 2.5
    assert breaker.wait_s() == 0
    assert breaker.wait_s() > 0
    breaker.succeeded()
    assert breaker.wait_s() == 0
    assert breaker.wait_s() == 0


def test_each_failed_probe_doubles_the_wait_up_to_the_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    for expected in (4, 5, 5):
        clock.now += breaker.wait_s()
        fail(breaker)
        assert breaker.wait_s() == expected


def test_calls_that_were_under_way_when_it_opened_do_not_lengthen_the_wait(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now = 1
    for _ in range(50):
        breaker.failed()
    assert breaker.wait_s() == 1


def test_a_cancelled_probe_lets_the_next_call_find_out(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now = 3
    assert breaker.wait_s() == 0
    breaker.abandoned()
    assert breaker.wait_s() == 0
