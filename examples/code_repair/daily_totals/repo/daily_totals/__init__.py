"""Sales by day."""

from daily_totals.totals import Sale, busiest_hour, totals

__all__ = ["Sale", "busiest_hour", "totals"]
