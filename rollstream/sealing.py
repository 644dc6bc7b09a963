"""Sealed tickets and receipts: what travels through the agent side and cannot be read or moved there.

    rs1.<key id>.<base64url(nonce || ciphertext || tag)>

AES-256-GCM over zstd-compressed JSON; the session id is bound in as associated data, so a ticket moved to another session
does not open, and so is what it is for, so that no ticket passes for a receipt. The key id lets keys be rotated: the first key
seals, every known key opens.
"""

import hashlib
import os
from base64 import b64decode, b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rollstream.errors import Refused, UsageError
from rollstream.settings import Settings

FORMAT = "rs1"
Purpose = Literal["ticket", "receipt"]
KEY_BYTES = 32
NONCE_BYTES = 12
MAX_TICKET_BYTES = 64 * 1024 * 1024
"""Of unsealed JSON; a bound on what a forged size can make us allocate."""


class TicketRefused(Refused):
    """A ticket does not open here: forged, altered, moved to another session, or sealed with a key we do not have."""

    def __init__(self, message: str) -> None:
        super().__init__(message, stage="verification", kind="ticket_refused")


class Sealer:
    """Seals with the first key, opens with any. Thread-safe."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if len(key) != KEY_BYTES:
                raise UsageError(f"sealing key: expected {KEY_BYTES} bytes, found {len(key)}")
        self._keys = {key_id(key): AESGCM(key) for key in keys}
        self._current = key_id(keys[0])

    def seal(self, content: bytes, session: str, purpose: Purpose = "ticket") -> str:
        """Seal JSON bytes for one session."""
        nonce = os.urandom(NONCE_BYTES)
        compressed = zstandard.ZstdCompressor(level=1).compress(content)
        sealed = self._keys[self._current].encrypt(nonce, compressed, self._bound_to(session, purpose))
        return f"{FORMAT}.{self._current}.{urlsafe_b64encode(nonce + sealed).decode()}"

    def unseal(self, ticket: str, session: str, purpose: Purpose = "ticket") -> bytes:
        """Open a ticket or a receipt that was sealed for `session`.

        Raises:
            TicketRefused: it was not sealed here, was altered, or belongs to another session.
        """
        try:
            form, used, body = ticket.split(".")
            raw = urlsafe_b64decode(body)
            # One ticket has one spelling: base64 decoders skip what they do not know.
            if len(raw) < NONCE_BYTES or urlsafe_b64encode(raw).decode() != body:
                raise ValueError
        except ValueError:
            raise TicketRefused(f"expected a {purpose} {FORMAT}.KEY.BODY, found {ticket[:20]!r}") from None
        if form != FORMAT or used not in self._keys:
            raise TicketRefused(
                f"{purpose} of format {form[:20]!r} sealed with key {used[:20]!r}: this installation opens {FORMAT} with "
                f"{', '.join(self._keys)} (give every worker the same ROLLSTREAM_SEALING_KEY)"
            )
        try:
            compressed = self._keys[used].decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], self._bound_to(session, purpose))
        except InvalidTag:
            raise TicketRefused(f"{purpose} does not belong to session {session}, or was altered") from None
        return zstandard.ZstdDecompressor().decompress(compressed, max_output_size=MAX_TICKET_BYTES)

    @staticmethod
    def _bound_to(session: str, purpose: Purpose) -> bytes:
        return f"{FORMAT}:{purpose}:{session}".encode()


def key_id(key: bytes) -> str:
    """Public name of a key: 8 hex digits of its SHA-256."""
    return hashlib.sha256(key).hexdigest()[:8]


def load_sealer(settings: Settings) -> Sealer:
    """The installation's sealer: keys from the settings (comma-separated base64), else from the data directory.

    Raises:
        UsageError: a key is not base64 of 32 bytes.
    """
    if settings.sealing_key is not None:
        return Sealer([_decoded(text, "ROLLSTREAM_SEALING_KEY") for text in settings.sealing_key.get_secret_value().split(",")])
    return Sealer([ensure_key_file(settings.data_dir)])


def ensure_key_file(data_dir: Path) -> bytes:
    """The key in `data_dir/keys/sealing.key`, made at first use; readable by its owner only. Safe to call concurrently."""
    path = data_dir / "keys" / "sealing.key"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        fresh = path.with_name(f".sealing.{os.getpid()}.{os.urandom(4).hex()}")
        fresh.touch(mode=0o600)
        fresh.write_text(b64encode(os.urandom(KEY_BYTES)).decode() + "\n")
        try:
            # Linking fails when another process was first, and never shows a half-written key.
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return _decoded(path.read_text(), str(path))


def _decoded(text: str, where: str) -> bytes:
    try:
        key = b64decode(text.strip(), validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"sealing key in {where}: expected base64 of {KEY_BYTES} bytes "
            '(python -c "import os,base64;print(base64.b64encode(os.urandom(32)).decode())")'
        )
    return key
