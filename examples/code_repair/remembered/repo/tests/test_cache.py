from remembered import remembered


def test_a_function_is_called_once():
    calls = []

    @remembered()
    def double(number):
        calls.append(number)
        return number * 2

    assert (double(4), double(4), double(5)) == (8, 8, 10)
    assert calls == [4, 5]


def test_what_was_forgotten_is_computed_again():
    calls = []

    @remembered()
    def double(number):
        calls.append(number)
        return number * 2

    double(4)
    double.forget()
    double(4)
    assert calls == [4, 4]
