import pytest

from pagination import Paginator


def test_the_first_page_begins_at_the_beginning():
    page = Paginator(list(range(5)), 2).page(1)
    assert page.items == [0, 1]
    assert (page.first, page.last) == (1, 2)


def test_a_short_last_page_has_what_is_left():
    assert Paginator(list(range(5)), 2).page(3).items == [4]


def test_there_is_no_page_zero():
    with pytest.raises(LookupError):
        Paginator([1], 1).page(0)
