"""Remembering results."""

from remembered.cache import remembered

__all__ = ["remembered"]
