"""Environments by name, and the door every row passes.

Shipped ones stand in a literal dict; third-party ones come through the entry point group `rollstream.environments`.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from rollstream.environments.math import MathEnvironment
from rollstream.environments.multiple_choice import MultipleChoiceEnvironment
from rollstream.environments.protocol import Environment, Task
from rollstream.errors import Refused
from schemas.events import describe
from schemas.values import JsonObject

ENTRY_POINTS = "rollstream.environments"
ALWAYS_PUBLIC = frozenset({"messages", "tools"})

ENVIRONMENTS: dict[str, type[Environment[Any]]] = {
    "math": MathEnvironment,
    "multiple_choice": MultipleChoiceEnvironment,
}


def names() -> list[str]:
    """Every environment that can be loaded here, shipped and installed."""
    return sorted({*ENVIRONMENTS, *(point.name for point in entry_points(group=ENTRY_POINTS))})


@cache
def load(name: str) -> Environment[Any]:
    """The environment called `name`; one instance a process, because instances are stateless.

    Raises:
        Refused: nobody provides it, or what provides it cannot be imported. The sentence lists the names there are.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]()
    for point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            environment: Environment[Any] = point.load()()
        except Exception as error:
            message = f"environment {name} cannot be loaded from {point.value}: {type(error).__name__}: {error}"
            raise Refused(message, kind="environment_broken") from error
        if environment.name != name:
            message = f"expected an environment called {name} at {point.value}, found one called {environment.name}"
            raise Refused(message, kind="environment_broken")
        return environment
    known = names()
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    message = f"expected one of the environments {', '.join(known)}, found {name[:100]!r}{hint}"
    raise Refused(message, kind="unknown_environment")


def admit(environment: Environment[Any], row: Mapping[str, object]) -> Task:
    """Validate a row against the environment's own schema.

    Raises:
        Refused: with the first field that does not fit.
    """
    try:
        task: Task = environment.task_type.model_validate(row)
    except ValidationError as error:
        message = f"expected a task of environment {environment.name}, found {describe(error)}"
        raise Refused(message, stage="admission", kind="invalid_task") from None
    return task


def public_view(environment: Environment[Any], row: Mapping[str, object]) -> JsonObject:
    """The fields of a row that the agent side may see; everything else grades."""
    public = environment.public_fields | ALWAYS_PUBLIC
    return {name: value for name, value in row.items() if name in public}
