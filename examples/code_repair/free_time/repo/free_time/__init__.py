"""Gaps in a calendar."""

from free_time.intervals import free, merged

__all__ = ["free", "merged"]
