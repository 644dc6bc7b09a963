import itertools

from free_time import free, merged


def minutes(intervals):
    return {minute for start, end in intervals for minute in range(start, end)}


def test_the_order_makes_no_difference():
    for order in itertools.permutations([(60, 120), (90, 150), (0, 10)]):
        assert merged(list(order)) == [(0, 10), (60, 150)]


def test_one_inside_of_another_does_not_shorten_it():
    assert merged([(60, 180), (90, 100)]) == [(60, 180)]


def test_what_touches_is_one_and_what_is_empty_is_none():
    assert merged([(60, 90), (90, 120), (200, 200)]) == [(60, 120)]


def test_a_gap_that_is_just_long_enough_counts():
    assert free([(0, 10), (40, 50)], (0, 50), at_least=30) == [(10, 40)]


def test_what_lies_outside_of_the_day_is_not_free():
    assert free([(0, 100), (950, 2000)], (90, 960)) == [(100, 950)]
    assert free([(0, 50), (2000, 2100)], (90, 960)) == [(90, 960)]
    assert free([(0, 2000)], (90, 960)) == []


def test_every_minute_is_either_free_or_taken():
    few = [(0, 2), (1, 4), (3, 3), (4, 6), (7, 8)]
    for count in range(len(few) + 1):
        for taken in itertools.permutations(few, count):
            gaps = free(list(taken), (1, 9))
            assert minutes(gaps) == minutes([(1, 9)]) - minutes(taken), taken
            assert merged(gaps) == gaps


def test_what_is_given_is_not_changed():
    taken = [(90, 100), (60, 70)]
    free(taken, (0, 1000))
    assert taken == [(90, 100), (60, 70)]
