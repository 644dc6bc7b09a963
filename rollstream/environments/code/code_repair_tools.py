"""`code_repair_tools`: the tasks of `code_repair`, played with the environment's own tools in a box of its own.

The patch is taken out of that box after every action, so it is what stands there and never what the agent says; it is verified
in a fresh box, as in `code_repair`. Each action earns what it changes in the share of the tests that a verification passes.
"""

import asyncio
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rollstream.blobs import BlobReference
from rollstream.environments.boxes import BoxEnvironment, BoxWorld, Earned
from rollstream.environments.code import verdicts, verification
from rollstream.environments.code.code_repair import CodeRepairEnvironment, CodeRepairTask
from rollstream.environments.code.patches import MAX_PATCH_BYTES, Patch, read_patch
from rollstream.environments.protocol import (
    Blobs,
    Episode,
    OpenServices,
    ScoredVerdict,
    Services,
    StepServices,
    Verdict,
)
from rollstream.environments.tools import Combination
from rollstream.errors import EnvironmentFailure, EpisodeTimeout, SandboxUnavailable
from rollstream.sandboxes.harvest import Base, HarvestFailed, difference, keep_base
from rollstream.sandboxes.protocol import DownloadTooLarge, Sandbox
from schemas.action import ToolCall, Utterance
from schemas.session import Submission, Workspace
from schemas.values import ChatMessage, JsonObject

MAX_BASE_BYTES = 64 * 1024 * 1024
"""Of the files of a repository, packed: they are read again for every look."""
INLINE_BYTES = 64 * 1024
"""Longest patch that stands in the world itself."""
MEASURE_S = 45.0
"""Of the tests of one look, and as much again for what they need."""
READS = frozenset({"read_file"})
"""Tools that leave a box as it is."""
REFERENCE = "/tmp/reference.patch"


class RepairWorld(BoxWorld):
    """What is known of the repository in the box."""

    task: CodeRepairTask
    workspace: Workspace
    tree: str = ""
    """The git tree that the repository began as."""
    pack: str = ""
    """Reference of a blob with its objects."""
    patch: str = ""
    """How the files differ from it now: itself, or the reference of a blob."""
    patch_bytes: int = 0
    left_out: str = ""
    """Why the patch could not be taken out; then it is what it was before."""
    progress: float = 0.0
    """Share of the tests that a verification passed, of the last patch that was measured."""
    measured: bool = True
    """Whether that is this patch; the empty one is worth nothing unmeasured."""


class CodeRepairToolsEnvironment(BoxEnvironment[CodeRepairTask, RepairWorld]):
    name: ClassVar[str] = "code_repair_tools"
    version: ClassVar[str] = "1"
    task_type = CodeRepairTask
    example: ClassVar[Mapping[str, object]] = CodeRepairEnvironment.example
    world_type = RepairWorld
    public_fields: ClassVar[frozenset[str]] = CodeRepairEnvironment.public_fields
    combination: ClassVar[Combination] = Combination(terminal=1.0, steps=0.0)
    """What the steps earn leads to the end and adds nothing to it; it stands in the components."""
    _played: ClassVar[CodeRepairEnvironment] = CodeRepairEnvironment()

    def localise(self, row: JsonObject, folder: Path, keep: Callable[[bytes], BlobReference]) -> JsonObject:
        return self._played.localise(row, folder, keep)

    def prompt(self, task: CodeRepairTask) -> list[ChatMessage]:
        return [{"role": "user", "content": self._played.instruction(task)}]

    def begin(self, task: CodeRepairTask) -> RepairWorld:
        spec = self._played.box(task).model_copy(update={"network": "none"})
        return RepairWorld(spec=spec, task=task, workspace=self._played.workspace(task))

    def reference(self, task: CodeRepairTask) -> Submission | None:
        return self._played.reference(task)

    def reference_actions(self, task: CodeRepairTask) -> Sequence[ToolCall | Utterance]:
        if not task.patch.strip():
            return ()
        return (
            ToolCall(id="write", name="write_file", arguments={"path": REFERENCE, "content": task.patch}),
            ToolCall(id="apply", name="bash", arguments={"command": f"git apply --whitespace=nowarn {REFERENCE}"}),
            ToolCall(id="submit", name="submit"),
        )

    def verification_timeout_s(self, task: CodeRepairTask) -> float:
        return self._played.verification_timeout_s(task)

    def aggregate_metrics(self, found: Iterable[ScoredVerdict]) -> Mapping[str, float]:
        return self._played.aggregate_metrics(found)

    async def prepare(self, box: Sandbox, world: RepairWorld, services: OpenServices) -> None:
        blobs = _require(services.blobs)
        archive = await verification.archive_of(world.workspace, blobs)
        await verification.prepare(box, world.workspace, archive)
        base = await keep_base(box, world.workspace.base or "HEAD", MAX_BASE_BYTES)
        with base.pack:
            base.pack.seek(0)
            world.tree, world.pack = base.tree, str(await blobs.put(base.pack.read()))

    async def look(
        self, box: Sandbox, before: RepairWorld, after: RepairWorld, action: ToolCall, services: StepServices
    ) -> Earned:
        if action.name in READS or services.opened is None:
            return Earned()
        blobs = _require(services.opened.blobs)
        reference = BlobReference.parse(before.pack)
        if reference is None:
            raise EnvironmentFailure(f"expected a blob of objects, found {before.pack!r:.100}", stage="agent", kind="bad_world")
        after.left_out = ""
        try:
            base = Base(before.tree, io.BytesIO(await blobs.get(reference)))
            patch = (await difference(box, base, MAX_PATCH_BYTES)).patch
        except (DownloadTooLarge, HarvestFailed) as error:
            after.left_out = str(error)
            return Earned(info={"left_out": after.left_out})
        kept = await _kept(blobs, patch)
        if kept == before.patch and before.measured:
            return Earned(0.0, {"progress": before.progress})
        after.patch, after.patch_bytes, after.measured = kept, len(patch), False
        try:
            after.progress = await self._progress(patch, after, services.opened)
        except (EnvironmentFailure, EpisodeTimeout, SandboxUnavailable) as error:
            # The tests prove nothing, do not end, or could not be run: what is found next is compared with what was found last.
            return Earned(info={"unmeasured": str(error)})
        after.measured = True
        return Earned(after.progress - before.progress, {"progress": after.progress})

    async def _progress(self, patch: bytes, world: RepairWorld, services: OpenServices) -> float:
        """The share of the tests that a patch passes, in a box of its own."""
        read = read_patch(patch)
        if not isinstance(read, Patch) or services.boxes is None:
            return 0.0
        repair = self._played.repair(world.task)
        limited = replace(repair.evaluation, timeout_s=min(repair.evaluation.timeout_s, MEASURE_S))
        repair = replace(repair, evaluation=limited)
        archive = await verification.archive_of(repair.workspace, services.blobs)
        try:
            async with asyncio.timeout(2 * MEASURE_S), services.boxes.fresh(repair.spec) as box:
                verdict = await verification.verify_in(box, repair, read, archive)
        except TimeoutError:
            raise EpisodeTimeout(f"no verification within {2 * MEASURE_S:g} s", stage="agent") from None
        return progress_of(verdict)

    async def score(self, task: CodeRepairTask, world: RepairWorld, episode: Episode, services: Services) -> Verdict:
        if world.left_out:
            return verdicts.of_refusal("patch_left_out", world.patch_bytes, world.left_out)
        # By the receipt, and not by what the agent's side hands in.
        submitted = episode.submission.model_copy(update={"artifact": world.patch})
        return await self._played.verify(task, replace(episode, submission=submitted), services)


def progress_of(verdict: Verdict) -> float:
    """How far a patch has come: 1.0 when it is resolved, 0.0 for one that mends nothing.

    What it breaks counts against what it mends. Of tasks that name no tests, nothing is known between the two.
    """
    if verdict.reward:
        return verdict.reward
    if "fail_to_pass" not in verdict.components:
        return 0.0
    return verdict.components["fail_to_pass"] * verdict.components["pass_to_pass"]


def _require(blobs: Blobs | None) -> Blobs:
    if blobs is None:
        raise EnvironmentFailure("expected blobs to keep a repository in, found none", stage="agent", kind="no_blobs")
    return blobs


async def _kept(blobs: Blobs, patch: bytes) -> str:
    """A patch as it stands in the world; what is no text, long, or looks like a reference goes by reference."""
    try:
        text = patch.decode()
    except UnicodeDecodeError:
        return str(await blobs.put(patch))
    if len(patch) > INLINE_BYTES or BlobReference.parse(text) is not None:
        return str(await blobs.put(patch))
    return text
