import threading

import pytest

from in_parallel import in_parallel


def test_results_stand_in_the_order_of_the_items_whoever_is_ready_first():
    second_is_done = threading.Event()

    def slow_first(number):
        if number == 0:
            assert second_is_done.wait(10)
        if number == 1:
            second_is_done.set()
        return number

    assert in_parallel(slow_first, [0, 1, 2], workers=2) == [0, 1, 2]


def test_a_call_that_raises_is_told():
    def divide(number):
        return 1 // number

    with pytest.raises(ZeroDivisionError):
        in_parallel(divide, [1, 0, 2], workers=2)


def test_of_two_calls_that_raise_the_first_item_counts():
    both = threading.Barrier(2, timeout=10)

    def fail(text):
        both.wait()
        raise ValueError(text)

    with pytest.raises(ValueError, match="^first$"):
        in_parallel(fail, ["first", "second"], workers=2)


def test_after_a_failure_nothing_new_is_begun():
    begun = []

    def fail_at_once(number):
        begun.append(number)
        raise RuntimeError(number)

    with pytest.raises(RuntimeError):
        in_parallel(fail_at_once, range(100), workers=1)
    assert begun == [0]


def test_no_more_threads_work_than_were_asked_for():
    lock = threading.Lock()
    at_once = most = 0

    def count(number):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        with lock:
            at_once -= 1
        return number

    assert in_parallel(count, range(50), workers=3) == list(range(50))
    assert most <= 3
