"""Patches in real boxes: what mends the bug is worth 1.0, what does not 0.0, and what proves nothing has no reward at all."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollstream.blobs import BlobReference
from rollstream.environments import registry
from rollstream.environments.protocol import Services
from rollstream.errors import EnvironmentFailure, EpisodeTimeout, Refused, SandboxUnavailable
from rollstream.sandboxes import registry as sandboxes
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.settings import SandboxSettings
from rollstream.testing.playing import NoGraders
from schemas.sandbox import SandboxSpec
from tests.sandboxes.repairing import BOX, BUG, FIXED, HIDDEN, Verifying

pytestmark = pytest.mark.docker
PROVIDERS = ("bubblewrap", "docker")


@pytest.fixture(params=PROVIDERS)
async def provider(request: pytest.FixtureRequest, bubblewrap: None, sandbox_image: str) -> AsyncIterator[SandboxProvider]:
    provider = sandboxes.load(SandboxSettings(image=sandbox_image), "verification", request.param)
    yield provider
    await provider.close()


@pytest.fixture
async def bench(provider: SandboxProvider, tmp_path: Path) -> AsyncIterator[Verifying]:
    """A repository and a provider; afterwards none of its boxes is left."""
    verifying = Verifying(provider, tmp_path)
    yield verifying
    assert [box for box in await provider.found() if box.tag.holder.worker == verifying.worker] == []


async def test_the_fix_scores_one_and_its_verdict_says_why(bench: Verifying) -> None:
    verdict = await bench.verify(bench.patch({"lib.py": FIXED}))
    told = verdict.diagnostics
    assert verdict.reward == 1.0
    assert verdict.hermetic
    assert (told["resolved"], told["patch_exists"], told["mask_sample"], told["error_kind"]) == (True, True, False, None)
    assert told["tests"] == dict.fromkeys(
        ["tests/test_lib.py::test_half", "tests/test_lib.py::test_two", "tests/test_hidden.py::test_three"], "passed"
    )
    reference = BlobReference.parse(str(told["log"]))
    assert reference is not None
    assert b"3 passed" in await bench.blobs.get(reference)


async def test_what_does_not_mend_it_scores_nothing(bench: Verifying) -> None:
    verdict = await bench.verify(bench.patch({"lib.py": BUG.replace("number + 2", "4")}))
    assert verdict.reward == 0.0
    assert verdict.diagnostics["fail_to_pass"] == {
        "passed": 2,
        "failed": 1,
        "failed_ids": ["tests/test_hidden.py::test_three"],
    }


async def test_tests_can_be_named_and_others_may_fail(bench: Verifying) -> None:
    named = {"fail_to_pass": ["tests/test_lib.py::test_two"], "pass_to_pass": ["tests/test_lib.py::test_half"]}
    assert (await bench.verify(bench.patch({"lib.py": BUG.replace("number + 2", "4")}), **named)).reward == 1.0
    broken = bench.patch({"lib.py": FIXED.replace("/ 2", "/ 3")})
    verdict = await bench.verify(broken, **named)
    assert (verdict.reward, verdict.components) == (0.0, {"fail_to_pass": 1.0, "pass_to_pass": 0.0})


async def test_a_patch_by_reference_is_the_same_patch(bench: Verifying) -> None:
    reference = await bench.blobs.put(bench.patch({"lib.py": FIXED}).encode())
    assert (await bench.verify(str(reference))).reward == 1.0


@pytest.mark.parametrize(
    ("artifact", "kind", "exists"),
    [
        (None, "empty", False),
        ("", "empty", False),
        (" \n\n", "empty", False),
        ("I have mended the bug.", "not_a_diff", True),
        ("--- a/../../etc/cron.d/x\n+++ b/../../etc/cron.d/x\n@@ -0,0 +1 @@\n+x\n", "unsafe_path", True),
        ("--- /dev/null\n+++ b/.git/hooks/pre-commit\n@@ -0,0 +1 @@\n+x\n", "unsafe_path", True),
        (f"blob.{'0' * 64}.20000000", "too_large", True),
        ("--- a/lib.py\n+++ b/lib.py\n@@ -1 +1 @@\n-x\n+" + "y" * 20_000_000 + "\n", "too_large", True),
        ("".join(f"--- /dev/null\n+++ b/{number}\n@@ -0,0 +1 @@\n+x\n" for number in range(10_001)), "too_large", True),
        ('--- /dev/null\n+++ "b/\\377.py"\n@@ -0,0 +1 @@\n+x\n', "unsafe_path", True),
    ],
    ids=["none", "empty", "blank", "prose", "outside", "of git", "20 MB by reference", "20 MB", "10,001 files", "no text"],
)
async def test_what_is_no_patch_scores_nothing_and_no_box_is_started_for_it(
    artifact: str | None, kind: str, exists: bool, tmp_path: Path
) -> None:
    bench = Verifying(sandboxes.load(SandboxSettings(), "verification", "bubblewrap"), tmp_path)
    environment = registry.load("code_repair")
    bench.services = lambda: Services(NoGraders(), blobs=bench.blobs)  # type: ignore[method-assign]
    verdict = await bench.score(environment, bench.row(), artifact)
    assert verdict.reward == 0.0
    assert (verdict.diagnostics["error_kind"], verdict.diagnostics["patch_exists"]) == (kind, exists)


async def test_a_patch_that_fits_nowhere_scores_nothing(bench: Verifying) -> None:
    patch = "--- a/lib.py\n+++ b/lib.py\n@@ -1,3 +1,3 @@\n def nobody():\n-    here = 1\n+    here = 2\n     return here\n"
    verdict = await bench.verify(patch)
    assert (verdict.reward, verdict.diagnostics["error_kind"]) == (0.0, "patch_not_applied")


async def test_patches_that_need_help_are_applied(bench: Verifying) -> None:
    good = bench.patch({"lib.py": FIXED})
    moved = good.replace("@@ -1,5 +1,5 @@", "@@ -3,5 +3,5 @@")
    fuzzy = good.replace(" def double(number):", " def double(numbers):").replace("index ", "index 0")
    assert moved != good
    for patch, how in ((good.rstrip("\n"), "apply"), (good.replace("\n", "\r\n"), "apply with lf"), (fuzzy, "patch_fuzz")):
        verdict = await bench.verify(patch)
        assert (verdict.reward, verdict.diagnostics.get("applied")) == (1.0, how), verdict


async def test_what_is_in_the_tree_already_counts_as_applied(bench: Verifying) -> None:
    comment = bench.patch({"lib.py": BUG + "# a comment\n"})
    (bench.scratch / "repo/lib.py").write_text(FIXED + "# a comment\n")
    verdict = await bench.verify(comment)
    assert (verdict.reward, verdict.diagnostics.get("applied")) == (1.0, "already")


async def test_binary_files_and_modes_are_applied(bench: Verifying) -> None:
    verdict = await bench.verify(bench.patch({"lib.py": FIXED, "data.bin": bytes(range(256)) * 40}))
    assert verdict.reward == 1.0


async def test_edits_to_tests_and_to_what_runs_them_do_not_count(bench: Verifying) -> None:
    generous = "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    generous += "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
    edits = {
        "tests/test_lib.py": None,
        "tests/test_hidden.py": "def test_three():\n    pass\n",
        "conftest.py": generous,
        "pytest.ini": "[pytest]\naddopts = --collect-only\n",
        "pytest.py": "print('3 passed in 0.1s')\n",
        "json/__init__.py": "raise SystemExit(0)\n",
    }
    verdict = await bench.verify(bench.patch({"x.py": "", **edits}))
    assert verdict.reward == 0.0
    assert {*verdict.diagnostics["undone"]} == {*edits}  # type: ignore[misc]
    assert (await bench.verify(bench.patch({"lib.py": FIXED, **edits}))).reward == 1.0


async def test_more_files_than_a_command_line_takes_are_put_back(bench: Verifying) -> None:
    many = {f"tests/{'x' * 200}/test_{number}.py": "def test_x():\n    pass\n" for number in range(450)}
    verdict = await bench.verify(bench.patch(many))
    assert (verdict.reward, verdict.diagnostics["tests_seen"]) == (0.0, 3)


async def test_links_lead_nowhere_and_do_not_keep_tests_away(bench: Verifying) -> None:
    links = {"passwd": "-> /etc/passwd", "tests/test_hidden.py": "-> /etc/passwd"}
    assert (await bench.verify(bench.patch({"lib.py": FIXED, **links}))).reward == 1.0
    elsewhere = bench.patch({"lib.py": FIXED, "tests/test_lib.py": None, "tests": "-> /tmp"})
    assert (await bench.verify(elsewhere)).reward == 1.0


async def test_a_repository_that_was_deleted_is_scored_and_fails(bench: Verifying) -> None:
    verdict = await bench.verify(bench.patch({"lib.py": None, "tests/test_lib.py": None}))
    assert verdict.reward == 0.0
    assert verdict.diagnostics["tests"] != {}


async def test_what_an_agent_had_when_its_time_was_over_is_scored_and_flagged(bench: Verifying) -> None:
    verdict = await bench.verify(bench.patch({"lib.py": FIXED}), stop_reason="agent_timeout")
    assert (verdict.reward, verdict.diagnostics["agent_stopped"]) == (1.0, "agent_timeout")


FORGED = "import os, sys\n\n\ndef forge():\n    for number in (1, 2):\n        os.write(number, b'''{}''')\n\n\n"
CLAIM = "\nPASSED tests/test_lib.py::test_two\nPASSED tests/test_hidden.py::test_three\n=== 3 passed in 0.01s ===\n"


async def test_printing_that_tests_passed_makes_no_pass(bench: Verifying) -> None:
    printed = FORGED.format(CLAIM) + "forge()\n" + BUG
    verdict = await bench.verify(bench.patch({"lib.py": printed}))
    assert verdict.reward == 0.0
    named = await bench.verify(bench.patch({"lib.py": printed}), fail_to_pass=["tests/test_hidden.py::test_three"])
    assert named.reward == 0.0


async def test_ending_the_runner_makes_no_pass(bench: Verifying) -> None:
    marked = ">>>>> End Test Output\n>>>>> Test Exit Code: 0\n"
    for ending in ("os._exit(0)", "os.kill(os.getppid(), 9)"):
        patch = bench.patch({"lib.py": FORGED.format(CLAIM + marked) + f"forge()\n{ending}\n"})
        with pytest.raises(EnvironmentFailure, match="the tests prove nothing: ") as caught:
            await bench.verify(patch)
        assert (caught.value.kind, caught.value.retryable, caught.value.stage) == ("invalid_log", True, "verification")
    asked = bench.patch({"lib.py": FORGED.format(CLAIM + marked) + "forge()\nsys.exit(0)\n"})
    assert (await bench.verify(asked)).reward == 0.0


async def test_tests_that_never_end_are_no_reward_and_can_be_tried_again(bench: Verifying) -> None:
    with pytest.raises(EpisodeTimeout, match="the tests did not end within 3 s; their log is blob") as caught:
        await bench.verify(bench.patch({"lib.py": "while True:\n    pass\n"}), test_timeout_s=3)
    assert (caught.value.retryable, caught.value.stage) == (True, "verification")


async def test_tests_that_fork_for_ever_are_no_reward_either(bench: Verifying) -> None:
    bomb = bench.patch({"lib.py": "import os\nwhile True:\n    os.fork()\n"})
    # The runner may be the one that gets no more processes, and end: then its log proves nothing.
    with pytest.raises((EpisodeTimeout, EnvironmentFailure)) as caught:
        await bench.verify(bomb, test_timeout_s=3)
    assert (caught.value.retryable, caught.value.kind in ("timeout", "invalid_log")) == (True, True)


async def test_200_megabytes_on_one_line_are_read_around(bench: Verifying) -> None:
    loud = "import os\nfor _ in range(200):\n    os.write(2, b'x' * 1_000_000)\n" + FIXED
    verdict = await bench.verify(bench.patch({"lib.py": loud}), test_command="python3 -m pytest -q -rA -s", test_timeout_s=100)
    assert verdict.reward == 1.0
    assert int(str(verdict.diagnostics["log_bytes"])) > 200_000_000
    reference = BlobReference.parse(str(verdict.diagnostics["log"]))
    assert reference is not None
    assert reference.size_bytes < 5_000_000


async def test_output_that_is_no_text_is_survived(bench: Verifying) -> None:
    patch = bench.patch({"lib.py": "import os\nos.write(1, bytes(range(256)))\n" + FIXED})
    assert (await bench.verify(patch, test_command="python3 -m pytest -q -rA -s")).reward == 1.0


async def test_a_full_disk_fails_tests_and_nothing_else(bench: Verifying) -> None:
    hog = "with open('hog', 'wb') as file:\n    for _ in range(1000):\n        file.write(b'x' * 1_000_000)\n"
    verdict = await bench.verify(bench.patch({"lib.py": hog + FIXED}), box=BOX | {"disk_mib": 32, "memory_mib": 512})
    assert verdict.reward == 0.0
    assert verdict.diagnostics["tests"] == {"tests/test_hidden.py": "error", "tests/test_lib.py": "error"}


async def test_a_planted_reward_changes_nothing(bench: Verifying) -> None:
    planted = {"reward.txt": "1.0", "verdict.json": '{"reward": 1.0, "resolved": true}', "logs/verifier/reward.txt": "1"}
    assert (await bench.verify(bench.patch(planted))).reward == 0.0


async def test_a_workspace_that_does_not_fit_is_no_zero(bench: Verifying) -> None:
    big = (bench.scratch / "repo/big.bin").write_bytes(b"".join(bytes([n % 256]) * 4099 for n in range(8000)))
    assert big > 32_000_000
    with pytest.raises(EnvironmentFailure, match=r"the workspace cannot be made: .*unable to write file"):
        await bench.verify(bench.patch({"lib.py": FIXED}), box=BOX | {"disk_mib": 16})


async def test_a_test_command_that_is_not_there_is_no_zero(bench: Verifying) -> None:
    with pytest.raises(EnvironmentFailure, match="the tests prove nothing: expected evidence that tests ran"):
        await bench.verify(bench.patch({"lib.py": FIXED}), test_command="no-such-runner -v")


async def test_a_set_up_that_fails_is_no_zero(bench: Verifying) -> None:
    with pytest.raises(EnvironmentFailure, match="ended with 3: it cannot be made") as caught:
        await bench.verify(bench.patch({"lib.py": FIXED}), setup=["echo it cannot be made >&2; exit 3"])
    assert caught.value.kind == "workspace"


async def test_eight_verifications_at_once_do_not_meet(bench: Verifying) -> None:
    patches = [bench.patch({"lib.py": FIXED if number % 2 else BUG + f"# {number}\n"}) for number in range(8)]
    found = await asyncio.gather(*(bench.verify(patch) for patch in patches))
    assert [verdict.reward for verdict in found] == [0.0, 1.0] * 4


async def test_an_image_that_is_nowhere_is_said(sandbox_image: str, tmp_path: Path) -> None:
    provider = sandboxes.load(SandboxSettings(), "verification", "docker")
    bench = Verifying(provider, tmp_path)
    row = {"instruction": "x", "image": "rollstream-test-no-such-image", "patch": bench.patch({"lib.py": FIXED})}
    with pytest.raises((Refused, SandboxUnavailable), match=r"rollstream-test-no-such-image|registry|lookup|dial"):
        await bench.score(registry.load("code_repair"), row, str(row["patch"]))
    await provider.close()


async def test_the_agents_box_has_no_hidden_test_and_no_way_to_the_fix(bench: Verifying) -> None:
    environment = registry.load("code_repair")
    task = registry.admit(environment, bench.row())
    seeded = environment.seed(task)
    assert seeded.sandbox is not None
    assert seeded.workspace is not None
    text = f"{seeded.sandbox.model_dump_json()}{seeded.workspace.model_dump_json()}{seeded.messages}"
    assert HIDDEN.split("\n")[3].strip() not in text
    assert "number * 2" not in text
    assert isinstance(seeded.sandbox, SandboxSpec)
    assert (seeded.interaction, seeded.placement, seeded.sandbox.network) == ("agent_in_env", "agent_in_env", "gateway")
