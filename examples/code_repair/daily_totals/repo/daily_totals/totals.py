"""Sales of a shop by the days of its own clock. Tills say the time in whatever zone they like."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, tzinfo


@dataclass(frozen=True)
class Sale:
    """Something was sold; `at` knows its zone."""

    at: datetime
    cents: int


def totals(sales: Iterable[Sale], zone: tzinfo) -> dict[date, int]:
    """Cents for each day of the clock in `zone`, in order.

    Raises:
        ValueError: a sale does not say in which zone its time is.
    """
    found: Counter[date] = Counter()
    for sale in sales:
        if sale.at.tzinfo is None:
            raise ValueError(f"the sale at {sale.at} has no zone")
        found[sale.at.date()] += sale.cents
    return dict(sorted(found.items()))


def busiest_hour(sales: Iterable[Sale], zone: tzinfo) -> int:
    """The hour, 0 to 23 by the clock in `zone`, in which most was sold; the earliest of several."""
    found: Counter[int] = Counter()
    for sale in sales:
        found[sale.at.replace(tzinfo=zone).hour] += sale.cents
    return max(found, key=lambda hour: found[hour])
