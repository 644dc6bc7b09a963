"""Seeds sessions: one task in, one SessionReady for each attempt out."""

from rollstream.environments import registry
from rollstream.environments.intake import Unreadable, read_task
from rollstream.environments.protocol import Environment, Task
from rollstream.environments.tickets import seal_task
from rollstream.errors import Refused
from rollstream.eventlog.failures import TaskFailure
from rollstream.eventlog.producer import Publisher
from rollstream.eventlog.reading import Record
from rollstream.sealing import Sealer
from rollstream.settings import Settings
from schemas.envelope import now, utc_of
from schemas.identities import event_id
from schemas.session import SessionReady, Submission
from schemas.task import TaskSubmitted

ORACLE = "oracle"
"""The one harness whose runs are given the environment's own solution."""
CHUNK = 500
"""Sessions published at a time, so that a group of thousands does not stand in memory at once."""


class SeedHandler:
    """What env_worker does with a record of `tasks.in`."""

    def __init__(self, settings: Settings, sealer: Sealer, publisher: Publisher) -> None:
        self._settings = settings
        self._sealer = sealer
        self._publisher = publisher

    async def seed(self, record: Record) -> None:
        """Seed every attempt of one task.

        Raises:
            TaskFailure: the record cannot be read, or its task cannot be played; carries what is known of the attempts.
        """
        recorded_at = utc_of(record.timestamp_ms)
        try:
            submitted = read_task(
                record.value,
                record.header_map(),
                self._settings.defaults,
                self._settings.limits.for_episode(),
                recorded_at,
            )
        except Unreadable as error:
            raise TaskFailure(error.group.sessions() if error.group else ()) from error
        try:
            sessions = self._sessions(submitted)
        except Exception as error:
            raise TaskFailure(submitted.sessions()) from error
        for start in range(0, len(sessions), CHUNK):
            await self._publisher.publish(sessions[start : start + CHUNK])

    def _sessions(self, submitted: TaskSubmitted) -> list[SessionReady]:
        environment = registry.load(submitted.environment)
        task = registry.admit(environment, submitted.row)
        seeded = environment.seed(task)
        reference = _reference(environment, task) if submitted.composition.harness == ORACLE else None
        return [
            SessionReady(
                event_id=event_id("SessionReady", ids.session),
                occurred_at=now(),
                caused_at=submitted.occurred_at,
                **ids.ids(),
                environment_version=environment.version,
                composition=submitted.composition,
                interaction=seeded.interaction,
                placement=seeded.placement,
                messages=seeded.messages,
                tools=seeded.tools,
                limits=submitted.limits,
                ticket=seal_task(self._sealer, submitted.row, ids.session),
                submitted_at=submitted.occurred_at,
                reference=reference,
            )
            for ids in submitted.sessions()
        ]


def _reference(environment: Environment[Task], task: Task) -> Submission:
    reference = environment.reference(task)
    if reference is None:
        raise Refused(f"harness {ORACLE} needs a reference solution, and this task of {environment.name} has none")
    return reference
