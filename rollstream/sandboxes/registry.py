"""Sandbox providers by name.

Shipped ones stand in a literal dict; third-party ones come through the entry point group `rollstream.sandboxes`: a class or
function that takes the settings' section and a stage.
"""

import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points

from rollstream.errors import Refused, Stage
from rollstream.sandboxes.bubblewrap import BubblewrapProvider
from rollstream.sandboxes.local import LocalProvider
from rollstream.sandboxes.protocol import SandboxProvider
from rollstream.settings import SandboxSettings

ENTRY_POINTS = "rollstream.sandboxes"
Factory = Callable[[SandboxSettings, Stage], SandboxProvider]


def _docker(settings: SandboxSettings, stage: Stage) -> SandboxProvider:
    # Imported by whoever uses it: the SDK takes a quarter of a second and 20 MB.
    from rollstream.sandboxes.docker import DockerProvider

    return DockerProvider(stage, image=settings.image)


def _bubblewrap(settings: SandboxSettings, stage: Stage) -> SandboxProvider:
    return BubblewrapProvider(stage)


def _local(settings: SandboxSettings, stage: Stage) -> SandboxProvider:
    if not settings.unsafe_local:
        message = (
            "the sandbox provider local runs commands of agents with your own rights: --unsafe-local of `run` and `up`, or "
            "the setting sandboxes.unsafe_local, allows it"
        )
        raise Refused(message, stage=stage, kind="sandbox_policy")
    return LocalProvider(stage)


PROVIDERS: dict[str, Factory] = {"docker": _docker, "bubblewrap": _bubblewrap, "local": _local}


def names() -> list[str]:
    """Every provider that can be loaded here, shipped and installed."""
    return sorted({*PROVIDERS, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def default_name(settings: SandboxSettings) -> str:
    """The provider of a run that names none: the settings', else one without a daemon where the kernel allows it."""
    return settings.provider or ("bubblewrap" if sys.platform == "linux" else "docker")


def load(settings: SandboxSettings, stage: Stage, name: str | None = None) -> SandboxProvider:
    """A provider whose failures say that they happened at `stage`. Asks no engine yet.

    Args:
        name: by default, the one that the settings name.

    Raises:
        Refused: nobody provides it, it may not be used, or what provides it cannot be imported.
    """
    name = name or default_name(settings)
    if name in PROVIDERS:
        return PROVIDERS[name](settings, stage)
    for point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            provider: SandboxProvider = point.load()(settings, stage)
        except Refused:
            raise
        except Exception as error:
            message = f"sandbox provider {name} cannot be loaded from {point.value}: {type(error).__name__}: {error}"
            raise Refused(message, stage=stage, kind="sandbox_provider_broken") from error
        if provider.name != name:
            message = f"expected a sandbox provider called {name} at {point.value}, found one called {provider.name}"
            raise Refused(message, stage=stage, kind="sandbox_provider_broken")
        return provider
    known = names()
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    message = f"expected one of the sandbox providers {', '.join(known)}, found {name[:100]!r}{hint}"
    raise Refused(message, stage=stage, kind="unknown_sandbox_provider")
