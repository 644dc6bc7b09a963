"""What is too long for a record: kept once, under the hash of its content, and named in events by reference.

    blob.<sha256, 64 hex digits>.<bytes>

A blob is written before the event that names it, so whoever reads the event finds it; what is read is checked against its name.
Any fsspec URL can hold blobs; workers on several hosts need one that they all reach.
"""

import asyncio
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from fsspec.core import url_to_fs

from rollstream.errors import BoundaryFailure, UsageError
from rollstream.settings import Settings

_REFERENCE = re.compile(r"blob\.([0-9a-f]{64})\.([0-9]{1,12})")


class BlobUnavailable(BoundaryFailure):
    """A blob cannot be read or written here, or is not what its name says."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message, stage="agent", kind="blob_unavailable", retryable=retryable)


@dataclass(frozen=True, slots=True)
class BlobReference:
    """The name of a blob, as it stands in events."""

    sha256: str
    size_bytes: int

    def __str__(self) -> str:
        return f"blob.{self.sha256}.{self.size_bytes}"

    @classmethod
    def of(cls, content: bytes) -> "BlobReference":
        """The name of some content, whether it is kept or not."""
        return cls(hashlib.sha256(content).hexdigest(), len(content))

    @classmethod
    def parse(cls, text: str) -> "BlobReference | None":
        """The reference that a text is, or None when it is something else."""
        found = _REFERENCE.fullmatch(text) if text.startswith("blob.") else None
        return None if found is None else cls(found[1], int(found[2]))


class BlobStore:
    """Blobs under one URL. Thread-safe; content that is there already is not written again."""

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"expected blobs.url as a directory or an fsspec URL such as s3://bucket/blobs, found {error}"
            ) from None
        self._root = root.rstrip("/")
        self._url = url

    @classmethod
    def of(cls, settings: Settings) -> "BlobStore":
        """The installation's blobs.

        Raises:
            UsageError: nothing here understands `blobs.url`.
        """
        return cls(settings.blobs.url or (settings.data_dir / "blobs").absolute().as_uri())

    async def put(self, content: bytes) -> BlobReference:
        """Keep some content; durable when this returns.

        Raises:
            BlobUnavailable: it could not be written.
        """
        return await asyncio.to_thread(self.keep, content)

    def keep(self, content: bytes) -> BlobReference:
        """As `put`, for whoever has no event loop."""
        reference = BlobReference.of(content)
        try:
            self._write(self._path(reference), content)
        except Exception as error:
            # Each file system has exceptions of its own.
            raise BlobUnavailable(
                f"blob of {len(content)} bytes cannot be written to {self._url}: {error}", retryable=True
            ) from error
        return reference

    async def get(self, reference: BlobReference) -> bytes:
        """Content by its name.

        Raises:
            BlobUnavailable: it is not there (any more, or from here), or it is not what was put.
        """
        try:
            content: bytes = await asyncio.to_thread(self._fs.cat_file, self._path(reference))
        except Exception as error:
            remedy = "give every worker the same blobs.url"
            raise BlobUnavailable(
                f"{reference} cannot be read from {self._url} ({error!r:.200}); {remedy}", retryable=True
            ) from error
        found = BlobReference.of(content)
        if found != reference:
            raise BlobUnavailable(f"expected {reference} in {self._url}, found content that is {found}", retryable=False)
        return content

    def _path(self, reference: BlobReference) -> str:
        return f"{self._root}/{reference.sha256[:2]}/{reference.sha256}"

    def _write(self, path: str, content: bytes) -> None:
        if self._fs.exists(path):
            return
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        if "file" in protocols:
            _write_file(Path(path), content)
        else:
            # Object stores show an object only when it is whole.
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, content)


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with fresh.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
