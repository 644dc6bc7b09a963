"""Pages of a list."""

from pagination.pages import Page, Paginator

__all__ = ["Page", "Paginator"]
