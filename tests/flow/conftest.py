"""Environments that exist for a test only."""

from collections.abc import Callable, Iterator

import pytest

from rollstream.environments import registry
from tests.environments import load_anew
from tests.flow.operations import LateEnvironment


@pytest.fixture
def late() -> Iterator[Callable[[], None]]:
    def install() -> None:
        registry.ENVIRONMENTS["late"] = LateEnvironment
        load_anew()

    LateEnvironment.bugs = 0
    yield install
    registry.ENVIRONMENTS.pop("late", None)
    load_anew()
