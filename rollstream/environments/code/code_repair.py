"""`code_repair`: any git repository or folder with a bug, a command that runs its tests, and hidden tests that prove the fix.

Rows name folders and files beside the task file; publishing puts their content in their place (`localise`). A row that
arrives otherwise has no folder to look in, and is refused if it names one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollstream.blobs import BlobReference
from rollstream.environments.code import workspaces
from rollstream.environments.code.archives import archive_of
from rollstream.environments.code.evaluation import Evaluation
from rollstream.environments.code.logs import PARSERS, parser_name
from rollstream.environments.code.patches import Patch, is_unsafe, read_patch
from rollstream.environments.code.protection import TESTS
from rollstream.environments.code.repairing import RepairEnvironment
from rollstream.environments.code.verification import Repair
from rollstream.environments.protocol import Task
from rollstream.errors import Refused
from schemas.sandbox import SandboxSpec
from schemas.session import Workspace
from schemas.values import JsonObject

MAX_TEST_BYTES = 2 * 1024 * 1024
"""Of a task's hidden tests in all: they travel in its row."""
MAX_TEST_FILES = 200
QUIET = {"PYTHONDONTWRITEBYTECODE": "1"}


class BoxSize(BaseModel):
    """What boxes of a task may take, where the defaults do not fit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: Annotated[float, Field(gt=0)] = 1.0
    memory_mib: Annotated[int, Field(ge=64)] = 1024
    disk_mib: Annotated[int, Field(ge=8)] = 512
    pids: Annotated[int, Field(ge=16)] = 256


class CodeRepairTask(Task):
    """A repository with a bug. `repo` is a path only in a task file; `archive` is what publishing makes of it."""

    instruction: Annotated[str, Field(min_length=1)]
    repo: str | None = None
    """A folder, a git repository or a tar file, relative to the task file."""
    archive: Annotated[str, Field(pattern=r"^blob\.[0-9a-f]{64}\.[0-9]+$")] | None = None
    image: str | None = None
    """Of a container that has the repository in `workdir`, instead of `repo`."""
    workdir: Annotated[str, Field(pattern=r"^/.+")] = "/workspace"
    base: Annotated[str, Field(pattern=r"^[^-\s][^\s]*$", max_length=200)] | None = None
    """Revision that has the bug; what is checked out by default."""
    setup: tuple[str, ...] = ()
    """Shell commands that make the box ready, for the agent and for the tests."""
    box: BoxSize = BoxSize()
    test_command: Annotated[str, Field(min_length=1)] = "python3 -m pytest -q -rA -p no:cacheprovider"
    tests: dict[str, str] = {}
    """Hidden tests, path in the repository -> text; in a task file also a folder that is laid over the repository."""
    patch: str = ""
    """The reference; in a task file also the path of a `.patch` or `.diff`."""
    fail_to_pass: tuple[str, ...] = ()
    """Ids of tests; without any, all tests must pass."""
    pass_to_pass: tuple[str, ...] = ()
    log_parser: str = "pytest"
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    protected: tuple[str, ...] = TESTS
    """Patterns of names of files and directories whose change by the agent is undone before the tests run."""
    test_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0

    @field_validator("tests")
    @classmethod
    def _inside(cls, tests: dict[str, str]) -> dict[str, str]:
        # None is quoted: what is said of a refused task is not sealed.
        if any(is_unsafe(path) for path in tests):
            raise ValueError("expected paths in the repository, found one that leads elsewhere")
        return tests

    @model_validator(mode="after")
    def _can_be_played(self) -> "CodeRepairTask":
        if self.repo is not None:
            raise ValueError(
                f"repo is a path ({self.repo[:100]!r}), and only a task file has a place that paths start from: publish the "
                "row with `rollstream publish FILE`, or name an `image`"
            )
        if (self.archive is None) == (self.image is None):
            raise ValueError(f"expected either repo or image, found {'both' if self.image else 'neither'}")
        if self.archive is not None and self.base is None:
            raise ValueError("expected the base of the archive, found none")
        if self.pass_to_pass and not self.fail_to_pass:
            raise ValueError("expected fail_to_pass beside pass_to_pass, found none: nothing could tell that the bug is mended")
        if parser_name(self.log_parser) is None:
            raise ValueError(f"log_parser is none of {', '.join(sorted(PARSERS))}")
        if self.patch.strip() and not isinstance(read_patch(self.patch.encode()), Patch):
            raise ValueError("patch is no diff of files in the repository")
        return self


class CodeRepairEnvironment(RepairEnvironment[CodeRepairTask]):
    """Mend a bug in a repository. Hidden tests in a fresh box say whether it is mended."""

    name: ClassVar[str] = "code_repair"
    version: ClassVar[str] = "1"
    task_type: type[CodeRepairTask] = CodeRepairTask
    example: ClassVar[Mapping[str, object]] = {
        "instruction": "Sums come out as differences. They should be sums.",
        "archive": f"blob.{'0' * 64}.1",
        "base": "HEAD",
        "patch": "--- a/adding.py\n+++ b/adding.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n",
    }
    public_fields: ClassVar[frozenset[str]] = frozenset(
        {"instruction", "repo", "archive", "image", "workdir", "base", "setup", "box"}
    )

    def localise(self, row: JsonObject, folder: Path, keep: Callable[[bytes], BlobReference]) -> JsonObject:
        row = dict(row)
        if isinstance(repo := row.get("repo"), str) and row.get("archive") is None and row.get("image") is None:
            base = row.get("base")
            archive = archive_of(folder / repo, base if isinstance(base, str) else None, shown=repo)
            del row["repo"]
            row |= {"archive": str(keep(archive.content)), "base": archive.base}
        if isinstance(tests := row.get("tests"), str):
            row["tests"] = texts_of(folder / tests, tests)
        if isinstance(patch := row.get("patch"), str) and "\n" not in patch and patch.endswith((".patch", ".diff")):
            row["patch"] = _text(folder / patch, patch)
        return row

    def instruction(self, task: CodeRepairTask) -> str:
        return (
            f"{task.instruction}\n\nThe repository is in {task.workdir}, and is your working directory. Change its files so "
            "that the problem is solved, and leave your changes in the working tree. Tests that you do not see will be run on "
            "them; changes to tests do not count."
        )

    def box(self, task: CodeRepairTask) -> SandboxSpec:
        return SandboxSpec(image=task.image, workdir=task.workdir, env=QUIET, network="gateway", **task.box.model_dump())

    def workspace(self, task: CodeRepairTask) -> Workspace:
        return _workspace(task, hide=True)

    def repair(self, task: CodeRepairTask) -> Repair:
        parser = parser_name(task.log_parser)
        assert parser is not None, "validated at admission"
        return Repair(
            spec=self.box(task).model_copy(update={"network": "none"}),
            workspace=_workspace(task, hide=False),
            evaluation=Evaluation(task.test_command, task.test_timeout_s),
            parser=PARSERS[parser],
            test_files=task.tests,
            patterns=task.protected,
            fail_to_pass=task.fail_to_pass,
            pass_to_pass=task.pass_to_pass,
            eval_type=task.eval_type,
        )

    def solution(self, task: CodeRepairTask) -> str:
        return task.patch


def _workspace(task: CodeRepairTask, *, hide: bool) -> Workspace:
    if task.archive is not None and task.base is not None:
        return workspaces.of_archive(task.archive, task.base, task.setup)
    return workspaces.of_image(task.base or "HEAD", task.setup, hide=hide)


def texts_of(folder: Path, shown: str) -> dict[str, str]:
    """Every file below a folder, by its path in it.

    Raises:
        Refused: there is no such folder, it is empty, too big, or holds something else than text.
    """
    if not folder.is_dir():
        raise Refused(f"expected a folder of tests at {shown}, found {'a file' if folder.exists() else 'nothing'}")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    if not 0 < len(paths) <= MAX_TEST_FILES:
        raise Refused(f"expected 1 to {MAX_TEST_FILES} files in the folder of tests {shown}, found {len(paths)}")
    texts = {path.relative_to(folder).as_posix(): _text(path, f"{shown}/{path.relative_to(folder)}") for path in paths}
    if (size := sum(len(text.encode()) for text in texts.values())) > MAX_TEST_BYTES:
        raise Refused(f"expected at most {MAX_TEST_BYTES} bytes in the folder of tests {shown}, found {size}")
    return texts


def _text(path: Path, shown: str) -> str:
    try:
        if path.stat().st_size > MAX_TEST_BYTES:
            raise Refused(f"expected at most {MAX_TEST_BYTES} bytes at {shown}, found {path.stat().st_size}")
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise Refused(f"expected text in UTF-8 at {shown}, found byte 0x{error.object[error.start]:02x}") from None
    except OSError as error:
        raise Refused(f"expected a file at {shown}, found none that can be read: {error.strerror}") from None
