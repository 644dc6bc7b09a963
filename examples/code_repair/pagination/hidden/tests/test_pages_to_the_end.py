import pytest

from pagination import Paginator


@pytest.mark.parametrize(("count", "pages"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_pages_are_as_many_as_it_takes(count, pages):
    assert Paginator(list(range(count)), 2).pages == pages


def test_no_page_but_that_of_an_empty_list_is_empty():
    assert [list(page.items) for page in Paginator("abcd", 2)] == [["a", "b"], ["c", "d"]]
    assert [list(page.items) for page in Paginator("", 2)] == [[]]


def test_the_last_page_says_where_the_list_ends():
    page = Paginator(list(range(5)), 2).page(3)
    assert (page.first, page.last, page.has_next) == (5, 5, False)


def test_a_full_last_page_is_the_last():
    assert not Paginator(list(range(4)), 2).page(2).has_next


def test_an_empty_page_has_no_first_item():
    page = Paginator([], 2).page(1)
    assert (page.first, page.last) == (0, 0)
