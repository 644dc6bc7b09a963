"""What two or more of the workers need: settings, sealing, models, environments, the event log, the store, the CLI."""

from importlib.metadata import version

__version__ = version("rollstream")
