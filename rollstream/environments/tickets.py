"""What travels sealed through the agent side: tickets, with what environment code needs of a task, and receipts, with a world.

Short ones travel in the event; longer ones are kept as blobs, sealed as well, and the event names them.
"""

import orjson

from rollstream.blobs import BlobReference, BlobStore
from rollstream.environments.receipts import Receipt
from rollstream.sealing import Sealer, TicketRefused
from rollstream.settings import Settings
from schemas.values import JsonObject


class Tickets:
    """Seals and opens for one installation."""

    def __init__(self, sealer: Sealer, blobs: BlobStore, inline_limit_bytes: int) -> None:
        self._sealer = sealer
        self._blobs = blobs
        self._inline_limit_bytes = inline_limit_bytes

    @classmethod
    def of(cls, settings: Settings, sealer: Sealer) -> "Tickets":
        return cls(sealer, BlobStore.of(settings), settings.blobs.inline_limit_bytes)

    async def seal_task(self, row: JsonObject, session: str) -> str:
        """A ticket for one session of the task in `row`.

        Raises:
            BlobUnavailable: it is long, and could not be kept.
        """
        return await self._by_reference(self._sealer.seal(orjson.dumps({"row": row}), session))

    async def open_task(self, ticket: str, session: str) -> JsonObject:
        """The row inside a ticket.

        Raises:
            TicketRefused: the ticket was not sealed for this session here.
            BlobUnavailable: it is kept as a blob that cannot be read.
        """
        row: JsonObject = orjson.loads(self._sealer.unseal(await self._whole(ticket), session))["row"]
        return row

    async def seal_receipt(self, receipt: Receipt) -> str:
        """A receipt as it travels.

        Raises:
            BlobUnavailable: it is long, and could not be kept.
        """
        return await self._by_reference(self._sealer.seal(receipt.to_json(), receipt.session, "receipt"))

    async def open_receipt(self, receipt: str, session: str) -> Receipt:
        """What a receipt tells.

        Raises:
            TicketRefused: the receipt was not sealed for this session here.
            BlobUnavailable: it is kept as a blob that cannot be read.
        """
        found = Receipt.model_validate_json(self._sealer.unseal(await self._whole(receipt), session, "receipt"))
        if found.session != session:
            raise TicketRefused(f"expected a receipt of session {session}, found one of another session")
        return found

    async def _by_reference(self, sealed: str) -> str:
        if len(sealed) <= self._inline_limit_bytes:
            return sealed
        return str(await self._blobs.put(sealed.encode()))

    async def _whole(self, sealed: str) -> str:
        reference = BlobReference.parse(sealed)
        return sealed if reference is None else (await self._blobs.get(reference)).decode("utf-8", "replace")
