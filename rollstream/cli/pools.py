"""What commands say of pools: which ones nobody serves, and how much of a run waits for each."""

from collections.abc import Mapping, Sequence

from rollstream.eventlog.groups import Consumption, consumptions_of
from rollstream.eventlog.pools import Pools, Work
from rollstream.settings import DEFAULT_POOL
from schemas.run import RunPublished
from topics.catalogue import ENV_ACTIONS


def unserved(pools: Pools, unattended: Sequence[Consumption]) -> list[str]:
    """The pools of which nobody consumes anything."""
    # Actions are among the unattended only where some wait.
    asked = {pool: {one for one in consumptions_of(pool) if one.topic is not ENV_ACTIONS} for pool in pools.names}
    return [pool for pool, consumptions in asked.items() if consumptions <= set(unattended)]


def nobody_serves(pools: Pools, pool: str, waiting: str = "") -> str:
    """`pool gpu: nobody serves it, 12 records wait (environment swe)`.

    Args:
        waiting: how much of what waits, such as `12 records`; empty where nobody has counted.
    """
    return f"pool {pool}: nobody serves it{f', {waiting} wait' if waiting else ''} ({pools.describe(pool)})"


def remedy(pool: str) -> str:
    """What to do about a pool, or about one worker of it, that is missing."""
    return "rollstream up" if pool == DEFAULT_POOL else f"rollstream up --pool {pool}"


class PoolsOfRun:
    """How many attempts of one run have not ended, by the pool that they wait for. Pure: told by headers, in any order.

    Args:
        manifest: of a run that has one: then all its attempts are known before their tasks are seen.
    """

    def __init__(self, pools: Pools, manifest: RunPublished | None) -> None:
        self.pools = pools
        self._manifest = manifest
        self._groups: dict[str, tuple[str, int]] = {}
        self._ended: dict[str, tuple[int, str]] = {}
        """Rollout -> round, and group."""

    def take(self, headers: Mapping[str, str]) -> None:
        """Take in a record of the run, whatever it is."""
        group, size = headers.get("group_id"), headers.get("group_size", "")
        if group is None or not size.isdigit():
            return
        # A terminal record says no harness: what other records of its group say holds.
        if group not in self._groups or "harness" in headers:
            self._groups[group] = (self._pool_of(headers), int(size))
        rollout, round_ = headers.get("rollout_id", ""), headers.get("next_round", headers.get("round", ""))
        if not rollout or not round_.isdigit():
            return
        ended = self._ended.get(rollout)
        if "status" in headers:
            self._ended[rollout] = (max(int(round_), ended[0] if ended else 0), group)
        elif ended is not None and ended[0] < int(round_):
            del self._ended[rollout]

    def waiting(self) -> dict[str, int]:
        """Pool -> attempts that have not ended; only pools that have any."""
        attempts: dict[str, int] = {}
        for pool, count in self._attempts():
            attempts[pool] = attempts.get(pool, 0) + count
        for _, group in self._ended.values():
            pool, _ = self._groups[group]
            attempts[pool] = attempts.get(pool, 0) - 1
        return {pool: count for pool, count in attempts.items() if count > 0}

    def _attempts(self) -> Sequence[tuple[str, int]]:
        if self._manifest is None:
            return list(self._groups.values())
        of_environment = self._manifest.environments.items()
        works = [(Work.of(name, self._manifest.composition), groups) for name, groups in of_environment]
        return [(self.pools.pool_of(work), groups * self._manifest.attempts) for work, groups in works]

    def _pool_of(self, headers: Mapping[str, str]) -> str:
        if self._manifest is not None and "harness" not in headers:
            return self.pools.pool_of(Work.of(headers.get("environment", ""), self._manifest.composition))
        return self.pools.pool_of(Work.of_headers(headers))
