"""What can be checked of a task where it is published.

A pool may declare an environment or a harness that only its own machines have. Its tasks are accepted and wait for the pool,
whose workers check them; a name that nobody declares is refused at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream import harnesses
from rollstream.backends import Backends
from rollstream.environments import registry
from rollstream.environments.protocol import Environment, Seeded, Task
from rollstream.errors import Refused, UsageError
from rollstream.eventlog.pools import Pools, Work
from rollstream.placements import placement_of, with_backend
from rollstream.settings import Settings
from schemas.values import Composition


@dataclass(frozen=True, slots=True)
class Admitted:
    """A row that can be played."""

    composition: Composition
    """The run's, with the sandbox backend that the row takes."""
    seeded: Seeded | None
    """What the agent would see first; None where that cannot be told here."""


class Admission:
    """Checks of one publication; remembers what could not be checked here."""

    def __init__(self, pools: Pools, backends: Backends) -> None:
        self._pools = pools
        self._backends = backends
        self._unchecked: dict[tuple[str, str, str], None] = {}
        # Looking for a plug-in that is not there takes milliseconds, and a file has many rows.
        self._found: dict[Work, tuple[Environment[Task] | None, bool]] = {}

    @classmethod
    def of(cls, settings: Settings) -> "Admission":
        return cls(Pools.of(settings), Backends.of(settings))

    def check_names(self, environment: str | None, composition: Composition) -> None:
        """What is wrong before any row is read.

        Args:
            environment: None when every row names its own.

        Raises:
            UsageError: with the names there are.
        """
        harness = composition.harness
        try:
            if composition.sandbox is not None:
                self._backend(composition.sandbox)
            if environment is not None:
                self._find(Work.of(environment, composition))
            elif not self._pools.named_by("harnesses", harness):
                # Which pool has it depends on the environment, and so on the row.
                harnesses.capabilities(harness)
        except Refused as error:
            raise UsageError(str(error)) from None

    def check(self, environment: str, composition: Composition, row: Mapping[str, object]) -> Admitted:
        """One row, as far as what it needs is here.

        Raises:
            Refused: nobody declares a name, the environment does not accept the row, the harness cannot play it, or the
                sandbox backend cannot hold its box.
        """
        found, knows_harness = self._find(Work.of(environment, composition))
        if found is None:
            return Admitted(composition, None)
        task = registry.admit(found, row)
        seeded = found.seed(task)
        needs_sandbox = knows_harness and harnesses.capabilities(composition.harness).needs_sandbox
        placement = placement_of(seeded.placement, needs_sandbox)
        composition = with_backend(composition, placement, self._backends.default)
        if knows_harness:
            harnesses.check_seeded(composition, found, task, seeded)
        backend = composition.sandbox
        if placement != "none" and backend is not None and self._backend(backend):
            self._backends.check_boxes(found.name, placement, seeded, backend)
        return Admitted(composition, seeded)

    def _backend(self, name: str) -> bool:
        """Whether a backend is known here; if not, a pool declares it."""
        try:
            self._backends.at_best(name)
        except Refused as error:
            pools = self._pools.named_by("sandboxes", name)
            if not pools or error.kind != "unknown_sandbox_provider":
                raise
            for pool in pools:
                self._unchecked["sandbox", name, pool] = None
            return False
        return True

    def environment(self, name: str, composition: Composition) -> Environment[Task] | None:
        """The environment of a row, or None where only the pool that declares it has it.

        Raises:
            Refused: nobody declares it.
        """
        return self._find(Work.of(name, composition))[0]

    def notes(self) -> tuple[str, ...]:
        """A sentence for each name that is not here."""
        return tuple(
            f"{noun} {name} is not installed here: its tasks are published unchecked, and wait for pool {pool}"
            for noun, name, pool in self._unchecked
        )

    def _find(self, work: Work) -> tuple[Environment[Task] | None, bool]:
        """The environment, if it is here, and whether the harness is known here."""
        if work not in self._found:
            knows_harness = self._harness(work)
            self._found[work] = self._environment(work), knows_harness
        return self._found[work]

    def _environment(self, work: Work) -> Environment[Task] | None:
        """The environment, or None where only the pool that declares it has it."""
        name = work.environment or ""
        try:
            return registry.load(name)
        except Refused as error:
            claims = self._pools.claims_on(work)
            if claims is not None and name in claims.environments:
                self._unchecked["environment", name, self._pools.pool_of(work)] = None
                return None
            hint = self._hint(self._pools.named_by("environments", name))
            raise Refused(f"{error}{hint}", kind=error.kind) from error

    def _harness(self, work: Work) -> bool:
        """Whether the harness is known here; if not, the pool that serves `work` declares it."""
        name = work.harness or ""
        try:
            harnesses.capabilities(name)
        except Refused as error:
            claims = self._pools.claims_on(work)
            if claims is not None and name in claims.harnesses:
                self._unchecked["harness", name, self._pools.pool_of(work)] = None
                return False
            hint = self._hint(self._pools.named_by("harnesses", name))
            raise Refused(f"{error}{hint}", kind=error.kind) from error
        return True

    def _hint(self, pools: Sequence[str]) -> str:
        """What pools ask for besides a name that they declare."""
        return "".join(f"; pool {pool} serves {self._pools.describe(pool)}" for pool in pools)
