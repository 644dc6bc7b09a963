"""What a session holds outside its world, and how it is let go of: once, in reverse order, whatever ended the session.

As an `AsyncExitStack`, but each callback has a time of its own, and none that fails or hangs keeps the others from running.
"""

import asyncio
from collections.abc import Awaitable, Callable

from rollstream.errors import EnvironmentFailure

CleanUp = Callable[[], Awaitable[object]]

LAST_WORD_S = 1.0
"""For a callback that was cancelled to end; one that does not is left alone."""


class CleanUpStack:
    """Callbacks of one session.

    Args:
        whose: named in failures, e.g. `environment shop, session …`.
        timeout_s: of each callback.
    """

    def __init__(self, whose: str, timeout_s: float) -> None:
        self._whose = whose
        self._timeout_s = timeout_s
        self._callbacks: list[CleanUp] = []
        self._over = False

    def push(self, callback: CleanUp) -> None:
        """Let something be done when the session is over, before all that was pushed earlier.

        Raises:
            EnvironmentFailure: the session is over already, so what was just opened must be closed by whoever opened it.
        """
        if self._over:
            message = f"{self._whose} is over and cleaned up: nothing that is opened now would be closed"
            raise EnvironmentFailure(message, stage="cleanup", kind="session_over")
        self._callbacks.append(callback)

    async def run(self) -> list[EnvironmentFailure]:
        """Call everything, the last first. What a callback pushes is called next; a second run finds nothing to do.

        Returns:
            A failure of stage `cleanup` for each callback that raised or did not end in time.
        """
        failures = []
        while self._callbacks:
            failure = await self._call(self._callbacks.pop())
            if failure is not None:
                failures.append(failure)
        self._over = True
        return failures

    async def _call(self, callback: CleanUp) -> EnvironmentFailure | None:
        called = asyncio.ensure_future(_as_coroutine(callback))
        try:
            await asyncio.wait([called], timeout=self._timeout_s)
            in_time = called.done()
        finally:
            if not called.done():
                called.cancel()
                await asyncio.wait([called], timeout=LAST_WORD_S)
        if not in_time:
            message = f"{self._whose}: a clean-up did not end within {self._timeout_s:g} s"
            return EnvironmentFailure(message, stage="cleanup", kind="cleanup_timeout")
        error = asyncio.CancelledError() if called.cancelled() else called.exception()
        if error is None:
            return None
        failure = EnvironmentFailure(f"{self._whose}: a clean-up raised {error!r}", stage="cleanup", kind="cleanup_raised")
        failure.__cause__ = error
        return failure


async def _as_coroutine(callback: CleanUp) -> None:
    await callback()
