from datetime import UTC, date, datetime, timedelta, timezone

import pytest

from daily_totals import Sale, busiest_hour, totals

TOKYO = timezone(timedelta(hours=9))
LIMA = timezone(timedelta(hours=-5))


def test_a_day_begins_and_ends_where_the_shop_is():
    sales = [Sale(datetime(2026, 3, 1, 14, 59, tzinfo=UTC), 1), Sale(datetime(2026, 3, 1, 15, 0, tzinfo=UTC), 10)]
    assert totals(sales, TOKYO) == {date(2026, 3, 1): 1, date(2026, 3, 2): 10}


def test_tills_in_other_zones_are_converted():
    moment = datetime(2026, 3, 1, 23, 30, tzinfo=LIMA)
    assert totals([Sale(moment, 5), Sale(moment.astimezone(TOKYO), 5)], LIMA) == {date(2026, 3, 1): 10}


def test_hours_are_those_of_the_clock_in_the_shop():
    sales = [Sale(datetime(2026, 3, 1, 1, tzinfo=UTC), 300), Sale(datetime(2026, 3, 1, 12, tzinfo=TOKYO), 200)]
    assert busiest_hour(sales, TOKYO) == 10


def test_of_two_hours_the_earlier_counts_whatever_comes_first():
    sales = [Sale(datetime(2026, 3, 1, 12, tzinfo=UTC), 5), Sale(datetime(2026, 3, 1, 8, tzinfo=UTC), 5)]
    assert busiest_hour(sales, UTC) == 8


def test_hours_need_a_zone_too():
    with pytest.raises(ValueError, match="no zone"):
        busiest_hour([Sale(datetime(2026, 3, 1, 9), 100)], UTC)
