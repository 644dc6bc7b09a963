"""A circuit breaker: after several failures in a row nobody is asked for a while, then one call finds out.

Pure but for the clock, which is handed in. One breaker for each endpoint and process; what it protects is both the endpoint
and the retries of every episode that would only fail there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic


@dataclass(slots=True)
class CircuitBreaker:
    """Closed (calls pass), open (nobody passes until a moment), half open (one call passes and decides).

    Attributes:
        threshold: failures in a row that open it.
        first_s: how long it stays open the first time; doubles with each failed probe, up to `most_s`.
    """

    threshold: int = 5
    first_s: float = 2.0
    most_s: float = 60.0
    clock: Callable[[], float] = monotonic
    _failures: int = 0
    _open_until: float | None = None
    _open_for_s: float = 0.0
    _probing: bool = False

    def wait_s(self) -> float:
        """0 when a call may be made now (and then `succeeded`, `failed` or `abandoned` must be told), else how long to wait."""
        if self._open_until is None:
            return 0.0
        left = self._open_until - self.clock()
        if left > 0:
            return left
        if self._probing:
            # Somebody is finding out; ask again when that may be known.
            return self.first_s
        self._probing = True
        return 0.0

    def succeeded(self) -> None:
        self._failures = 0
        self._open_until = None
        self._open_for_s = 0.0
        self._probing = False

    def failed(self) -> None:
        """A call failed in a way that says something about the endpoint."""
        self._failures += 1
        if self._open_until is not None and not self._probing:
            # A call from before the breaker opened: it says nothing new.
            return
        if self._probing or self._failures >= self.threshold:
            self._open_for_s = min(self._open_for_s * 2 or self.first_s, self.most_s)
            self._open_until = self.clock() + self._open_for_s
            self._probing = False

    def abandoned(self) -> None:
        """A call ended without telling anything about the endpoint (it was cancelled)."""
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._open_until is not None
