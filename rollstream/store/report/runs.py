"""Which run is meant, and what its manifest promised."""

from difflib import get_close_matches

import duckdb

from rollstream.errors import UsageError
from rollstream.store.reader import query
from schemas.events import UndecodableEvent, decode
from schemas.run import RunPublished

RECENT = 5
"""How many runs are offered when one is not found."""


def resolve_run(connection: duckdb.DuckDBPyConnection, run: str | None) -> str:
    """`run` if the store knows it; without one, the latest.

    Raises:
        UsageError: it does not, and the sentence names others, or it knows none.
    """
    rows = query(connection, "SELECT run_id FROM runs ORDER BY coalesce(published_at, submitted_at) DESC NULLS LAST, run_id")
    runs: list[str] = [row["run_id"] for row in rows]
    if not runs:
        raise UsageError("the published store has no run yet: publish one with `rollstream publish` or `rollstream run`")
    if run is None:
        return runs[0]
    if run in runs:
        return run
    close = get_close_matches(run, runs, n=RECENT)
    others = f"close to it: {', '.join(close)}" if close else f"the latest: {', '.join(runs[:RECENT])}"
    raise UsageError(f"no run {run!r} in the published store; {others}")


def ended_attempts(connection: duckdb.DuckDBPyConnection, run: str) -> int:
    """How many attempts of a run have ended; 0 for a run that the store does not know."""
    rows = query(connection, "SELECT ended FROM runs WHERE run_id = $run", run=run)
    return int(rows[0]["ended"]) if rows else 0


def read_manifest(connection: duckdb.DuckDBPyConnection, run: str) -> RunPublished | None:
    """What was announced of a run; None for tasks that came without a manifest, or one that this version cannot read."""
    rows = query(
        connection,
        "SELECT whole_payload('RunPublished', event_id, payload) AS payload FROM run_published "
        "WHERE run_id = $run ORDER BY kafka_partition, kafka_offset LIMIT 1",
        run=run,
    )
    if not rows:
        return None
    try:
        return decode(rows[0]["payload"].encode(), RunPublished)
    except UndecodableEvent:
        return None
