from remembered import remembered


def counting(size=128):
    calls = []

    @remembered(size)
    def function(*args, **kwargs):
        calls.append((args, kwargs))
        return function.result if hasattr(function, "result") else (args, kwargs)

    return function, calls


def test_keywords_tell_calls_apart():
    function, _ = counting()
    assert function(1, unit="m") == ((1,), {"unit": "m"})
    assert function(1, unit="cm") == ((1,), {"unit": "cm"})
    assert function(1) == ((1,), {})


def test_the_order_of_keywords_makes_no_difference():
    function, calls = counting()
    function(a=1, b=2)
    function(b=2, a=1)
    assert len(calls) == 1


def test_a_keyword_is_no_argument():
    function, _ = counting()
    assert function("a", 1) == (("a", 1), {})
    assert function(a=1) == ((), {"a": 1})


def test_results_that_are_false_are_remembered():
    for result in (None, 0, "", False):
        function, calls = counting()
        function.result = result
        assert function(1) == result
        assert function(1) == result
        assert len(calls) == 1


def test_one_and_true_are_not_the_same_call():
    function, _ = counting()
    assert repr(function(1)) != repr(function(True))


def test_what_was_asked_for_last_stays():
    function, calls = counting(size=2)
    function(1)
    function(2)
    function(1)
    function(3)
    function(1)
    assert [args for args, _ in calls] == [(1,), (2,), (3,)]


def test_a_recursive_function_is_fast():
    @remembered(1000)
    def ways(steps, *, most=2):
        return 1 if steps == 0 else sum(ways(steps - step, most=most) for step in range(1, most + 1) if step <= steps)

    assert ways(80) == 37889062373143906
