"""A test whose time is over says what all of its tasks wait for."""

import subprocess
import sys
from pathlib import Path

HANGS = """
import asyncio
import pytest

async def numbers():
    await asyncio.Event().wait()
    yield 1

async def in_a_task():
    async for _ in numbers():
        pass

@pytest.mark.timeout(1)
async def test_hangs():
    waits = asyncio.create_task(in_a_task())
    await waits
"""


def test_the_report_has_the_stack_of_each_task_down_to_what_it_waits_for(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    test = tmp_path / "test_hangs.py"
    test.write_text(HANGS)
    words = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml"), "--rootdir", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(test)], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 1, ran.stdout
    told = ran.stdout[ran.stdout.index("Tasks that were waiting") :]
    places = [line.rsplit(" ", 1)[1] for line in told.splitlines() if f"{test}:" in line and line.startswith("    ")]
    assert sorted(places) == ["in_a_task", "numbers", "test_hangs"]
    assert "Event.wait" in told
