"""Which recorded steps an execution goes on from, when the one before it died. Pure.

Each step names the one before it, so a trajectory is a chain. Of several that executions of one session have left, the one
whose last step has the highest fence holds: a zombie's steps, made after another execution took over, hang on no later chain.
"""

from collections.abc import Iterable

from rollstream.models.protocol import Completion
from schemas.events import UndecodableEvent, decode
from schemas.step import AgentStepped


def read_steps(raw: Iterable[bytes]) -> list[AgentStepped]:
    """Recorded steps in the order of the log, without what cannot be read."""
    steps = []
    for value in raw:
        try:
            steps.append(decode(value, AgentStepped))
        except UndecodableEvent:
            # The store has it as a dead row; a chain through it is broken, and is not gone on from.
            continue
    return steps


def consistent_prefix(steps: Iterable[AgentStepped]) -> list[AgentStepped]:
    """The trajectory to go on from, first step first; empty when there is none.

    Args:
        steps: of one session, in the order of the log.
    """
    known: dict[str, AgentStepped] = {}
    for step in steps:
        if step.source == "agent":
            # Two contents under one id: the first by offset counts.
            known.setdefault(step.event_id, step)
    best: list[AgentStepped] = []
    for last in known.values():
        if not best or (last.execution.fence, last.index) > (best[-1].execution.fence, best[-1].index):
            best = _chain(known, last) or best
    return best


def _chain(known: dict[str, AgentStepped], last: AgentStepped) -> list[AgentStepped]:
    """The steps that lead to `last`; empty when one is missing."""
    chain = [last]
    while chain[-1].index > 0:
        before = known.get(chain[-1].previous or "")
        if before is None or before.index != chain[-1].index - 1:
            return []
        chain.append(before)
    return chain[::-1]


def completion_of(step: AgentStepped) -> Completion:
    """The answer that a step recorded, as the model gave it."""
    return Completion(
        message=step.message,
        finish_reason=step.call.finish_reason,
        usage=step.call.usage,
        response=step.response,
        model=step.call.model,
        sampling=step.call.sampling,
        started_at=step.call.started_at,
        duration_s=step.call.duration_s,
        attempts=step.call.attempts,
        escaped=step.escaped,
    )
