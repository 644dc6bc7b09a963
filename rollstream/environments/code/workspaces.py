"""What an agent's box holds before the agent comes, as shell commands of a `Workspace`.

An archive is made without a future (`archives`). An image may hold one: later commits on branches, tags and remotes, in
reflogs, and in packs that nothing refers to. An agent that finds the fix there has repaired nothing.
"""

from collections.abc import Sequence

from rollstream.environments.code.archives import LEFT_BEHIND
from schemas.session import Workspace

TO_BASE = """set -eu
cd "$(git rev-parse --show-toplevel)"
base=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "the repository in $PWD has no revision $1" >&2; exit 1; }
if [ "$(git rev-parse --verify --quiet HEAD^ || :)" = "$base" ] && [ "$(git log -1 --format=%s)" = SWE-bench ]; then
    base=$(git rev-parse HEAD)
fi
git -c advice.detachedHead=false checkout --quiet --force --detach "$base"
if [ -n "$(git status --porcelain)" ]; then
    git add --all
    git -c user.name=rollstream -c user.email=rollstream@sandbox.invalid commit --quiet --no-verify --no-gpg-sign \\
        --message="What the image has beside it"
fi
mkdir -p "$(git rev-parse --git-path info)"
shift
printf '%s\\n' "$@" >> "$(git rev-parse --git-path info/exclude)"
"""
"""Put a repository to its base. Images of SWE-bench have one commit of their own upon it, with what their set-up changed.
What lies there untracked becomes part of the base: it is nothing that an agent did, and stands where patches are verified."""
WITHOUT_FUTURE = """set -eu
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
git remote | while read -r name; do git config --remove-section "remote.$name" || :; done
dir=$(git rev-parse --git-common-dir)
rm -rf "$dir/logs" "$dir/worktrees" "$dir/packed-refs" "$dir"/*_HEAD "$dir/objects/info/commit-graph" \\
    "$dir/objects/info/commit-graphs" "$dir"/objects/pack/*.keep
git -c core.logAllRefUpdates=false checkout --quiet -b main
git repack -a -d -q
rm -f "$dir/objects/info/alternates"
git prune --expire=now
"""
"""Leave one branch, `main`, and of all objects those of its history."""


def of_archive(archive: str, base: str, setup: Sequence[str] = ()) -> Workspace:
    """A repository that `archives` has packed."""
    return Workspace(archive=archive, commands=[["git", "reset", "--hard", "--quiet", base], *map(_shell, setup)], base=base)


def of_image(base: str, setup: Sequence[str] = (), *, hide: bool = True) -> Workspace:
    """A repository that stands in an image's work directory.

    Args:
        hide: what came after the base, from an agent. Nobody looks for it where patches are verified.
    """
    commands = [["sh", "-c", TO_BASE, "sh", base, *LEFT_BEHIND]]
    if hide:
        commands.append(_shell(WITHOUT_FUTURE))
    return Workspace(commands=[*commands, *map(_shell, setup)], base="HEAD")


def _shell(command: str) -> list[str]:
    return ["sh", "-c", command]
