"""TRL takes the exports as they are: its own checks pass, and its trainers take a step on them.

It comes with several gigabytes of PyTorch, so `make trl` installs it, and nothing else does.
"""

import json
import math
from pathlib import Path

import pytest

from tests.loaders.packages import folder, run
from tests.loaders.scene import export, store

# A busy machine takes minutes to install or to import what is loaded here.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def packages() -> Path:
    if not (found := folder("trl")).is_dir():
        pytest.skip("TRL is not installed: make trl")
    return found


@pytest.mark.trl
@pytest.mark.parametrize("tools", [False, True], ids=["chat", "tools"])
@pytest.mark.parametrize("format", ["sft", "dpo"])
def test_a_trainer_takes_a_step(packages: Path, tmp_path: Path, format: str, tools: bool) -> None:
    data_dir = store(tmp_path / "store", tools=tools)
    out = export(data_dir, tmp_path / "out", format, "parquet", splits="train=1")  # type: ignore[arg-type]
    told = json.loads(run(packages, "train.py", format, str(out), scratch=tmp_path).splitlines()[-1])
    assert (told["rows"], told["steps"], told["moved"]) == (24, 1, True)
    assert math.isfinite(told["loss"])
    assert told["loss"] > 0
    said = json.dumps(told["texts"])
    assert "answer 0.0" in said
    assert ("search" in said) == tools
