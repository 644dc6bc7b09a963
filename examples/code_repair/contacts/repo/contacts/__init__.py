"""Address books."""

from contacts.book import read, write

__all__ = ["read", "write"]
