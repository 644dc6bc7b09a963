"""Packs a Docker image out of Debian packages that are installed on this machine, for tests that have no registry.

The packages' dependency closure, the files named in the recipe, and what the packages' install scripts would have made:
streamed into `docker import` in a fixed order, so the same machine packs the same layer again.

    python deploy/hostpack.py my-base bash python3 git
"""

import argparse
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

BASE_PACKAGES = ("base-files", "bash", "coreutils", "dash", "findutils", "grep", "procps", "sed", "tar", "util-linux")
NOT_PACKED = frozenset({"debconf", "dpkg", "init-system-helpers", "install-info", "media-types", "perl", "systemd", "tzdata"})
"""Dependencies of install scripts and services, which nothing in a container runs."""

DOCUMENTATION = re.compile(
    r"^/usr/share/(bash-completion|bug|doc|doc-base|info|lintian|locale|man|zsh)/|/systemd/|/__pycache__(/|$)"
)
MERGED = ("bin", "lib", "lib64", "sbin")
"""Top-level directories that are links into `/usr`."""

DIRECTORIES = {
    "etc": 0o755,
    "home/user": 0o755,
    "root": 0o700,
    "run": 0o755,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
    "workspace": 0o755,
}
OWNED_BY_USER = frozenset({"home/user", "workspace"})
MOUNT_POINTS = ("dev", "proc", "sys")
TEXTS = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    "/etc/group": "root:x:0:\nuser:x:1000:\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


class PackagesMissing(Exception):
    """Packages of a recipe are not installed; the message says what to run."""


@dataclass(frozen=True)
class Recipe:
    """What an image consists of. A uid 1000 named `user` and a `/workspace` of its own are always there."""

    packages: Sequence[str]
    """Beyond `BASE_PACKAGES`."""
    copies: Mapping[Path, str] = field(default_factory=dict)
    """File or directory of this machine -> absolute path in the image."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Absolute path in the image -> content; executable when it starts with `#!`."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Absolute path in the image -> what it points to; for example what `update-alternatives` would have made."""
    owned: Sequence[str] = ()
    """Absolute directories in the image that belong to `user`."""
    instructions: Sequence[str] = ()
    """Dockerfile instructions: `CMD`, `ENV`, `LABEL`, `USER`, `VOLUME`, `WORKDIR`."""


def pack(tag: str, recipe: Recipe) -> None:
    """Pack the image and give it `tag`.

    Raises:
        PackagesMissing: some of its packages are not installed here.
        OSError, subprocess.CalledProcessError: Docker refused.
    """
    files = installed_files(closure([*BASE_PACKAGES, *recipe.packages], installed_packages()))
    options = [text for instruction in recipe.instructions for text in ("--change", instruction)]
    command = ["docker", "import", "--change", "ENV PATH=/usr/local/bin:/usr/bin LANG=C.UTF-8", *options, "-", tag]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as docker:
        assert docker.stdin is not None
        with tarfile.open(fileobj=docker.stdin, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            _Layer(tar).fill(files, recipe)
        docker.stdin.close()
    if docker.returncode != 0:
        raise subprocess.CalledProcessError(docker.returncode, command)


@dataclass(frozen=True)
class Package:
    """An installed Debian package."""

    name: str
    provides: frozenset[str]
    depends: tuple[tuple[str, ...], ...]
    """Alternatives of each dependency, without versions."""


def installed_packages() -> list[Package]:
    """What dpkg has installed; nothing on a machine without dpkg."""
    query = "${db:Status-Status}\t${Package}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    try:
        listed = subprocess.run(["dpkg-query", "-W", "-f", query], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        return []
    rows = [line.split("\t") for line in listed.splitlines()]
    return [
        Package(name, frozenset(_names(provides)), tuple(tuple(_names(term, "|")) for term in depends.split(",")))
        for status, name, provides, depends in rows
        if status == "installed"
    ]


def _names(text: str, separator: str = ",") -> Iterator[str]:
    """Package names without versions and architectures."""
    for term in text.split(separator):
        if words := term.split():
            yield words[0].partition(":")[0]


def closure(seeds: Iterable[str], installed: Sequence[Package]) -> list[str]:
    """The seeds and all that they depend on, sorted; the first installed alternative counts.

    Raises:
        PackagesMissing: a seed is not installed.
    """
    found = {name: package for package in reversed(installed) for name in package.provides}
    found |= {package.name: package for package in installed}
    todo = list(seeds)
    if missing := sorted(seed for seed in todo if seed not in found):
        raise PackagesMissing(f"packages are not installed here: apt-get install -y {' '.join(missing)}")
    needed: set[str] = set()
    while todo:
        package = found[todo.pop()]
        if package.name in needed or package.name in NOT_PACKED:
            continue
        needed.add(package.name)
        todo += [present[0] for term in package.depends if (present := [name for name in term if name in found])]
    return sorted(needed)


def installed_files(packages: Sequence[str]) -> list[Path]:
    """Files and directories of packages, sorted, without documentation and systemd units."""
    listed = subprocess.run(["dpkg-query", "-L", *packages], capture_output=True, text=True, check=True).stdout
    paths = {line for line in listed.splitlines() if line.startswith("/") and line != "/." and not DOCUMENTATION.search(line)}
    return [Path(path) for path in sorted(paths) if os.path.lexists(path)]


class _Layer:
    """One tar stream: every path once, parents before children, everything root's and without times."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._written: set[str] = set()

    def fill(self, files: Sequence[Path], recipe: Recipe) -> None:
        for name in MERGED:
            self.directory(f"usr/{name}")
            self.link(name, f"usr/{name}")
        for name, mode in DIRECTORIES.items():
            self.directory(name, mode, uid=1000 if name in OWNED_BY_USER else 0)
        for name in MOUNT_POINTS:
            self.directory(name, 0o555)
        for path in recipe.owned:
            self.directory(path, uid=1000)
        for path, text in (TEXTS | dict(recipe.texts)).items():
            self.text(path, text)
        for path, target in recipe.links.items():
            self.link(path, target)
        for source, destination in recipe.copies.items():
            for found in [source, *sorted(source.rglob("*"))]:
                if not DOCUMENTATION.search(str(found)):
                    self.copy(found, str(PurePosixPath(destination) / found.relative_to(source)))
        for found in files:
            self.copy(found, str(found))

    def directory(self, path: str, mode: int = 0o755, uid: int = 0) -> None:
        if entry := self._entry(path, mode):
            entry.type, entry.uid, entry.gid = tarfile.DIRTYPE, uid, uid
            self._tar.addfile(entry)

    def link(self, path: str, target: str) -> None:
        if entry := self._entry(path):
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            self._tar.addfile(entry)

    def text(self, path: str, text: str) -> None:
        if entry := self._entry(path, 0o755 if text.startswith("#!") else 0o644):
            content = text.encode()
            entry.size = len(content)
            self._tar.addfile(entry, io.BytesIO(content))

    def copy(self, source: Path, path: str) -> None:
        """Everybody may read what is packed. Sockets and devices are left out."""
        if source.is_symlink():
            self.link(path, os.readlink(source))
        elif source.is_dir():
            self.directory(path, source.stat().st_mode & 0o7777 | 0o555)
        elif source.is_file() and (entry := self._entry(path, source.stat().st_mode & 0o7777 | 0o444)):
            entry.size = source.stat().st_size
            with source.open("rb") as content:
                self._tar.addfile(entry, content)

    def _entry(self, path: str, mode: int = 0o755) -> tarfile.TarInfo | None:
        """A new entry of the tar, or None if the path was written before."""
        parts = PurePosixPath(path.lstrip("/")).parts
        if parts[0] in MERGED and len(parts) > 1:
            parts = ("usr", *parts)
        name = "/".join(parts)
        if name in self._written:
            return None
        if len(parts) > 1:
            self.directory("/".join(parts[:-1]))
        self._written.add(name)
        entry = tarfile.TarInfo(name)
        entry.mode = mode
        return entry


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pack installed Debian packages into a Docker image.")
    parser.add_argument("tag")
    parser.add_argument("packages", nargs="*")
    arguments = parser.parse_args()
    pack(arguments.tag, Recipe(arguments.packages))
