"""From `episodes.completed` to a terminal record, by a real verifier_worker with real boxes."""

from pathlib import Path

import pytest

from rollstream.blobs import BlobStore
from rollstream.environments.tickets import Tickets
from rollstream.sandboxes.bubblewrap import BubblewrapProvider
from rollstream.sealing import load_sealer
from rollstream.settings import RetrySettings, Settings
from schemas.episode import EpisodeCompleted
from schemas.retry import RetryScheduled
from schemas.sandbox import SandboxLeased, SandboxReleased
from schemas.session import Submission
from schemas.task import TaskSubmitted
from schemas.values import Composition, TaskRef
from schemas.verdict import VerdictReached
from tests.events import START, Attempt
from tests.flow.flows import pipeline, publish, read_events, terminal
from tests.sandboxes.repairing import FIXED, Verifying

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
ENDLESS = "while True:\n    pass\n"


async def test_a_patch_ends_in_one_terminal_record_whatever_becomes_of_its_tests(
    topics: None, settings: Settings, bubblewrap: None, tmp_path: Path
) -> None:
    settings = settings.model_copy(
        update={"retries": RetrySettings(verification_attempts=2, first_delay_s=0.1, factor=1.0, most_delay_s=1.0)}
    )
    bench = Verifying(BubblewrapProvider("verification"), tmp_path)
    bench.blobs = BlobStore.of(settings)
    tickets = Tickets.of(settings, load_sealer(settings))
    patches = {"good": bench.patch({"lib.py": FIXED}), "none": "", "endless": bench.patch({"lib.py": ENDLESS})}

    async def completed(name: str) -> EpisodeCompleted:
        row = bench.row(test_timeout_s=3 if name == "endless" else 100)
        task = TaskSubmitted.create(
            run="r",
            environment="code_repair",
            task=TaskRef(id=name),
            row=row,
            at=START,
            composition=Composition(harness="noop", sandbox="bubblewrap"),
        )
        attempt = Attempt(task)
        artifact = str(await bench.blobs.put(patches[name].encode())) if name == "good" else patches[name]
        ticket = await tickets.seal_task(row, attempt.session)
        return attempt.completed().model_copy(update={"submission": Submission(artifact=artifact), "ticket": ticket})

    episodes = {name: await completed(name) for name in patches}
    async with pipeline(settings, ["verifier_worker"]):
        await publish(settings, *episodes.values())
        found = {record.session: record for record in await terminal(settings, 3)}

    good, none, endless = (found[episodes[name].session] for name in patches)
    assert [(one.status, one.reward, one.success) for one in (good, none)] == [
        ("completed", 1.0, True),
        ("completed", 0.0, False),
    ]
    assert (endless.status, endless.reward) == ("errored", None)
    assert endless.error is not None
    assert (endless.error.kind, endless.error.stage) == ("timeout", "verification")
    verdicts = {verdict.session: verdict for verdict in await read_events(settings, VerdictReached)}
    assert verdicts[none.session].diagnostics["patch_exists"] is False
    assert endless.session not in verdicts
    assert {retry.session for retry in await read_events(settings, RetryScheduled)} == {endless.session}
    # One box for the good patch, one for each try of the endless one, none for nothing.
    leased = [event for event in await read_events(settings, SandboxLeased) if event.renewal == 0]
    assert sorted(str(event.holder.session) for event in leased) == sorted([good.session, endless.session, endless.session])
    assert {event.sandbox for event in await read_events(settings, SandboxReleased)} == {event.sandbox for event in leased}
