"""A shopping cart. Prices are in cents."""

from dataclasses import dataclass


@dataclass
class Line:
    """Some pieces of one article."""

    article: str
    cents: int
    pieces: int = 1


class Cart:
    """What somebody is about to buy."""

    def __init__(self, owner: str, lines: list[Line] = [], coupons: dict[str, int] = {}) -> None:
        self.owner = owner
        self._lines = lines
        self._coupons = coupons

    def add(self, article: str, cents: int, pieces: int = 1) -> None:
        """Put something in; more of an article that is there already joins its line."""
        for line in self._lines:
            if line.article == article:
                line.pieces += pieces
                return
        self._lines.append(Line(article, cents, pieces))

    def redeem(self, code: str, cents: int) -> None:
        """Take something off, once for every code."""
        self._coupons[code] = cents

    def saved(self) -> "Cart":
        """A copy to come back to, whatever happens to this one."""
        return Cart(self.owner, list(self._lines), self._coupons)

    @property
    def lines(self) -> list[Line]:
        return self._lines

    @property
    def total(self) -> int:
        """To pay; never less than nothing."""
        return max(0, sum(line.cents * line.pieces for line in self._lines) - sum(self._coupons.values()))
