"""Which files an agent cannot change to its advantage: what it did to them is undone before tests run. Pure.

Tests grade, so their runner, its configuration and they themselves are not the agent's to write. What stands in the top
directory under the name of a module of Python's own would be imported instead of it.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

TESTS = ("conftest.py", "test_*.py", "*_test.py", "tests", "test", "pytest.ini", ".pytest.ini", "tox.ini")
"""What grades where a task does not say so itself."""
RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "nose", "tox", "coverage", "sitecustomize", "usercustomize"})


def protected(paths: Iterable[str], patterns: Sequence[str], tops: Collection[str]) -> tuple[str, ...]:
    """Of the paths of a patch, those whose change is undone.

    A path counts with and without its first directory: tools that apply patches take it off, whatever it is called.

    Args:
        patterns: of the names of files, or of directories that they are in.
        tops: what the base has in its top directory; what stands there already shadows nothing new.
    """
    both = dict.fromkeys(way for path in paths for way in (path, path.partition("/")[2]) if way)
    return tuple(path for path in both if is_protected(path, patterns, tops))


def is_protected(path: str, patterns: Sequence[str], tops: Collection[str]) -> bool:
    parts = PurePosixPath(path).parts
    return shadows(path, tops) or any(fnmatchcase(part, pattern) for part in parts for pattern in patterns)


def shadows(path: str, tops: Collection[str]) -> bool:
    """Whether a file would be imported in the place of a module of Python's own, or of a test runner's."""
    first = path.partition("/")[0]
    imported = "/" in path or first.endswith((".py", ".pyc", ".so"))
    name = first.partition(".")[0]
    return imported and first not in tops and (name in sys.stdlib_module_names or name in RUNNERS)
