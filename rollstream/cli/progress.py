"""How far a run is, from what its records say. No I/O, so that its tests are tables.

Every record may come twice: sessions and rollouts are counted by id, and of several terminal records of one rollout the one
that counts is the one with the highest (round, revision), then the first.
"""

from collections import Counter, deque
from dataclasses import dataclass

from pydantic import Field

from schemas.envelope import header_map
from schemas.rollout import Status
from schemas.values import GroupRef, Reward, Usage, Value

RATE_WINDOW_S = 30.0

Session = tuple[int, int]
"""Round and try."""


class Outcome(Value):
    """What progress needs of a RolloutScored; the rest of it can be large."""

    run: str
    group: GroupRef
    rollout: str
    round: int = 0
    revision: int = 0
    status: Status
    reward: Reward | None = None
    success: bool | None = None
    usage: Usage = Field(default=Usage())


@dataclass(frozen=True, slots=True)
class _Counted:
    """What is kept of an outcome; there may be a million of them."""

    round: int
    revision: int
    status: Status
    reward: float | None
    success: bool | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment. Numbers of rollouts, unless said otherwise."""

    total: int
    """Zero while nothing is known of the run's size."""
    done: int
    """Terminal, whatever their status."""
    seeded: int
    """Accepted by their environment at some time."""
    running: int
    """Seeded and not terminal."""
    failed: int
    """Terminal without an outcome: errored or cancelled."""
    statuses: dict[Status, int]
    rate_per_s: float
    """Terminal records in the last half minute, or since the first one."""
    eta_s: float | None
    """None while nothing gets done."""
    mean_reward: float | None
    """Of those that were scored; None when none was."""
    success_rate: float | None
    """Of those that were scored."""
    tokens: int
    """That the models wrote and read."""
    waiting: int = 0
    """Not terminal, and waiting to be tried again."""

    @property
    def is_complete(self) -> bool:
        return 0 < self.total <= self.done


class RunProgress:
    """The state of one run, built record by record.

    Args:
        expected: groups x attempts by the run's manifest; None for a run that has none, whose groups are counted as they show.
    """

    def __init__(self, expected: int | None) -> None:
        self._expected = expected
        self._group_sizes: dict[str, int] = {}
        self._seeded: dict[str, Session] = {}
        self._retries: dict[str, tuple[Session, bool]] = {}
        self._outcomes: dict[str, _Counted] = {}
        self._finished_at: deque[float] = deque()

    def group_seen(self, group: str, size: int) -> None:
        """A group of the run exists, with so many attempts."""
        self._group_sizes[group] = size

    def rollout_seeded(self, rollout: str, session: Session = (0, 0)) -> None:
        """A session of an attempt was opened."""
        self._seeded[rollout] = max(session, self._seeded.get(rollout, session))

    def retry_scheduled(self, rollout: str, following: Session, *, verification: bool = False) -> None:
        """An attempt is to go on with session `following`, or to have it verified again."""
        known = self._retries.get(rollout)
        if known is None or (following, verification) >= known:
            self._retries[rollout] = following, verification

    def rollout_ended(self, outcome: Outcome, at_s: float) -> None:
        """A terminal record, in the order of its partition; `at_s` is the log's own time of it."""
        known = self._outcomes.get(outcome.rollout)
        if known is None:
            self._finished_at.append(at_s)
        if known is None or (outcome.round, outcome.revision) > (known.round, known.revision):
            self._outcomes[outcome.rollout] = _Counted(
                outcome.round,
                outcome.revision,
                outcome.status,
                outcome.reward,
                outcome.success,
                outcome.usage.prompt_tokens + outcome.usage.completion_tokens,
            )
        self.group_seen(outcome.group.id, outcome.group.size)

    def snapshot(self, now_s: float) -> Snapshot:
        """Where the run stands at `now_s`, a Unix time."""
        total = sum(self._group_sizes.values()) if self._expected is None else self._expected
        # A resumed attempt has an outcome of an earlier round, and is on its way again.
        going_on = {rollout for rollout, outcome in self._outcomes.items() if self._newest_round(rollout) > outcome.round}
        done = len(self._outcomes) - len(going_on)
        running = len((self._seeded.keys() | going_on) - (self._outcomes.keys() - going_on))
        rate = self._rate(now_s)
        statuses = Counter(outcome.status for outcome in self._outcomes.values())
        rewards = [outcome.reward for outcome in self._outcomes.values() if outcome.reward is not None]
        successes = [outcome.success for outcome in self._outcomes.values() if outcome.success is not None]
        return Snapshot(
            total=total,
            done=done,
            seeded=len(self._seeded.keys() | self._outcomes.keys()),
            running=running,
            failed=statuses["errored"] + statuses["cancelled"],
            statuses=dict(statuses),
            rate_per_s=rate,
            eta_s=None if rate <= 0 else max(0, total - done) / rate,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            success_rate=sum(successes) / len(successes) if successes else None,
            tokens=sum(outcome.tokens for outcome in self._outcomes.values()),
            waiting=sum(self._is_waiting(rollout) for rollout in self._retries),
        )

    def _newest_round(self, rollout: str) -> int:
        opened, _ = self._seeded.get(rollout, (0, 0))
        (planned, _), _ = self._retries.get(rollout, ((0, 0), False))
        return max(opened, planned)

    def _is_waiting(self, rollout: str) -> bool:
        following, verification = self._retries[rollout]
        outcome = self._outcomes.get(rollout)
        if outcome is not None and outcome.round >= following[0]:
            return False
        opened = self._seeded.get(rollout, (-1, -1))
        return opened <= following if verification else opened < following

    def _rate(self, now_s: float) -> float:
        while self._finished_at and self._finished_at[0] < now_s - RATE_WINDOW_S:
            self._finished_at.popleft()
        if not self._finished_at:
            return 0.0
        return len(self._finished_at) / max(1.0, now_s - self._finished_at[0])


def outcome_of(value: bytes | None, headers: tuple[tuple[str, bytes], ...]) -> Outcome | None:
    """The outcome in a record of `rollouts.scored`, from its headers alone if its body is garbage; None if those are too."""
    try:
        return Outcome.model_validate_json(value or b"")
    except ValueError:
        pass
    found = header_map(headers)
    try:
        group = GroupRef(id=found["group_id"], size=int(found["group_size"]), index=int(found["group_index"]))
        return Outcome.model_validate(
            {
                "run": found["run_id"],
                "group": group,
                "rollout": found["rollout_id"],
                "round": int(found["round"]),
                "status": found["status"],
            }
        )
    except (KeyError, ValueError):
        return None


def line(snapshot: Snapshot) -> str:
    """A snapshot in one line of plain text."""
    parts = [f"{snapshot.done}/{snapshot.total} done" if snapshot.total else "no task seen yet"]
    parts += [f"{snapshot.running} running", f"{snapshot.failed} failed"]
    parts += [f"{snapshot.waiting} waiting for a retry"] if snapshot.waiting else []
    parts.append(f"{snapshot.rate_per_s:.1f}/s")
    if not snapshot.is_complete and snapshot.eta_s is not None:
        parts.append(f"{duration(snapshot.eta_s)} left")
    if snapshot.mean_reward is not None:
        parts.append(f"mean reward {snapshot.mean_reward:.3f}")
    if snapshot.success_rate is not None:
        parts.append(f"success {snapshot.success_rate:.1%}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """`4 s`, `3 min 20 s`, `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
