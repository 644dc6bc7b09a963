"""Environments that only tests know."""

from rollstream.environments import registry


def load_anew() -> None:
    """Forget what is loaded, as a process that starts has nothing loaded."""
    registry._PLUGINS._loaded.clear()
