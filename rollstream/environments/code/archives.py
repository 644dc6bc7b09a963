"""A repository of this machine as one tar file: the history of one commit, and nothing that came after it.

The tar holds a `.git` directory alone, made anew: branches, tags, remotes, reflogs and later commits of the source are not in
it, and `git reset --hard` makes the files. The same source gives the same bytes, because ids and hashes are made of them.
"""

import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollstream.errors import Refused

MAX_ARCHIVE_BYTES = 64 * 1024 * 1024
GIT_TIMEOUT_S = 300.0
BRANCH = "main"
CONFIG = """[core]
	repositoryformatversion = 0
	filemode = true
	bare = false
	logallrefupdates = true
[user]
	name = agent
	email = agent@sandbox.invalid
"""
LEFT_BEHIND = (
    "__pycache__/", "*.py[co]", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", ".tox/", ".venv/", "venv/",
    "node_modules/", ".DS_Store",
)  # fmt: skip
"""What running tests and looking at a folder leave there: no part of a project, and no part of what an agent hands in."""
_WHEN = "2000-01-01T00:00:00Z"
_WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "rollstream"), ("EMAIL", "rollstream@sandbox.invalid"), ("DATE", _WHEN))
}


@dataclass(frozen=True, slots=True)
class Archive:
    """A repository, packed."""

    content: bytes
    base: str
    """The commit whose history it holds."""


def archive_of(path: Path, base: str | None = None, *, shown: str = "", max_bytes: int = MAX_ARCHIVE_BYTES) -> Archive:
    """Pack a folder, a git repository, or a tar file of either.

    A folder without a `.git` of its own becomes one commit; what its `.gitignore` names is left out.

    Args:
        base: a revision of the repository; by default what is checked out, which then must have no changes.
        shown: the path as its author wrote it.

    Raises:
        Refused: there is no such thing, it has no such revision, or it is too big.
    """
    shown, path = shown or str(path), path.absolute()
    try:
        with tempfile.TemporaryDirectory(prefix="rollstream-archive-") as scratch:
            root = _unpacked(path, Path(scratch), shown) if path.is_file() else path
            if not root.is_dir():
                raise Refused(f"expected a folder or a tar file at {shown}, found {'neither' if root.exists() else 'nothing'}")
            source = _Source(root, shown) if _is_repository(root) else _committed(root, Path(scratch), base, shown)
            commit = source.commit(base)
            content = _packed(source, commit, Path(scratch), max_bytes)
    except FileNotFoundError as error:
        raise Refused(f"{shown} cannot be packed: it takes {error.filename}, which is not installed here") from None
    except (_GitFailed, subprocess.TimeoutExpired, OSError) as error:
        raise Refused(f"{shown} cannot be packed: {error}") from None
    return Archive(content, commit)


def tar_of(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    """A tar of path -> content and mode: sorted, without times, as uid 1000's."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, (content, mode) in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.uid, entry.gid = len(content), mode, 1000, 1000
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


class _GitFailed(Exception):
    """The message is what git said."""


class _Source:
    """A git repository that something is taken from."""

    def __init__(self, root: Path, shown: str, git_dir: Path | None = None) -> None:
        self.root = root
        self.shown = shown
        self._options = ["--git-dir", str(git_dir), "--work-tree", str(root)] if git_dir else []

    def git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        return _git(self.root, *self._options, *arguments, stdin=stdin)

    def commit(self, base: str | None) -> str:
        """The commit that a revision means; without one, what is checked out.

        Raises:
            Refused: there is no such revision, or files differ from what is checked out.
        """
        try:
            found = self.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{base or 'HEAD'}^{{commit}}")
        except _GitFailed:
            what = f"no revision {base[:100]!r}" if base else "no commit"
            raise Refused(f"expected a revision of the repository {self.shown} as its base, found {what}") from None
        # A bare repository has no files that could have changed.
        bare = self.git("rev-parse", "--is-bare-repository").strip() == b"true"
        if base is None and not bare and self.git("status", "--porcelain", "--untracked-files=no").strip():
            raise Refused(f"{self.shown} has changes that are not committed: commit them, or name a `base`")
        return found.decode().strip()

    def shallow(self) -> bytes | None:
        """Where the history of a shallow clone ends."""
        path = self.root / os.fsdecode(self.git("rev-parse", "--git-path", "shallow").strip())
        return path.read_bytes() if path.is_file() else None


def _git(cwd: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """One call of git that no configuration but the repository's own has a say in."""
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LC_ALL": "C", **_WHO}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    options = ["-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "core.fsmonitor=false"]
    done = subprocess.run(
        ["git", *options, *arguments], cwd=cwd, input=stdin, env=env, capture_output=True, timeout=GIT_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _GitFailed(said[-1] if said else f"git {arguments[0]} ended with {done.returncode}")
    return done.stdout


def _is_repository(root: Path) -> bool:
    return (root / ".git").exists() or ((root / "HEAD").is_file() and (root / "objects").is_dir())


def _committed(root: Path, scratch: Path, base: str | None, shown: str) -> _Source:
    """A folder without a repository as one commit of a repository elsewhere."""
    if base is not None:
        raise Refused(f"expected a git repository at {shown}, since a base is named ({base[:100]}), found a folder without one")
    made = scratch / "made"
    _git(scratch, "init", "--quiet", "--template=", f"--initial-branch={BRANCH}", str(made))
    exclude = made / ".git/info/exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("".join(f"{pattern}\n" for pattern in LEFT_BEHIND))
    source = _Source(root, shown, made / ".git")
    source.git("-c", "core.fileMode=true", "add", "--all")
    if not source.git("ls-files"):
        raise Refused(f"expected files in the folder {shown}, found none")
    source.git("commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message=The project as it stands")
    return source


def _packed(source: _Source, commit: str, scratch: Path, max_bytes: int) -> bytes:
    """A `.git` directory that holds a commit and its history."""
    # Nothing that depends on how the source happens to be packed, or on the number of cores.
    steady = ["--threads=1", "--no-reuse-delta", "--no-reuse-object", "--no-use-bitmap-index"]
    packs = scratch / "packs"
    packs.mkdir()
    source.git("pack-objects", "--revs", "-q", *steady, str(packs / "pack"), stdin=f"{commit}\n".encode())
    size = sum(path.stat().st_size for path in packs.iterdir())
    if size > max_bytes:
        raise Refused(
            f"expected a repository of at most {max_bytes} bytes at {source.shown}, found {size} with the history of "
            f"{commit[:12]}: name a folder without history, or an image that holds it"
        )
    files = {
        "HEAD": f"ref: refs/heads/{BRANCH}\n".encode(),
        f"refs/heads/{BRANCH}": f"{commit}\n".encode(),
        "config": CONFIG.encode(),
        "info/exclude": "".join(f"{pattern}\n" for pattern in LEFT_BEHIND).encode(),
    }
    if (shallow := source.shallow()) is not None:
        files["shallow"] = shallow
    for path in packs.iterdir():
        if path.suffix in (".pack", ".idx"):
            files[f"objects/pack/{path.name}"] = path.read_bytes()
    return tar_of({f".git/{name}": (content, 0o644) for name, content in files.items()})


def _unpacked(path: Path, scratch: Path, shown: str) -> Path:
    """The folder that a tar file holds: its only one, or all of it."""
    into = scratch / "unpacked"
    into.mkdir()
    # GNU tar and BSD's know every compression, and follow no path or link out of where they are.
    done = subprocess.run(["tar", "-xf", str(path), "-C", str(into)], capture_output=True, timeout=GIT_TIMEOUT_S, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Refused(f"expected a folder or a tar file at {shown}, found a file that tar cannot read: {' '.join(said[:1])}")
    inside = list(into.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() and inside[0].name != ".git" else into
