"""`swe_bench`: instances of SWE-bench and what has its format, unmodified.

The agent gets the instance's image without what came after its base. Its patch is verified as the SWE-bench harness does it:
in another container, test files from the test patch, the repository's own command, its log read and graded.
"""

from collections.abc import Mapping
from typing import ClassVar

from rollstream.environments.code import workspaces
from rollstream.environments.code.commands import ACTIVATE, SPEAKS_UTF8, test_command
from rollstream.environments.code.evaluation import Evaluation
from rollstream.environments.code.grading import END, START
from rollstream.environments.code.instances import PUBLIC_FIELDS, SweBenchTask
from rollstream.environments.code.logs import PARSERS
from rollstream.environments.code.patches import Patch, read_patch
from rollstream.environments.code.repairing import RepairEnvironment
from rollstream.environments.code.verification import Repair
from rollstream.settings import SweBenchSettings
from schemas.sandbox import SandboxSpec
from schemas.session import Workspace

WORKDIR = "/testbed"
QUIET = {"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Scripts of instances install what the image has already; without a network that must fail at once."""


class SweBenchEnvironment(RepairEnvironment[SweBenchTask]):
    """Resolve an issue of a Python repository; instances of SWE-bench, unmodified."""

    name: ClassVar[str] = "swe_bench"
    version: ClassVar[str] = "1"
    task_type: type[SweBenchTask] = SweBenchTask
    example: ClassVar[Mapping[str, object]] = {
        "instance_id": "example__adding-1",
        "repo": "example/adding",
        "base_commit": "0" * 40,
        "problem_statement": "Sums come out as differences.",
        "log_parser": "pytest",
        "FAIL_TO_PASS": ["test_adding.py::test_adds"],
        "patch": "--- a/adding.py\n+++ b/adding.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n",
    }
    public_fields: ClassVar[frozenset[str]] = PUBLIC_FIELDS

    def __init__(self, settings: SweBenchSettings | None = None) -> None:
        self._settings = settings or SweBenchSettings()

    def instruction(self, task: SweBenchTask) -> str:
        return (
            f"The repository of {task.repo} is in {WORKDIR}, and is your working directory. Resolve this issue:\n\n"
            f"{task.problem_statement}\n\n"
            "Change the files of the repository, and leave your changes in the working tree. Tests that you do not see will be "
            "run on them; changes to test files do not count."
        )

    def box(self, task: SweBenchTask) -> SandboxSpec:
        own = self._settings
        return SandboxSpec(
            image=task.image_name(own.image_template),
            workdir=WORKDIR,
            env=QUIET,
            cpus=own.cpus,
            memory_mib=own.memory_mib,
            disk_mib=own.disk_mib,
            pids=own.pids,
            network="gateway",
        )

    def workspace(self, task: SweBenchTask) -> Workspace:
        return workspaces.of_image(task.base_commit)

    def repair(self, task: SweBenchTask) -> Repair:
        assert task.parser is not None, "validated at admission"
        return Repair(
            spec=self.box(task).model_copy(update={"network": "none"}),
            workspace=workspaces.of_image(task.base_commit, hide=False),
            evaluation=self._evaluation(task),
            parser=PARSERS[task.parser],
            test_patch=task.test_patch.encode(errors="backslashreplace"),
            fail_to_pass=task.fail_to_pass,
            pass_to_pass=task.pass_to_pass,
            eval_type=task.eval_type,
        )

    def _evaluation(self, task: SweBenchTask) -> Evaluation:
        timeout_s = self._settings.test_timeout_s
        if script := task.eval_script:
            return Evaluation(script, timeout_s, shell="bash", is_script=START in script and END in script)
        tests = read_patch(task.test_patch.encode(errors="backslashreplace"))
        paths = tests.paths if isinstance(tests, Patch) else ()
        command = task.test_command or test_command(task.repo, task.version, paths)
        return Evaluation(command, timeout_s, prologue=f"{ACTIVATE}\n{SPEAKS_UTF8}", shell="bash")

    def solution(self, task: SweBenchTask) -> str:
        return task.patch
