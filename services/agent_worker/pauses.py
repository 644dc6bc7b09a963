"""Pausing a run that can only fail: one clear message instead of a hundred thousand errored rollouts.

A refused key or a missing model fails every episode alike, so the first such failure pauses the run; a request that the server
calls invalid may be one task's own fault, so only several in a row do. A paused run's sessions go back to the log, where they
wait without holding anybody up.
"""

from collections import Counter

from rollstream.errors import ModelFailure
from rollstream.eventlog.control import RunControl
from rollstream.eventlog.producer import Publisher
from rollstream.eventlog.retries import schedule
from schemas.envelope import now
from schemas.failure import ErrorInfo
from schemas.run import RunPaused
from schemas.session import SessionReady

AT_ONCE = frozenset({"model_unauthorized", "model_payment_required", "model_forbidden", "model_not_found"})
IN_A_ROW = frozenset({"model_rejected_request"})
HOW_MANY = 5


class Pauses:
    """What one agent_worker does about runs that are paused, or should be."""

    def __init__(self, control: RunControl, publisher: Publisher, worker: str) -> None:
        self._control = control
        self._publisher = publisher
        self._worker = worker
        self._rejected: Counter[str] = Counter()

    async def parked(self, descriptor: SessionReady) -> bool:
        """Whether the session's run is paused; then its work is in the log again, as a retry that used up no attempt."""
        pause = self._control.paused(descriptor.run)
        if pause is None:
            return False
        cause = ErrorInfo(kind="run_paused", stage="agent", message=pause.reason, retryable=True)
        retry = schedule(descriptor, cause, failures=descriptor.failures, delay_s=0.0, at=now(), worker=self._worker)
        await self._publisher.publish([retry])
        return True

    async def consider(self, run: str, error: ModelFailure) -> None:
        """Pause the run if this failure says that all its episodes would fail."""
        if error.kind in IN_A_ROW:
            self._rejected[run] += 1
        hopeless = error.kind in AT_ONCE or self._rejected[run] >= HOW_MANY
        if not hopeless or self._control.paused(run) is not None:
            return
        reason = f"{error}; when that is done: `rollstream resume {run}`"
        pause = RunPaused.create(run=run, reason=reason, cause=error.kind, by=self._worker)
        await self._control.tell(pause)
        await self._publisher.publish([pause])

    def went_well(self, run: str) -> None:
        self._rejected.pop(run, None)
