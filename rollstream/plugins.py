"""Environments and harnesses of a user's own: found by entry point, or as `path.py:Class`.

A path is code that will run, so it comes from this process's own settings or command line and nowhere else. A record on the log
gives names only, and a name that was not declared here is refused.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollstream.errors import Refused, RollstreamError, Stage, UsageError

P = TypeVar("P")

ENVIRONMENT_ENTRY_POINTS = "rollstream.environments"
ENVIRONMENT_ATTRIBUTES = ("name", "version", "task_type", "public_fields", "success_threshold", "seed", "reference", "verify")
"""What a class must have to be an environment."""
HARNESS_ENTRY_POINTS = "rollstream.harnesses"
HARNESS_ATTRIBUTES = ("name", "version", "capabilities", "open")
"""What a class must have to be a harness."""


def is_path(text: str) -> bool:
    """Whether an option means a class in a file rather than a name."""
    return ".py:" in text or text.endswith(".py") or "/" in text


def absolute(location: str) -> str:
    """`path.py:Class` with the path made absolute, so that processes with another working directory find it.

    Raises:
        UsageError: it has another form.
    """
    path, colon, name = location.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise UsageError(f"expected path.py:Class, found {location!r:.200}")
    return f"{Path(path).expanduser().absolute()}:{name}"


def load_class(location: str, required: Sequence[str]) -> type[Any]:
    """The class at `path.py:Class`.

    The file's folder joins the import path, at its end: the file may import its neighbours, and graders find it in their own
    process.

    Args:
        required: attributes that it must have.

    Raises:
        UsageError: in one sentence, why it cannot be had.
    """
    path_text, _, name = absolute(location).rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise UsageError(f"expected a Python file at {path}, found none")
    module = _imported(path)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == path.stem]
        raise UsageError(f"expected a class {name} in {path}, found {', '.join(one.__name__ for one in own) or 'no class'}")
    require(found, required, location)
    return found


def require(found: object, required: Sequence[str], where: str) -> None:
    """Make sure that a plug-in has what its protocol asks for.

    Raises:
        UsageError: something is missing.
    """
    missing = [name for name in required if not hasattr(found, name)]
    if missing:
        raise UsageError(f"expected {where} to have {', '.join(required)}; it lacks {', '.join(missing)}")


def _imported(path: Path) -> Any:
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    if spec is None or spec.origin is None or not os.path.exists(spec.origin) or not os.path.samefile(spec.origin, path):
        taken = f"that name is taken by {spec.origin}" if spec else "its name is no module's name"
        raise UsageError(f"{path} cannot be imported: {taken}; rename the file")
    try:
        return importlib.import_module(path.stem)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


class Plugins(Generic[P]):
    """What can be loaded by name here: what is shipped, what this process declares, what is installed.

    Args:
        what: for sentences, one and many, e.g. `environment` and `environments`.
        group: of entry points.
        required: what every class must have.
        stage: of an episode, at which somebody misses what cannot be loaded.
    """

    def __init__(
        self,
        what: tuple[str, str],
        group: str,
        shipped: Mapping[str, Callable[[], P]],
        required: Sequence[str],
        stage: Stage = "admission",
    ) -> None:
        self._what, self._many = what
        self._group = group
        self._shipped = shipped
        self._required = tuple(required)
        self._stage = stage
        self._declared: dict[str, Callable[[], P]] = {}
        self._origins: dict[str, object] = {}
        self._loaded: dict[str, tuple[object, P]] = {}
        """Each with what it was made by, where that is shipped."""

    def declare(self, locations: Mapping[str, str], others: Mapping[str, tuple[object, Callable[[], P]]] = {}) -> None:
        """Say where names that are not shipped come from; what was declared before is forgotten.

        Args:
            locations: name -> `path.py:Class`.
            others: name -> what it is made from (to tell whether it has changed), and how.

        Raises:
            UsageError: a name is a shipped one's, or is declared in two ways.
        """
        for name in [*locations, *others]:
            if name in self._shipped or (name in locations and name in others):
                other = f"rollstream ships one called {name}" if name in self._shipped else f"{name} is declared in two ways"
                raise UsageError(f"{self._what} {name} needs another name: {other}")
        origins: dict[str, object] = {**locations, **{name: origin for name, (origin, _) in others.items()}}
        for name in {*origins, *self._origins}:
            if origins.get(name) != self._origins.get(name):
                self._loaded.pop(name, None)
        self._declared = {name: partial(self._of_path, location) for name, location in locations.items()}
        self._declared |= {name: make for name, (_, make) in others.items()}
        self._origins = origins

    def names(self) -> list[str]:
        """Every name that can be loaded here."""
        return sorted({*self._shipped, *self._declared, *(point.name for point in entry_points(group=self._group))})

    def origin(self, name: str) -> str:
        """Where a name comes from, for people."""
        if name in self._shipped:
            return "shipped"
        if name in self._declared:
            return str(self._origins[name])
        return next((point.value for point in entry_points(group=self._group, name=name)), "unknown")

    def load(self, name: str) -> P:
        """One instance a process, because instances are stateless.

        Raises:
            Refused: nobody provides it, or what provides it is broken. The sentence lists the names there are.
        """
        maker = self._shipped.get(name)
        found = self._loaded.get(name)
        if found is None or found[0] is not maker:
            found = self._loaded[name] = (maker, self._made(name))
        return found[1]

    def _made(self, name: str) -> P:
        if name in self._shipped:
            return self._shipped[name]()
        if name in self._declared:
            return self._checked(name, self._declared[name], str(self._origins[name]))
        for point in entry_points(group=self._group, name=name):
            return self._checked(name, lambda: point.load()(), point.value)  # noqa: B023
        known = self.names()
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        message = f"expected one of the {self._many} {', '.join(known)}, found {name[:100]!r}{hint}"
        raise Refused(message, stage=self._stage, kind=f"unknown_{self._what}")

    def _of_path(self, location: str) -> P:
        made: P = load_class(location, self._required)()
        return made

    def _checked(self, name: str, make: Callable[[], P], where: str) -> P:
        kind = f"{self._what}_broken"
        try:
            made = make()
            require(made, self._required, where)
        except Exception as error:
            told = str(error) if isinstance(error, RollstreamError) else f"{type(error).__name__}: {error}"
            message = f"{self._what} {name} cannot be loaded from {where}: {told}"
            raise Refused(message, stage=self._stage, kind=kind) from error
        own: object = getattr(made, "name", None)
        if own != name:
            message = f"expected {self._what} {name} at {where}, found one called {own}"
            raise Refused(message, stage=self._stage, kind=kind)
        return made


def named_by_path(location: str, required: Sequence[str]) -> tuple[str, str]:
    """Name and absolute location of a class that the command line gives as `path.py:Class`.

    Raises:
        UsageError: it cannot be had, or has no name.
    """
    found = load_class(location, required)
    name = found.name if hasattr(found, "name") else None
    if not isinstance(name, str) or not name:
        raise UsageError(f"expected a class attribute `name` as text at {location}, found {name!r}")
    return name, absolute(location)
