"""A list, page by page. Pages are counted from 1, as people do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Page:
    """One page of a list."""

    number: int
    items: Sequence[Any]
    first: int
    """Position of its first item in the whole list, from 1; 0 if the page is empty."""
    last: int
    has_next: bool


class Paginator:
    """Cuts a list into pages of `size` items; the last one may be shorter."""

    def __init__(self, items: Sequence[Any], size: int) -> None:
        if size < 1:
            raise ValueError(f"a page holds at least one item, not {size}")
        self._items = items
        self._size = size

    @property
    def pages(self) -> int:
        """How many pages there are. An empty list has one, which is empty."""
        return len(self._items) // self._size + 1

    def page(self, number: int) -> Page:
        """One page by its number.

        Raises:
            LookupError: there is no such page.
        """
        if not 1 <= number <= self.pages:
            raise LookupError(f"there are {self.pages} pages, and no page {number}")
        start = (number - 1) * self._size
        items = self._items[start : start + self._size]
        return Page(number, items, start + 1, start + self._size, number < self.pages)

    def __iter__(self) -> Iterator[Page]:
        return (self.page(number) for number in range(1, self.pages + 1))
