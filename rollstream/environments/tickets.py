"""What is inside a sealed ticket: everything environment code needs to score a task, and nothing else."""

import orjson

from rollstream.sealing import Sealer
from schemas.values import JsonObject


def seal_task(sealer: Sealer, row: JsonObject, session: str) -> str:
    """A ticket for one session of the task in `row`."""
    return sealer.seal(orjson.dumps({"row": row}), session)


def open_ticket(sealer: Sealer, ticket: str, session: str) -> JsonObject:
    """The row inside a ticket.

    Raises:
        TicketRefused: the ticket was not sealed for this session here.
    """
    row: JsonObject = orjson.loads(sealer.unseal(ticket, session))["row"]
    return row
