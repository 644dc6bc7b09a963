"""What is taken out of an agent's box: the difference from the base its work began with, and the files that it was to leave.

What cannot be taken out is said in the submission, and never ends an episode.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath

from rollstream.blobs import BlobReference, BlobStore
from rollstream.sandboxes.harvest import Base, HarvestFailed, difference
from rollstream.sandboxes.protocol import DownloadTooLarge, Sandbox
from schemas.session import Submission, Workspace

MAX_BASE_BYTES = 2 * 1024**3
MAX_ARTIFACT_BYTES = 64 * 1024 * 1024
MAX_FILE_BYTES = 16 * 1024 * 1024
ARTIFACT = "artifact"


class Harvest:
    """Takes out what a workspace declares, and puts what is long into blobs."""

    def __init__(self, box: Sandbox, blobs: BlobStore, inline_limit: int) -> None:
        self._box = box
        self._blobs = blobs
        self._inline_limit = inline_limit
        self._left_out: dict[str, str] = {}

    async def take(self, workspace: Workspace, base: Base | None, submission: Submission) -> Submission:
        """A submission with what stands in the box. Everything of the agent's is to be dead.

        Raises:
            SandboxUnavailable: the box is gone.
            BlobUnavailable: what is long cannot be kept.
        """
        artifact = submission.artifact if base is None else await self._artifact(base)
        files = {**submission.files, **await self._files(workspace.files)}
        left_out = {**submission.left_out, **self._left_out}
        return submission.model_copy(update={"artifact": artifact, "files": files, "left_out": left_out})

    async def _artifact(self, base: Base) -> str | None:
        try:
            found = await difference(self._box, base, MAX_ARTIFACT_BYTES, over=True)
        except (DownloadTooLarge, HarvestFailed) as error:
            self._left_out[ARTIFACT] = str(error)
            return None
        if found.said:
            self._left_out[ARTIFACT] = f"not all of it could be read: {found.said}"
        return await self._kept(found.patch)

    async def _files(self, paths: Sequence[str]) -> dict[str, str]:
        files: dict[str, str] = {}
        for path in paths:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                self._left_out[path] = "it is not below the work directory"
                continue
            try:
                files[path] = await self._kept(await self._box.read(path, max_bytes=MAX_FILE_BYTES), text=True)
            except FileNotFoundError:
                self._left_out[path] = "there is no such file"
            except DownloadTooLarge:
                self._left_out[path] = f"longer than {MAX_FILE_BYTES} bytes"
            except OSError as error:
                self._left_out[path] = str(error)[:300]
        return files

    async def _kept(self, content: bytes, *, text: bool = False) -> str:
        """Content as it stands in an event: itself, or the reference of a blob.

        A patch whose bytes are no text goes by reference, too: changed bytes would not apply. So does what only looks like a
        reference: an agent could otherwise hand in a blob that it never had.
        """
        try:
            shown = content.decode(errors="backslashreplace" if text else "strict")
        except UnicodeDecodeError:
            return str(await self._blobs.put(content))
        if len(content) > self._inline_limit or BlobReference.parse(shown) is not None:
            return str(await self._blobs.put(shown.encode() if text else content))
        return shown
