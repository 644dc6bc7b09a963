"""Environments that verify in boxes pass the suite that plug-ins inherit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.environments.code.code_repair import CodeRepairEnvironment
from rollstream.environments.protocol import Environment, Graders, Services
from rollstream.sandboxes.bubblewrap import BubblewrapProvider
from rollstream.testing.boxes import OwnBoxes
from rollstream.testing.environments import EnvironmentConformance
from tests.sandboxes.repairing import Verifying


class TestCodeRepair(EnvironmentConformance):
    @pytest.fixture(autouse=True)
    def _bench(self, bubblewrap: None, tmp_path: Path) -> None:
        self._verifying = Verifying(BubblewrapProvider("verification"), tmp_path)

    def environment(self) -> Environment[Any]:
        return CodeRepairEnvironment()

    def rows(self) -> Sequence[Mapping[str, object]]:
        other = {"tests": {"tests/test_half.py": "from lib import half\ndef test_half(): assert half(3) == 1.5\n"}}
        return [
            self._verifying.row(),
            self._verifying.row(**other, instruction="half does not halve", fail_to_pass=["tests/test_half.py::test_half"]),
        ]

    def services(self, graders: Graders) -> Services:
        # A provider for every event loop.
        boxes = OwnBoxes(BubblewrapProvider("verification"), "test")
        return Services(graders, sandboxes=boxes, blobs=self._verifying.blobs)
