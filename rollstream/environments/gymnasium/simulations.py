"""Gymnasium's own objects, kept running between two actions where there is room.

A simulation cannot be written down, so a world keeps how it came about: id, arguments, seed, actions. Whoever has no simulation
at that point makes one again; whoever has it goes on. Forgetting is always sound.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.environments.gymnasium.wording import ActionValue
from rollstream.errors import EnvironmentFailure, Refused

RESERVED = frozenset({"id", "render_mode", "disable_env_checker", "vectorization_mode", "vector_kwargs"})
"""Arguments of `make` that are ours."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a simulation is made from."""

    env_id: str
    kwargs: Mapping[str, Any]
    seed: int

    def digest(self) -> str:
        """Names the simulation before its first action."""
        body = orjson.dumps([self.env_id, self.kwargs, self.seed], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(body).hexdigest()


def next_digest(digest: str, action: ActionValue) -> str:
    """Names the simulation after one more action: a chain, so that a long episode costs no more than a short one."""
    return hashlib.sha256(digest.encode() + orjson.dumps(action)).hexdigest()


@dataclass(frozen=True, slots=True)
class Moved:
    """What one action brought about."""

    observation: Any
    drawing: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Simulations:
    """Running simulations by digest, at most so many."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._running: OrderedDict[str, Any] = OrderedDict()
        self._draws: dict[str, bool] = {}
        # `step` works in threads, so that a slow world holds up nobody else.
        self._lock = threading.Lock()
        self.refolded = 0
        """How many actions were done again because their simulation was not running here."""

    def begin(self, origin: Origin) -> tuple[Any, Any, Any]:
        """A new simulation, its first observation and drawing.

        Raises:
            Refused: there is no such world, or it does not take these arguments.
        """
        simulation = self._made(origin)
        try:
            observation, _ = simulation.reset(seed=origin.seed)
            return simulation, observation, _drawing(simulation)
        except Exception as error:
            raise Refused(
                f"gymnasium: {origin.env_id} cannot be reset: {type(error).__name__}: {error}", stage="seed"
            ) from error

    def move(self, origin: Origin, digest: str, before: list[ActionValue], action: ActionValue) -> Moved:
        """Do one action after those before it.

        Raises:
            EnvironmentFailure: the world raised; that is never an agent's fault, whose actions are checked before.
        """
        with self._lock:
            simulation = self._running.pop(digest, None)
        try:
            if simulation is None:
                simulation, _, _ = self.begin(origin)
                for earlier in before:
                    simulation.step(earlier)
                self.refolded += len(before)
            observation, reward, terminated, truncated, info = simulation.step(action)
            moved = Moved(observation, _drawing(simulation), float(reward), bool(terminated), bool(truncated), info)
        except Refused:
            raise
        except Exception as error:
            message = f"gymnasium: {origin.env_id} raised {type(error).__name__}: {error}"
            raise EnvironmentFailure(message, stage="agent", kind="step_raised") from error
        self._keep(next_digest(digest, action), simulation, over=moved.terminated or moved.truncated)
        return moved

    def _keep(self, digest: str, simulation: Any, *, over: bool) -> None:
        gone = [simulation] if over else []
        with self._lock:
            if not over:
                self._running[digest] = simulation
            while len(self._running) > self._capacity:
                gone.append(self._running.popitem(last=False)[1])
        for one in gone:
            one.close()

    def _made(self, origin: Origin) -> Any:
        gymnasium = library()
        # `module:Name` would import whatever module a row names.
        if ":" in origin.env_id:
            raise Refused(f"gymnasium: expected the id of a registered environment, found {origin.env_id!r:.100}")
        if reserved := sorted(RESERVED & origin.kwargs.keys()):
            raise Refused(
                f"gymnasium: expected env_kwargs of the world, found {', '.join(reserved)}, which the environment chooses"
            )
        try:
            if origin.env_id not in self._draws:
                first = gymnasium.make(origin.env_id, disable_env_checker=True, **origin.kwargs)
                self._draws[origin.env_id] = "ansi" in (first.metadata.get("render_modes") or ())
                first.close()
            mode = {"render_mode": "ansi"} if self._draws[origin.env_id] else {}
            return gymnasium.make(origin.env_id, disable_env_checker=True, **mode, **origin.kwargs)
        except Exception as error:
            found = " ".join(str(error).split())
            raise Refused(f"gymnasium: {origin.env_id!r:.100} cannot be made: {found:.300}", kind="unknown_world") from None


def library() -> Any:
    """Gymnasium itself.

    Raises:
        Refused: it is not installed.
    """
    try:
        # Imported here because it is optional, and takes as long as all the rest of a worker.
        import gymnasium
    except ImportError as error:
        raise Refused(f"environment gymnasium needs the package gymnasium: pip install gymnasium ({error})") from None
    # Its remarks on versions go to whoever published the task, not to a worker's log at every step.
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    return gymnasium


def _drawing(simulation: Any) -> Any:
    return simulation.render() if simulation.render_mode == "ansi" else None
