from free_time import free, merged


def test_overlapping_intervals_are_one():
    assert merged([(60, 120), (90, 150)]) == [(60, 150)]


def test_intervals_that_are_apart_stay_apart():
    assert merged([(60, 90), (120, 150)]) == [(60, 90), (120, 150)]


def test_the_gaps_of_a_day():
    assert free([(540, 600), (720, 780)], (480, 1080), at_least=30) == [(480, 540), (600, 720), (780, 1080)]
