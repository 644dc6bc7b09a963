"""How the files of a box differ from the git tree that they began as, whatever has become of the repository there.

Whoever works in the box may commit, reset, delete `.git`, or put hooks, filters and drivers into its configuration. So nothing
of that repository is used: the tree is packed and kept out of the box first, and every look unpacks it into one of our own.
"""

import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO

from rollstream.errors import EnvironmentFailure
from rollstream.sandboxes.protocol import DownloadTooLarge, ExecResult, Sandbox, Stream
from rollstream.sandboxes.transfer import chunks

GIT_TIMEOUT_S = 300.0
SPOOLED = 8 * 1024 * 1024
ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_LITERAL_PATHSPECS": "1",
}
"""For git: no configuration but what the script below says, whatever stands in the user's home."""

ANY_OWNER = """
set -e
GIT_CONFIG_GLOBAL=$(mktemp)
export GIT_CONFIG_GLOBAL
printf '[safe]\\n\\tdirectory = *\\n' > "$GIT_CONFIG_GLOBAL"
trap 'rm -f "$GIT_CONFIG_GLOBAL"' EXIT
"""
"""Shell: use the repository of the work directory, whoever owns it."""
TREE = ANY_OWNER + 'git rev-parse --verify "$1^{tree}"'
PACK = ANY_OWNER + 'echo "$1" | git pack-objects --revs --stdout -q'

DIFFER = r"""
set -u
umask 077
work=$(pwd)
over=$2
case "$work/" in
"$HOME"/*) ;;
*)
    # What was left there is wanted by nobody, and may fill the disk.
    if [ "$over" ]; then
        chmod -R u+rwX "$HOME" 2>/dev/null
        find "$HOME" -mindepth 1 -maxdepth 1 -exec rm -rf {} + 2>/dev/null
    fi
    ;;
esac
for place in "$HOME" /tmp; do
    own=$(mktemp -d "$place/.differ.XXXXXX" 2>/dev/null) && break
done
git init -q --bare "$own/git" || exit 90
trap 'rm -rf "$own"' EXIT
export GIT_DIR="$own/git" GIT_INDEX_FILE="$own/index" GIT_WORK_TREE="$work" TMPDIR="$own"
git index-pack --stdin >/dev/null && mkdir -p "$GIT_DIR/info" || exit 90
echo '* !filter !diff !merge !ident !working-tree-encoding' > "$GIT_DIR/info/attributes"
ours() {
    git -c core.bare=false -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.attributesFile=/dev/null \
        -c core.excludesFile=/dev/null -c core.autocrlf=false -c core.safecrlf=false -c core.bigFileThreshold=32m \
        -c core.untrackedCache=false -c core.quotePath=false -c gc.auto=0 -c submodule.recurse=false "$@"
}
added() {
    ours add -A --ignore-errors . 2> "$own/said"
}
ours read-tree "$1" || exit 91
if [ "$over" ]; then
    find . -mindepth 2 -name .git -prune 2>/dev/null | while IFS= read -r nested; do
        ours ls-files -s -- "${nested%/.git}" 2>/dev/null | grep -q '^160000' || rm -rf "$nested"
    done
    added || chmod -R u+rwX . 2>/dev/null
fi
added || tail -n 1 "$own/said" >&2
ours ls-files -s | sed -n 's/^160000 [0-9a-f]* 0\t//p' | while IFS= read -r nested; do
    ours ls-tree "$1" -- "$nested" | grep -q . || ours update-index --force-remove -- "$nested"
done
ours diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --full-index \
    --src-prefix=a/ --dst-prefix=b/ "$1" -- || exit 92
exit 0
"""
"""Shell: read the pack, and print how the work directory differs from its tree, by nothing that could have been set there.

While somebody works there, nothing is changed, and repositories that were made inside are left out. When nobody does any more
(`$2`), their files are taken in, what may not be read is made readable, and the home directory makes room."""


@dataclass(slots=True)
class Base:
    """The tree that the files of a box began as.

    Attributes:
        tree: its id.
        pack: its git objects, as a pack.
    """

    tree: str
    pack: IO[bytes]

    def close(self) -> None:
        self.pack.close()


@dataclass(frozen=True, slots=True)
class Difference:
    """How the files of a box differ from their base; `said` is what git could not read, in its words."""

    patch: bytes
    said: str = ""


class HarvestFailed(Exception):
    """What stands in a box could not be compared with its base; the box is to blame, or whoever worked in it."""


async def keep_base(box: Sandbox, revision: str, max_bytes: int) -> Base:
    """Pack the tree of a revision of the repository in the work directory, before anybody works there. The caller closes it.

    Raises:
        EnvironmentFailure: there is no such revision, it is longer, or there is no git.
        SandboxUnavailable: the provider failed.
    """
    found = await box.exec(["sh", "-c", TREE, "sh", revision], timeout_s=GIT_TIMEOUT_S, max_output_bytes=4096)
    if not found.ok:
        raise _no_base(revision, found)
    tree = found.stdout.text.split()[-1]
    pack = tempfile.SpooledTemporaryFile(max_size=SPOOLED)  # noqa: SIM115 (whoever gets the base closes it)
    size = 0

    async def keep(stream: Stream, chunk: bytes) -> None:
        nonlocal size
        if stream == "stdout":
            size += len(chunk)
            if size > max_bytes:
                raise EnvironmentFailure(
                    f"expected the tree of {revision} in at most {max_bytes} bytes, found more",
                    stage="agent",
                    kind="workspace_failed",
                )
            pack.write(chunk)

    argv = ["sh", "-c", PACK, "sh", tree]
    try:
        packed = await box.exec(argv, timeout_s=GIT_TIMEOUT_S, max_output_bytes=4096, on_output=keep)
        if not packed.ok or not size:
            raise _no_base(revision, packed)
    except BaseException:
        pack.close()
        raise
    return Base(tree, pack)


async def difference(box: Sandbox, base: Base, max_bytes: int, *, over: bool = False) -> Difference:
    """How the work directory differs from a base.

    Args:
        over: nobody works in the box any more, so it may be changed where that lets more be read.

    Raises:
        DownloadTooLarge: the patch is longer than `max_bytes`.
        HarvestFailed: git could not make it: the disk is full, or it took too long.
        SandboxUnavailable: the provider failed.
    """
    patch = bytearray()

    async def keep(stream: Stream, chunk: bytes) -> None:
        if stream == "stdout":
            patch.extend(chunk)
            if len(patch) > max_bytes:
                raise DownloadTooLarge(f"longer than {max_bytes} bytes")

    argv = ["sh", "-c", DIFFER, "sh", base.tree, "over" if over else ""]
    done = await box.exec(
        argv, env=ENV, stdin=_pieces(base.pack), timeout_s=GIT_TIMEOUT_S, max_output_bytes=4096, on_output=keep
    )
    if not done.ok:
        said = f"no end of it within {GIT_TIMEOUT_S:g} s" if done.timed_out else last_line(done)
        raise HarvestFailed(f"git failed (exit code {done.exit_code}): {said}")
    return Difference(bytes(patch), last_line(done))


def last_line(done: ExecResult) -> str:
    """What a command said last, of what went wrong."""
    lines = done.stderr.text.strip().splitlines()
    return lines[-1][:300] if lines else ""


def _no_base(revision: str, found: ExecResult) -> EnvironmentFailure:
    said = last_line(found) or f"exit code {found.exit_code}"
    return EnvironmentFailure(
        f"expected the revision {revision} in the box's work directory, found: {said}", stage="agent", kind="workspace_failed"
    )


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    file.seek(0)
    for chunk in chunks(file):
        yield chunk
