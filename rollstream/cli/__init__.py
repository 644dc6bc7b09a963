"""The command line. It starts workers as processes, reads the log and the published store, and imports no worker."""

import logging
import sys

from rollstream.errors import BrokerUnavailable, RollstreamError, StoreUnavailable, UsageError

EXIT_CODES: tuple[tuple[type[RollstreamError], int], ...] = (
    (BrokerUnavailable, 3),
    (StoreUnavailable, 4),
    (UsageError, 2),
    (RollstreamError, 1),
)
"""The first that fits, counts."""


def main() -> None:
    """Run the command in `sys.argv`: a named failure is one line on stderr and an exit code, only a bug has a traceback."""
    from rollstream.cli.main import root

    # Libraries log what they also raise; a command says it once, in its own words.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        root().main(prog_name="rollstream")
    except RollstreamError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))
