"""Settings files."""

from settings_file.parser import Malformed, parse

__all__ = ["Malformed", "parse"]
