from datetime import UTC, date, datetime

import pytest

from daily_totals import Sale, busiest_hour, totals


def test_sales_of_a_day_are_summed_up():
    sales = [Sale(datetime(2026, 3, 1, hour, tzinfo=UTC), 100) for hour in (9, 10)]
    assert totals(sales, UTC) == {date(2026, 3, 1): 200}


def test_the_busiest_hour_is_that_in_which_most_was_sold():
    sales = [Sale(datetime(2026, 3, 1, 9, tzinfo=UTC), 100), Sale(datetime(2026, 3, 1, 17, tzinfo=UTC), 300)]
    assert busiest_hour(sales, UTC) == 17


def test_a_time_without_a_zone_is_refused():
    with pytest.raises(ValueError, match="no zone"):
        totals([Sale(datetime(2026, 3, 1, 9), 100)], UTC)
