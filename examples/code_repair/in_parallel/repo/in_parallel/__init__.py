"""`map` with threads."""

from in_parallel.pool import in_parallel

__all__ = ["in_parallel"]
