"""Trees of files as tar streams, in and out of boxes.

What comes out was written by an agent. Directories and files are made first, in a directory of our own, and links last:
nothing is ever written through a link, and a link that could lead out of the tree is not made at all.
"""

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from rollstream.sandboxes.protocol import Downloaded, DownloadTooLarge

CHUNK = 256 * 1024


def pack(source: Path, name: str, out: IO[bytes]) -> None:
    """Write `source`, a file or a tree, into a tar under `name`, as uid 1000's. Links stay links; sockets are left out."""

    def of_agent(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 1000
        entry.uname = entry.gname = ""
        return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None

    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(source, arcname=name, filter=of_agent)


def pack_text(name: str, content: bytes, mode: int, out: IO[bytes]) -> None:
    """Write one file into a tar."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.uid, entry.gid = len(content), mode, 1000, 1000
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(entry, io.BytesIO(content))


def leads_out(link: PurePosixPath, target: str) -> bool:
    """Whether a link may lead out of its tree.

    `link` is a path below the tree's root, through real directories only. A `..` after a name is never trusted: the name
    may be another link.
    """
    parts = PurePosixPath(target).parts
    if not target or target.startswith("/"):
        return True
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return ups >= len(link.parts) or ".." in parts[ups:]


def unpack(archive: IO[bytes], into: Path, *, max_bytes: int, max_files: int) -> Downloaded:
    """Write what a tar holds below `into`; its one top-level entry becomes `into` itself.

    Raises:
        FileNotFoundError: it holds nothing.
        DownloadTooLarge: more bytes or entries than allowed.
        tarfile.TarError: it is no tar.
    """
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        return _Unpacking(into, max_bytes, max_files).run(tar)


@dataclass
class _Unpacking:
    into: Path
    max_bytes: int
    max_files: int
    files: int = 0
    size: int = 0
    links: list[tuple[PurePosixPath, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    modes: list[tuple[Path, int]] = field(default_factory=list)

    def run(self, tar: tarfile.TarFile) -> Downloaded:
        entries = 0
        for entry in tar:
            entries += 1
            if entries > self.max_files:
                raise DownloadTooLarge(f"expected at most {self.max_files} files, found more")
            self._one(tar, entry)
        if not entries:
            raise FileNotFoundError("nothing was packed")
        for link, target in self.links:
            self._link(link, target)
        for directory, mode in reversed(self.modes):
            directory.chmod(mode)
        return Downloaded(self.files, self.size, tuple(self.left_out))

    def _one(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        path = _below(entry.name)
        if path is None or not self._make_parents(path):
            self.left_out.append(entry.name)
        elif entry.isdir():
            self._directory(self.into / path, entry)
        elif entry.isreg() and not entry.issparse():
            self._file(tar, entry, self.into / path)
        elif entry.issym():
            self.links.append((path, entry.linkname))
        elif entry.islnk() and (target := _below(entry.linkname)) is not None:
            # A second name of a file that is here already; a copy, so that its size counts.
            self._copy(self.into / target, self.into / path, entry.linkname)
        else:
            self.left_out.append(entry.name)

    def _make_parents(self, path: PurePosixPath) -> bool:
        """Make the directories above a path: all of them ours, so none of them is a link. False if a file is in the way."""
        try:
            if path.parts:
                (self.into / path).parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return True

    def _directory(self, path: Path, entry: tarfile.TarInfo) -> None:
        try:
            path.mkdir(exist_ok=True)
        except OSError:
            self.left_out.append(entry.name)
        else:
            self.modes.append((path, entry.mode & 0o777 | 0o700))

    def _file(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
        content = tar.extractfile(entry)
        assert content is not None, "a regular file"
        self._write(content, path, entry.mode, entry.name)

    def _copy(self, source: Path, path: Path, name: str) -> None:
        try:
            with source.open("rb") as content:
                self._write(content, path, source.stat().st_mode, name)
        except OSError:
            self.left_out.append(name)

    def _write(self, content: IO[bytes], path: Path, mode: int, name: str) -> None:
        try:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode & 0o777 | 0o600)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            self.left_out.append(name)
            return
        with open(target, "wb") as out:
            while chunk := content.read(CHUNK):
                self.size += len(chunk)
                if self.size > self.max_bytes:
                    raise DownloadTooLarge(f"expected at most {self.max_bytes} bytes, found more")
                out.write(chunk)
        self.files += 1

    def _link(self, link: PurePosixPath, target: str) -> None:
        if not link.parts or leads_out(link, target):
            self.left_out.append(str(link))
            return
        try:
            (self.into / link).symlink_to(target)
        except OSError:
            self.left_out.append(str(link))


def _below(name: str) -> PurePosixPath | None:
    """Where an entry stands below the top-level entry; None if it stands nowhere."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0].startswith("/") or ".." in parts:
        return None
    return PurePosixPath(*parts[1:])


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The rest of a file, in pieces."""
    while chunk := file.read(CHUNK):
        yield chunk
