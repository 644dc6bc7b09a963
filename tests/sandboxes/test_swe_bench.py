"""Instances in SWE-bench's format, with a repository and an image of our own: from row to verdict in real containers."""

import io
import json
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import docker
import pytest

from rollstream.environments import registry
from rollstream.environments.code.swe_bench import SweBenchEnvironment
from rollstream.environments.code.verification import prepare
from rollstream.environments.protocol import Verdict
from rollstream.errors import EnvironmentFailure, Refused
from rollstream.sandboxes import registry as sandboxes
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.settings import SandboxSettings, SweBenchSettings
from rollstream.testing.boxes import sh
from tests.sandboxes.repairing import Verifying, diff

pytestmark = pytest.mark.docker
FILES = {
    "shapes/__init__.py": "",
    "shapes/area.py": "def square(side):\n    return side * 4\n\n\ndef rectangle(a, b):\n    return a * b\n",
    "tests/test_area.py": "from shapes.area import rectangle\n\n\ndef test_rectangle():\n    assert rectangle(2, 3) == 6\n",
}
FIXED = FILES["shapes/area.py"].replace("side * 4", "side * side")
TESTS = (
    FILES["tests/test_area.py"].replace("import rectangle", "import rectangle, square")
    + "\n\ndef test_square():\n    assert square(3) == 9\n"
)
SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
git -c core.fileMode=false diff {base}
python3 -m pip install -e .
git checkout {base} tests/test_area.py
git apply -v - <<'EOF_114329324912'
{patch}
EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA tests/test_area.py
: '>>>>> End Test Output'
git checkout {base} tests/test_area.py
"""


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t.invalid")
    return subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


class Instance:
    """A row, and the commit that an agent must not find."""

    def __init__(self, row: dict[str, Any], future: str) -> None:
        self.row = row
        self.future = future


@pytest.fixture(scope="module")
def instance(sandbox_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """A repository with the fix on a later commit, in an image where SWE-bench's images have it."""
    scratch = tmp_path_factory.mktemp("instance")
    root = scratch / "testbed"
    root.mkdir()
    git(root, "init", "-q")
    for path, content in FILES.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(content)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "square and rectangle")
    base = git(root, "rev-parse", "HEAD")
    (root / "shapes/area.py").write_text(FIXED)
    git(root, "commit", "-qam", "mend square")
    future = git(root, "rev-parse", "HEAD")
    git(root, "tag", "v2")
    git(root, "reset", "-q", "--hard", base)
    git(root, "commit", "-q", "--allow-empty", "-m", "SWE-bench")
    tag = f"rollstream-test-swe/{uuid4().hex[:8]}_1776_shapes-1:latest"
    _image(sandbox_image, root, tag)
    test_patch = diff(FILES, {**FILES, "tests/test_area.py": TESTS}, scratch)
    row = {
        "instance_id": f"{tag.split('/')[1].split('_')[0].upper()}__shapes-1",
        "repo": "us/shapes",
        "base_commit": base,
        "patch": diff(FILES, {**FILES, "shapes/area.py": FIXED}, scratch),
        "test_patch": test_patch,
        "problem_statement": "The area of a square is wrong.",
        "hints_text": "side * side",
        "created_at": "2026-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(["tests/test_area.py::test_square"]),
        "PASS_TO_PASS": json.dumps(["tests/test_area.py::test_rectangle"]),
        "environment_setup_commit": base,
    }
    yield Instance(row, future)
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, check=False)


def _image(base: str, root: Path, tag: str) -> None:
    client = docker.from_env()
    container = client.containers.create(base, ["true"])
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.add(root, "testbed")
        # What SWE-bench's own commands call: `pytest`, and not `python3 -m pytest`.
        program = b'#!/bin/sh\nexec python3 -m pytest "$@"\n'
        entry = tarfile.TarInfo("usr/local/bin/pytest")
        entry.size, entry.mode = len(program), 0o755
        tar.addfile(entry, io.BytesIO(program))
    container.put_archive("/", raw.getvalue())
    name, _, version = tag.rpartition(":")
    container.commit(name, version)
    container.remove()
    client.close()


@pytest.fixture
async def bench(sandbox_image: str, tmp_path: Path) -> AsyncIterator[Verifying]:
    provider = sandboxes.load(SandboxSettings(image=sandbox_image), "verification", "docker")
    yield Verifying(provider, tmp_path)
    await provider.close()


def environment(**changes: Any) -> SweBenchEnvironment:
    small = {"memory_mib": 512, "disk_mib": 64, "pids": 128, "cpus": 1.0, "test_timeout_s": 100.0}
    return SweBenchEnvironment(SweBenchSettings(image_template="rollstream-test-swe/{id}", **small | changes))


def patched(instance: Instance, scratch: Path, **after: str | None) -> str:
    """A patch by what files become of it."""
    names = {"area": "shapes/area.py", "tests": "tests/test_area.py"}
    return diff(FILES, {**FILES, **{names[name]: content for name, content in after.items()}}, scratch)


async def test_the_gold_patch_of_an_unmodified_instance_resolves_it(bench: Verifying, instance: Instance) -> None:
    swe_bench = environment()
    reference = swe_bench.reference(registry.admit(swe_bench, instance.row))  # type: ignore[arg-type]
    assert reference is not None
    verdict = await bench.score(swe_bench, instance.row, reference.artifact)
    assert verdict.reward == 1.0
    assert verdict.diagnostics["tests"] == {
        "tests/test_area.py::test_rectangle": "passed",
        "tests/test_area.py::test_square": "passed",
    }
    assert verdict.diagnostics["applied"] == "apply"


async def test_an_instance_with_a_script_of_its_own_is_verified_by_it(bench: Verifying, instance: Instance) -> None:
    script = SCRIPT.format(base=instance.row["base_commit"], patch=instance.row["test_patch"])
    row = {**instance.row, "eval_script": script, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    assert (await bench.score(environment(), row, instance.row["patch"])).reward == 1.0
    wrong = patched(instance, bench.scratch, area=FIXED.replace("side * side", "9 if side == 4 else 0"))
    verdict = await bench.score(environment(), row, wrong)
    assert (verdict.reward, verdict.diagnostics["exit_code"]) == (0.0, 1)


async def test_an_empty_patch_is_counted_apart(bench: Verifying, instance: Instance) -> None:
    verdict = await bench.score(environment(), instance.row, "")
    assert (verdict.reward, verdict.diagnostics["patch_exists"]) == (0.0, False)


async def test_a_wrong_patch_resolves_nothing(bench: Verifying, instance: Instance) -> None:
    async def scored(area: str) -> Verdict:
        return await bench.score(environment(), instance.row, patched(instance, bench.scratch, area=area))

    useless = await scored(FILES["shapes/area.py"] + "# mended\n")
    harmful = await scored(FIXED.replace("a * b", "a + b"))
    assert (useless.reward, useless.components) == (0.0, {"fail_to_pass": 0.0, "pass_to_pass": 1.0})
    assert (harmful.reward, harmful.components) == (0.0, {"fail_to_pass": 1.0, "pass_to_pass": 0.0})


async def test_a_patch_that_needs_fuzz_is_applied(bench: Verifying, instance: Instance) -> None:
    fuzzy = instance.row["patch"].replace(" def rectangle(a, b):", " def rectangle(width, height):")
    assert fuzzy != instance.row["patch"]
    verdict = await bench.score(environment(), instance.row, fuzzy)
    assert (verdict.reward, verdict.diagnostics.get("applied")) == (1.0, "patch_fuzz")


async def test_edits_to_the_tests_do_not_count(bench: Verifying, instance: Instance) -> None:
    generous = "def test_rectangle():\n    pass\n\n\ndef test_square():\n    pass\n"
    forged = await bench.score(environment(), instance.row, patched(instance, bench.scratch, tests=generous))
    assert (forged.reward, forged.diagnostics["undone"]) == (0.0, ["tests/test_area.py"])
    mended = await bench.score(environment(), instance.row, patched(instance, bench.scratch, tests=None, area=FIXED))
    assert mended.reward == 1.0


async def test_the_agents_box_has_the_base_and_no_way_to_the_fix(bench: Verifying, instance: Instance) -> None:
    swe_bench = environment()
    seeded = swe_bench.seed(registry.admit(swe_bench, instance.row))  # type: ignore[arg-type]
    assert seeded.sandbox is not None
    assert seeded.workspace is not None
    text = f"{seeded.messages}{seeded.workspace.model_dump_json()}{seeded.sandbox.model_dump_json()}"
    assert "side * side" not in text
    assert "test_square" not in text
    async with bench.boxes.fresh(seeded.sandbox.model_copy(update={"network": "none"})) as box:
        await prepare(box, seeded.workspace, None)
        assert (await sh(box, "git status --porcelain; git log --format=%s --all --reflog")).stdout.text == (
            "SWE-bench\nsquare and rectangle\n"
        )
        assert (await sh(box, f"git cat-file -e {instance.future}")).exit_code != 0
        assert (await sh(box, "grep -rc 'side [*] side' . | grep -v ':0'")).stdout.text == ""


async def test_a_test_patch_that_does_not_fit_its_base_is_the_rows_fault(bench: Verifying, instance: Instance) -> None:
    broken = instance.row["test_patch"].replace("def test_rectangle", "def test_triangle")
    with pytest.raises(EnvironmentFailure, match="the test patch does not fit the base: ") as caught:
        await bench.score(environment(), {**instance.row, "test_patch": broken}, instance.row["patch"])
    assert not caught.value.retryable


async def test_an_image_without_the_base_is_no_zero(bench: Verifying, instance: Instance) -> None:
    with pytest.raises(EnvironmentFailure, match="the repository in /testbed has no revision 0000000"):
        await bench.score(environment(), {**instance.row, "base_commit": "0" * 40}, instance.row["patch"])


def test_an_instance_that_proves_nothing_is_refused(instance: Instance) -> None:
    with pytest.raises(Refused, match="FAIL_TO_PASS names no test"):
        registry.admit(environment(), {**instance.row, "FAIL_TO_PASS": "[]"})


async def test_without_images_the_backend_says_so(bubblewrap: None, instance: Instance, tmp_path: Path) -> None:
    provider: SandboxProvider = sandboxes.load(SandboxSettings(), "verification", "bubblewrap")
    bench = Verifying(provider, tmp_path)
    with pytest.raises(Refused, match="bubblewrap runs the programs of its machine and no image"):
        await bench.score(environment(), instance.row, instance.row["patch"])
