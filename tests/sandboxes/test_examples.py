"""The projects with bugs that come with rollstream: each is mended by its patch, and by nothing less."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.slow]
TASKS = Path(__file__).parents[2] / "examples/code_repair/tasks.jsonl"


@pytest.mark.parametrize("sandbox", ["bubblewrap", "docker"])
def test_every_bug_is_mended_by_its_patch_and_not_by_doing_nothing(
    sandbox: str, bubblewrap: None, sandbox_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSTREAM_SANDBOXES__IMAGE", sandbox_image)
    command = [sys.executable, "-m", "rollstream.cli", "env", "check", str(TASKS), "--sandbox", sandbox, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 6
    assert {(one["finding"], one["oracle"], one["noop"]) for one in found} == {("good", 1.0, 0.0)}
