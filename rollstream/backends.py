"""Which sandbox backend a run gets, and what can be known of it where the run is published.

A backend is a provider by its name. What it holds on the worker's machine only that machine can say; what it can hold on none
is refused here, before anything is on the log.
"""

from dataclasses import dataclass, field

from rollstream.environments.boxes import BoxWorld
from rollstream.environments.protocol import Seeded
from rollstream.errors import Refused, Stage
from rollstream.placements import agent_box
from rollstream.sandboxes import registry
from rollstream.sandboxes.protocol import Enforces, unenforced
from rollstream.settings import SandboxSettings, Settings
from schemas.sandbox import SandboxSpec
from schemas.session import PLACEMENTS_WITH_A_BOX, Placement


def default_backend(settings: Settings) -> str:
    """The backend of a run that takes one and names none."""
    return settings.defaults.sandbox or registry.default_name(settings.sandboxes)


@dataclass(frozen=True, slots=True)
class Backends:
    """The backends that can be loaded here. Asks no engine."""

    settings: SandboxSettings
    default: str
    stage: Stage = "admission"
    _known: dict[str, Enforces] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings) -> "Backends":
        return cls(settings.sandboxes, default_backend(settings))

    def at_best(self, name: str) -> Enforces:
        """What a backend can hold on a machine that has everything.

        Raises:
            Refused: nobody provides it (the sentence lists the names there are), or it may not be used.
        """
        if name not in self._known:
            self._known[name] = registry.load(self.settings, self.stage, name).at_best
        return self._known[name]

    def check(self, name: str, spec: SandboxSpec) -> None:
        """Make sure that a backend can hold a box to its specification on some machine.

        Raises:
            Refused: with the sentence why not.
        """
        sentence = unenforced(name, self.at_best(name), spec)
        if sentence is not None:
            raise Refused(sentence, stage=self.stage, kind="sandbox_policy")

    def check_boxes(self, environment: str, placement: Placement, seeded: Seeded, name: str) -> None:
        """Make sure that a backend can hold the boxes of a session: the agent's, and the world's if that is one.

        Raises:
            Refused: it cannot, or nobody describes a box for the agent.
        """
        spec = agent_box(placement, seeded.sandbox, self.settings.agent)
        if spec is None and placement in PLACEMENTS_WITH_A_BOX:
            raise Refused(f"environment {environment} asks for placement {placement}, and describes no sandbox for it")
        for one in (spec, seeded.world.spec if isinstance(seeded.world, BoxWorld) else None):
            if one is not None:
                self.check(name, one)
