"""Exports load in `datasets`, of this year and of the last: rows and columns as they were written."""

import json
from pathlib import Path

import pytest

from rollstream.store.exports.request import FileFormat, Format
from tests.exporting import rows
from tests.loaders.packages import install, run
from tests.loaders.scene import TASKS, export, store

# A busy machine takes minutes to install or to import what is loaded here.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", params=["datasets-current", "datasets-3.6"])
def packages(request: pytest.FixtureRequest) -> Path:
    return install(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "tools"])
def data_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("store"), tools=request.param)


FORMATS: tuple[Format, ...] = ("sft", "dpo", "grpo")
FILE_FORMATS: tuple[FileFormat, ...] = ("parquet", "jsonl")


@pytest.mark.slow
def test_exports_load_as_they_were_written(packages: Path, data_dir: Path, tmp_path: Path) -> None:
    folders = {
        export(data_dir, tmp_path / format / file_format, format, file_format): format
        for format in FORMATS
        for file_format in FILE_FORMATS
    }
    # One process for all: to import the library takes longer than to load them.
    loaded = json.loads(run(packages, "load.py", *map(str, folders), scratch=tmp_path).splitlines()[-1])
    assert loaded["version"].startswith("3.6." if "3.6" in packages.name else "5.")
    for folder, format in folders.items():
        found = loaded["rows"][str(folder)]
        assert set(found) == {"train", "test"}, folder
        assert found == {split: rows(folder, split) for split in ("train", "test")}, folder
        assert sum(map(len, found.values())) == TASKS * {"sft": 1, "dpo": 1, "grpo": 3}[format]


@pytest.mark.slow
def test_trajectories_load_too(packages: Path, tmp_path: Path) -> None:
    data_dir = store(tmp_path / "store", tools=False)
    folder = export(data_dir, tmp_path / "out", "atif", "jsonl", splits="train=1")
    loaded = json.loads(run(packages, "load.py", str(folder), scratch=tmp_path).splitlines()[-1])
    assert [row["steps"][1]["message"] for row in loaded["rows"][str(folder)]["train"]] == [
        f"answer {number}.{index}" for number in range(TASKS) for index in range(2)
    ]
