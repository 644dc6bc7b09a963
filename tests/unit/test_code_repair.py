"""Rows of code repair: what a task file may say, what stands on the log instead, and what is refused."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollstream.blobs import BlobReference, BlobStore
from rollstream.environments import registry
from rollstream.environments.code.code_repair import CodeRepairEnvironment
from rollstream.environments.code.swe_bench import SweBenchEnvironment
from rollstream.environments.protocol import Episode, ScoredVerdict, Services, verification_limit_s
from rollstream.errors import EnvironmentFailure, Refused
from rollstream.publishing import Accepted, Refusal, RunRequest, plan_run, tasks_of
from rollstream.settings import Settings, SweBenchSettings
from rollstream.testing.playing import NoGraders
from schemas.session import Submission
from schemas.values import Composition, EpisodeLimits
from tests.unit.test_code_instances import ROW as INSTANCE

AT = datetime(2026, 1, 1, tzinfo=UTC)
PATCH = "--- a/lib.py\n+++ b/lib.py\n@@ -1 +1 @@\n-bug = True\n+bug = False\n"
ARCHIVED = {"instruction": "mend it", "archive": f"blob.{'0' * 64}.10240", "base": "0" * 40, "patch": PATCH}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task file's folder: a project, hidden tests, and a patch."""
    for path, text in {
        "project/lib.py": "bug = True\n",
        "hidden/tests/test_lib.py": "from lib import bug\ndef test_bug(): assert not bug\n",
        "fix.patch": PATCH,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def row(**changes: object) -> dict[str, object]:
    return {"instruction": "mend it", "repo": "project", "tests": "hidden", "patch": "fix.patch", **changes}


def localised(folder: Path, written: Mapping[str, object]) -> dict[str, Any]:
    return CodeRepairEnvironment().localise(dict(written), folder, BlobStore(str(folder / "blobs")).keep)


def request(folder: Path, *rows: Mapping[str, object]) -> RunRequest:
    path = folder / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    composition = Composition(harness="noop", sandbox="bubblewrap")
    return RunRequest(path, "r", composition, EpisodeLimits(), attempts=1, environment="code_repair")


def test_a_row_carries_what_it_names(folder: Path) -> None:
    found = localised(folder, row())
    assert found["tests"] == {"tests/test_lib.py": (folder / "hidden/tests/test_lib.py").read_text()}
    assert found["patch"] == PATCH
    assert "repo" not in found
    reference = BlobReference.parse(found["archive"])
    assert reference is not None
    task = registry.admit(CodeRepairEnvironment(), found)
    assert task.model_dump()["base"] == found["base"]


async def test_both_passes_over_a_file_come_to_the_same_and_the_second_keeps_the_blob(folder: Path) -> None:
    wanted = request(folder, row(), row(task_id="named", base=None))
    settings = Settings(data_dir=folder / "data")
    blobs = BlobStore.of(settings)
    plan = plan_run(wanted, settings, AT)
    assert plan.refusals == ()
    assert not (folder / "data").exists()

    first = [one for one in tasks_of(wanted, settings, AT) if isinstance(one, Accepted)]
    second = [one for one in tasks_of(wanted, settings, AT, keep=blobs.keep) if isinstance(one, Accepted)]
    assert [one.task for one in first] == [one.task for one in second]
    assert plan_run(wanted, settings, AT).manifest == plan.manifest
    reference = BlobReference.parse(str(second[0].task.row["archive"]))
    assert reference is not None
    assert len(await blobs.get(reference)) == reference.size_bytes


def test_an_id_that_nobody_gave_follows_what_the_row_carries(folder: Path) -> None:
    def ids() -> list[str]:
        found = tasks_of(request(folder, row(), row(task_id="named")), Settings(), AT)
        return [one.task.task.id for one in found if isinstance(one, Accepted)]

    before = ids()
    (folder / "project/lib.py").write_text("bug = True  # still\n")
    after = ids()
    assert (before[1], after[1]) == ("named", "named")
    assert before[0] != after[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"repo": "nowhere"}, "expected a folder or a tar file at nowhere, found nothing"),
        ({"base": "v1"}, "expected a git repository at project, since a base is named (v1), found a folder without one"),
        ({"tests": "nowhere"}, "expected a folder of tests at nowhere, found nothing"),
        ({"tests": "fix.patch"}, "expected a folder of tests at fix.patch, found a file"),
        ({"patch": "nowhere.patch"}, "expected a file at nowhere.patch, found none that can be read"),
        ({"patch": "no diff"}, "patch is no diff of files in the repository"),
        ({"tests": {"../x": "y"}}, "expected paths in the repository, found one that leads elsewhere"),
        ({"tests": {".git/config": "y"}}, "expected paths in the repository, found one that leads elsewhere"),
        ({"log_parser": "junit"}, "log_parser is none of django, "),
        ({"pass_to_pass": ["a"]}, "expected fail_to_pass beside pass_to_pass, found none"),
        ({"image": "x:1"}, "repo is a path ('project'), and only a task file has a place"),
        ({"instruction": ""}, "instruction"),
    ],
)
def test_what_cannot_be_played_is_refused_by_its_line(folder: Path, changes: dict[str, object], sentence: str) -> None:
    found = list(tasks_of(request(folder, row(**changes), row()), Settings(), AT))
    assert isinstance(found[0], Refusal)
    assert found[0].line == 1
    assert sentence in found[0].reason
    assert isinstance(found[1], Accepted)


def test_a_path_that_arrives_without_its_file_is_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(
        Refused, match=r"repo is a path \('project'\).*: publish the row with `rollstream publish FILE`, or name"
    ):
        registry.admit(CodeRepairEnvironment(), row(tests={}, patch=PATCH))
    with pytest.raises(Refused, match="expected either repo or image, found neither"):
        registry.admit(CodeRepairEnvironment(), {"instruction": "x"})


def test_hidden_tests_are_bounded(folder: Path) -> None:
    (folder / "hidden/big.txt").write_text("x" * 3_000_000)
    with pytest.raises(Refused, match=r"expected at most 2097152 bytes at hidden/big.txt, found 3000000"):
        localised(folder, row())
    (folder / "hidden/big.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match=r"expected text in UTF-8 at hidden/big.txt, found byte 0xff"):
        localised(folder, row())


def test_a_command_line_tells_what_is_refused(folder: Path) -> None:
    from tests.unit.test_cli import rollstream_command

    wanted = request(folder, row(repo="nowhere"), row())
    done = rollstream_command("env", "check", str(wanted.path), "-e", "code_repair", "--sandbox", "nowhere")
    assert (done.returncode, done.stderr.startswith("error: expected one of the sandbox providers bubblewrap, ")) == (2, True)


async def test_without_boxes_or_blobs_a_verification_says_what_is_missing(folder: Path) -> None:
    environment = CodeRepairEnvironment()
    archived = registry.admit(environment, ARCHIVED)
    in_image = registry.admit(environment, {"instruction": "x", "image": "x:1", "patch": PATCH})
    handed_in = Episode([], Submission(artifact=PATCH), "completed")
    with pytest.raises(EnvironmentFailure, match=r"expected blobs to read blob\.0+\.10240 from, found none"):
        await environment.verify(archived, handed_in, Services(NoGraders()))  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailure, match="expected a run that names a sandbox backend, found none"):
        await environment.verify(in_image, handed_in, Services(NoGraders()))  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailure, match=r"give every worker the same blobs\.url") as caught:
        await environment.verify(archived, handed_in, Services(NoGraders(), blobs=BlobStore(str(folder))))  # type: ignore[arg-type]
    # Of verification, since it is that which is tried again.
    assert (caught.value.stage, caught.value.retryable) == ("verification", True)


def test_how_long_a_verification_may_take_is_the_tasks_to_say() -> None:
    environment = CodeRepairEnvironment()
    task = registry.admit(environment, {**ARCHIVED, "test_timeout_s": 1000})
    assert verification_limit_s(environment, task, 120.0) == 1300.0
    math = registry.load("math")
    assert verification_limit_s(math, registry.admit(math, {"question": "1?", "answer": "1"}), 120.0) == 120.0


def test_boxes_of_instances_are_as_the_settings_say() -> None:
    section = SweBenchSettings(image_template="mine/{instance_id}:2", memory_mib=2048, test_timeout_s=60)
    environment = SweBenchEnvironment(section)
    task = registry.admit(environment, INSTANCE)
    sandbox = environment.seed(task).sandbox  # type: ignore[arg-type]
    assert sandbox is not None
    assert (sandbox.image, sandbox.memory_mib, sandbox.workdir) == ("mine/astropy__astropy-12907:2", 2048, "/testbed")
    assert environment.verification_timeout_s(task) == 360.0  # type: ignore[arg-type]
    own = registry.admit(environment, {**INSTANCE, "image": "own:1"})
    assert environment.seed(own).sandbox == sandbox.model_copy(update={"image": "own:1"})  # type: ignore[arg-type]


def test_the_settings_reach_the_environment_of_a_process() -> None:
    settings = Settings()
    changed = settings.model_copy(
        update={"environments": settings.environments.model_copy(update={"swe_bench": SweBenchSettings(memory_mib=1234)})}
    )
    try:
        registry.declare(changed)
        environment = registry.load("swe_bench")
        sandbox = environment.seed(registry.admit(environment, INSTANCE)).sandbox
        assert sandbox is not None
        assert sandbox.memory_mib == 1234
    finally:
        registry.declare(settings)


@pytest.mark.parametrize("template", ["x/{id}/{tag}", "{", "{0}"])
def test_a_template_with_another_placeholder_is_no_setting(template: str) -> None:
    with pytest.raises(ValueError, match="expected no placeholders but"):
        SweBenchSettings(image_template=template)


def test_attempts_without_a_patch_are_counted_apart() -> None:
    told: list[dict[str, object]] = [
        {"patch_exists": False, "error_kind": "empty"},
        {"patch_exists": True, "error_kind": "patch_not_applied"},
        {"patch_exists": True, "error_kind": None},
        {},
    ]
    verdicts = [ScoredVerdict(None, 0, 0.0, False, {}, one) for one in told]
    assert CodeRepairEnvironment().aggregate_metrics(iter(verdicts)) == {"patch_missing": 0.25, "patch_unfit": 0.25}


def test_a_repository_with_a_history_is_published_at_its_base(folder: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for argv in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "bug"], ["commit", "-qm", "fix", "--allow-empty"]):
        subprocess.run([*git, *argv], cwd=folder / "project", check=True)
    base = subprocess.run([*git, "rev-parse", "HEAD~1"], cwd=folder / "project", check=True, capture_output=True, text=True)
    assert localised(folder, row(base="HEAD~1"))["base"] == base.stdout.strip()


def test_a_request_can_be_repeated_from_another_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = request(folder, row())
    monkeypatch.chdir(folder)
    assert (
        plan_run(replace(wanted, path=Path("tasks.jsonl")), Settings(), AT).manifest
        == plan_run(wanted, Settings(), AT).manifest
    )
