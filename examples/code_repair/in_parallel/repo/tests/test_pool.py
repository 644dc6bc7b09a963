from in_parallel import in_parallel


def test_every_item_has_a_result():
    assert sorted(in_parallel(lambda number: number * 2, range(20))) == list(range(0, 40, 2))


def test_nothing_to_do_is_nothing():
    assert in_parallel(print, []) == []


def test_one_worker_goes_in_order():
    seen = []
    in_parallel(seen.append, range(5), workers=1)
    assert seen == [0, 1, 2, 3, 4]
