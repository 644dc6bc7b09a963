"""A patch, verified in a box that nobody has used: reset, apply, restore the tests, run them, grade.

What the agent's code can do wrong is a verdict; what our box, engine or row does wrong is an `EnvironmentFailure`, and never a
zero. `verify_in` works on any started box, wherever it comes from.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.blobs import BlobReference, BlobUnavailable
from rollstream.environments.code import verdicts
from rollstream.environments.code.archives import tar_of
from rollstream.environments.code.evaluation import Evaluation
from rollstream.environments.code.grading import EvalType, Grade, InvalidLog, TestRun, grade, grade_whole, read_run
from rollstream.environments.code.logs import LogParser
from rollstream.environments.code.patches import (
    ALREADY_APPLIED,
    MAX_PATCH_BYTES,
    RESET,
    Patch,
    Step,
    ladder,
    read_patch,
    text_of,
)
from rollstream.environments.code.protection import protected, shadows
from rollstream.environments.code.verdicts import Applied
from rollstream.environments.protocol import Blobs, Services, Verdict, require_sandboxes
from rollstream.errors import EnvironmentFailure, EpisodeTimeout
from rollstream.sandboxes.protocol import ExecResult, Sandbox
from schemas.sandbox import SandboxSpec
from schemas.session import Submission, Workspace

COMMAND_TIMEOUT_S = 300.0
"""Of a single command of ours; those that make the workspace may take as long each."""
MAX_LOG_BYTES = 4 * 1024 * 1024
"""Of the tests' output: half from its beginning, half from its end, where runners sum up."""
OVERHEAD_S = 300.0
"""What a verification may take beside its tests."""
PATCH = ".git/rollstream.patch"
SCRIPT = ".git/rollstream-eval.sh"
MAX_FILES = 10_000
"""That a patch may touch."""
PATHS_AT_ONCE = 200
NOT_WRITTEN = 97
WRITE_AND_RUN = f'cat > "$0" || exit {NOT_WRITTEN}; exec "$@"'
"""One command instead of two, since each takes its time to get into a box."""
RUN_SCRIPT = 'cat > "$0" && exec "$1" "$0" < /dev/null'
RESTORE = """for path do
    above=$path
    while above=$(dirname -- "$above"); [ "$above" != . ] && [ "$above" != / ]; do
        if [ -L "$above" ] || { [ -e "$above" ] && [ ! -d "$above" ]; }; then rm -f -- "$above"; fi
    done
    rm -rf -- "$path"
    if git cat-file -e "HEAD:$path" 2>/dev/null; then git checkout --quiet --force HEAD -- "$path" || exit 1; fi
done
unset GIT_LITERAL_PATHSPECS
"""
"""Put files back to their base, also where a link or a file stands in the way of their directories."""
LITERALLY = {"GIT_LITERAL_PATHSPECS": "1"}


@dataclass(frozen=True, slots=True)
class Repair:
    """How patches to one repository are verified.

    Attributes:
        spec: of the box.
        workspace: what stands in it, with the repository checked out at its base.
        test_patch: a diff against the base that brings the tests.
        test_files: path -> content; tests that are written over whatever stands there.
        patterns: of files whose change by the agent is undone (see `protection`).
        fail_to_pass: ids of tests; with none, all tests must pass.
    """

    spec: SandboxSpec
    workspace: Workspace
    evaluation: Evaluation
    parser: LogParser
    test_patch: bytes = b""
    test_files: Mapping[str, str] = field(default_factory=dict)
    patterns: Sequence[str] = ()
    fail_to_pass: Sequence[str] = ()
    pass_to_pass: Sequence[str] = ()
    eval_type: EvalType = "pass_and_fail"

    def grade(self, run: TestRun) -> Grade:
        """
        Raises:
            InvalidLog: the run proves nothing.
        """
        statuses = read_run(run, self.parser)
        if not self.fail_to_pass:
            return grade_whole(statuses, run, self.parser)
        return grade(statuses, self.fail_to_pass, self.pass_to_pass, eval_type=self.eval_type)


async def verify(repair: Repair, submission: Submission, services: Services) -> Verdict:
    """Score what an agent handed in.

    Raises:
        EnvironmentFailure: it could not be scored.
        SandboxUnavailable: likewise; the box failed.
        EpisodeTimeout: the tests did not come to an end.
    """
    raw = await patch_of(submission, services.blobs)
    if isinstance(raw, int):
        return verdicts.of_fault("too_large", raw)
    # In threads, here and below: what an agent wrote may be long, and other episodes share the loop.
    patch = await asyncio.to_thread(read_patch, raw)
    if not isinstance(patch, Patch):
        return verdicts.of_fault(patch, len(raw))
    if len(patch.paths) > MAX_FILES:
        return verdicts.of_fault("too_large", len(raw))
    if any(path != path.encode(errors="replace").decode() for path in patch.paths):
        # A name that is no text cannot be said to every engine, nor to the log.
        return verdicts.of_fault("unsafe_path", len(raw))
    archive = await archive_of(repair.workspace, services.blobs)
    async with require_sandboxes(services).fresh(repair.spec) as box:
        return await verify_in(box, repair, patch, archive, services.blobs)


async def patch_of(submission: Submission, blobs: Blobs | None) -> bytes | int:
    """The patch that was handed in, as text or by reference; only its size if that is too much to read."""
    artifact = submission.artifact or ""
    reference = BlobReference.parse(artifact)
    if reference is None:
        # What JSON cannot carry does not get here unescaped.
        return artifact.encode(errors="backslashreplace")
    if reference.size_bytes > MAX_PATCH_BYTES:
        return reference.size_bytes
    return await _fetched(blobs, reference)


async def archive_of(workspace: Workspace, blobs: Blobs | None) -> bytes | None:
    """The tar that a workspace names."""
    if workspace.archive is None:
        return None
    reference = BlobReference.parse(workspace.archive)
    if reference is None:
        message = f"expected the archive of a workspace as a blob reference, found {workspace.archive[:100]!r}"
        raise EnvironmentFailure(message, stage="verification", kind="bad_workspace")
    return await _fetched(blobs, reference)


async def prepare(box: Sandbox, workspace: Workspace, archive: bytes | None) -> None:
    """Make a workspace stand in a box.

    Raises:
        EnvironmentFailure: a command failed, or something did not fit.
    """
    if archive is not None:
        await _required(box, ["tar", "-xf", "-", "--no-same-owner"], stdin=archive)
    for argv in workspace.commands:
        await _required(box, argv)


async def verify_in(
    box: Sandbox, repair: Repair, patch: Patch, archive: bytes | None = None, blobs: Blobs | None = None
) -> Verdict:
    """Score a patch in a box that has just been started."""
    size = len(patch.content)
    await prepare(box, repair.workspace, archive)
    tests = await _test_patch(box, repair)
    undone = await _undone(box, repair, patch)
    applied = await apply(box, patch)
    if isinstance(applied, str):
        return verdicts.of_refusal("patch_not_applied", size, applied)
    said = await _restore(box, repair, tests, undone)
    if said is not None:
        return verdicts.of_refusal("tests_not_restored", size, said)
    log, run = await run_tests(box, repair.evaluation, blobs)
    try:
        found = await asyncio.to_thread(repair.grade, run)
    except InvalidLog as error:
        raise _invalid(error, log) from None
    ours = {*undone, *(tests.paths if tests else ()), *repair.test_files}
    told = Applied(applied, [path for path in patch.paths if path in ours])
    return verdicts.of_grade(found, told, size, run.exit_code, log)


async def apply(box: Sandbox, patch: Patch) -> Step | str | None:
    """Get a patch into the tree by the strictest tool that takes it.

    Returns:
        That step; None if the tree has the patch already; what the last tool said if none of them takes it.
    """
    said = ""
    for step in ladder(patch):
        command = ["sh", "-c", WRITE_AND_RUN, PATCH, *step.argv(PATCH)]
        done = await _run(box, command, stdin=text_of(patch, step.ending))
        if done.ok:
            return step
        if done.exit_code == NOT_WRITTEN:
            raise _not_made("a patch cannot be written", done)
        # Tools that are not installed have nothing to say.
        said = done.stderr.text if done.exit_code != 127 else said
        for argv in RESET:
            await _required(box, argv)
    done = await _run(box, (*ALREADY_APPLIED, PATCH))
    return None if done.ok else said


async def run_tests(box: Sandbox, evaluation: Evaluation, blobs: Blobs | None) -> tuple[dict[str, object], TestRun]:
    """Run the tests as the agent's user, and say where their log is kept.

    Raises:
        EpisodeTimeout: they do not end.
        EnvironmentFailure: their log proves nothing.
    """
    word = secrets.token_hex(16)
    done = await box.exec(
        ["sh", "-c", RUN_SCRIPT, SCRIPT, evaluation.shell],
        stdin=evaluation.script(word).encode(),
        timeout_s=evaluation.timeout_s,
        max_output_bytes=MAX_LOG_BYTES,
        user="agent",
    )
    text = done.stdout.text
    log: dict[str, object] = {"log_bytes": done.stdout.size, "test_s": round(done.duration_s, 3)}
    if blobs is not None:
        log["log"] = str(await _kept_log(blobs, text))
    if done.timed_out:
        raise EpisodeTimeout(f"the tests did not end within {evaluation.timeout_s:g} s{_kept(log)}", stage="verification")
    try:
        return log, await asyncio.to_thread(evaluation.read, text, done.exit_code, word)
    except InvalidLog as error:
        memory = "; something was killed for want of memory" if done.oom_killed else ""
        raise _invalid(error, log, memory) from None


async def _test_patch(box: Sandbox, repair: Repair) -> Patch | None:
    """The row's own tests, made sure to fit its base: if they do not later, the agent's patch is at fault."""
    if not repair.test_patch.strip():
        return None
    tests = read_patch(repair.test_patch)
    if not isinstance(tests, Patch):
        raise EnvironmentFailure(f"the test patch is no patch: {tests}", stage="verification", kind="bad_tests")
    done = await _run(box, ["git", "apply", "--check", "-"], stdin=tests.content)
    if not done.ok:
        message = f"the test patch does not fit the base: {_last_words(done)}"
        raise EnvironmentFailure(message, stage="verification", kind="bad_tests")
    return tests


async def _restore(box: Sandbox, repair: Repair, tests: Patch | None, undone: Sequence[str]) -> str | None:
    """Put tests, and what runs them, in the place of whatever the agent made of them. What was said if that cannot be."""
    paths = list(dict.fromkeys([*undone, *(tests.paths if tests else ()), *repair.test_files]))
    files = {path: (text.encode(errors="backslashreplace"), 0o644) for path, text in repair.test_files.items()}
    steps = [
        ("exec git apply -", tests.content if tests else b""),
        ("exec tar -xf - --no-same-owner", tar_of(files) if files else b""),
    ]
    needed = [(command, stdin) for command, stdin in steps if stdin] or [(":", b"")]
    # A command line has a limit; what is left over goes with the first step.
    needed = [(":", b"")] * (len(paths) // PATHS_AT_ONCE) + needed
    for number, (command, stdin) in enumerate(needed):
        some = paths[number * PATHS_AT_ONCE : (number + 1) * PATHS_AT_ONCE]
        done = await _run(box, ["sh", "-c", f"{RESTORE}{command}", "sh", *some], stdin=stdin, env=LITERALLY)
        if not done.ok:
            return done.stderr.text
    return None


async def _undone(box: Sandbox, repair: Repair, patch: Patch) -> Sequence[str]:
    """Files of the patch that are put back."""
    found = protected(patch.paths, repair.patterns, ())
    if any(shadows(path, ()) for path in found):
        tops = await _required(box, ["git", "ls-tree", "-z", "--name-only", "HEAD"])
        found = protected(patch.paths, repair.patterns, tops.stdout.text.split("\0"))
    return found


async def _run(box: Sandbox, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> ExecResult:
    """
    Raises:
        EpisodeTimeout: it does not end.
    """
    done = await box.exec(argv, stdin=stdin, env=env, timeout_s=COMMAND_TIMEOUT_S)
    if done.timed_out:
        raise EpisodeTimeout(f"{' '.join(argv)[:80]!r} did not end within {COMMAND_TIMEOUT_S:g} s", stage="verification")
    return done


async def _required(box: Sandbox, argv: Sequence[str], *, stdin: bytes = b"") -> ExecResult:
    """A command that fails only if the box, the image or the row is not what it should be."""
    done = await _run(box, argv, stdin=stdin)
    if not done.ok:
        raise _not_made(f"the workspace cannot be made: {' '.join(argv)[:80]!r} ended with {done.exit_code}", done)
    return done


def _not_made(what: str, done: ExecResult) -> EnvironmentFailure:
    return EnvironmentFailure(f"{what}: {_last_words(done)}", stage="verification", kind="workspace", retryable=True)


def _invalid(error: InvalidLog, log: Mapping[str, object], memory: str = "") -> EnvironmentFailure:
    message = f"the tests prove nothing: {error}{memory}{_kept(log)}"
    return EnvironmentFailure(message, stage="verification", kind="invalid_log", retryable=True)


def _kept(log: Mapping[str, object]) -> str:
    return f"; their log is {log['log']}" if "log" in log else ""


def _last_words(done: ExecResult) -> str:
    lines = (done.stderr.text or done.stdout.text).strip().splitlines()
    return "; ".join(line[:300] for line in lines[-3:]) or "it said nothing"


async def _fetched(blobs: Blobs | None, reference: BlobReference) -> bytes:
    if blobs is None:
        raise EnvironmentFailure(f"expected blobs to read {reference} from, found none", stage="verification", kind="no_blobs")
    try:
        return await blobs.get(reference)
    except BlobUnavailable as error:
        raise _of_blobs(error) from error


async def _kept_log(blobs: Blobs, text: str) -> BlobReference:
    try:
        return await blobs.put(text.encode())
    except BlobUnavailable as error:
        raise _of_blobs(error) from error


def _of_blobs(error: BlobUnavailable) -> EnvironmentFailure:
    """As a failure of verification: it is that which is tried again, and not the agent."""
    return EnvironmentFailure(str(error), stage="verification", kind=error.kind, retryable=error.retryable)
