"""Pools: fleets of workers that each serve their own environments, harnesses and sandboxes. Pure.

Every record belongs to exactly one pool, which is a function of what its headers say and of the `[pools]` sections alone: so
fleets that read the same sections agree without talking to each other. The pool a record belongs to handles it or ends it;
all others ack it, undecoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollstream.settings import DEFAULT_POOL, PoolSettings, Settings
from schemas.task import TaskSubmitted
from schemas.values import Composition
from topics.catalogue import TASKS_IN, Topic


@dataclass(frozen=True, slots=True)
class Work:
    """What a record asks of whoever handles it. None where it asks for none, or where nobody can tell."""

    environment: str | None
    harness: str | None
    sandbox: str | None = None

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> "Work":
        return cls(headers.get("environment"), headers.get("harness"), headers.get("sandbox"))

    @classmethod
    def of(cls, environment: str, composition: Composition) -> "Work":
        return cls(environment, composition.harness, composition.sandbox)


class Pools:
    """The pools of an installation: those that `[pools]` declares, and the default one for everything else."""

    def __init__(self, claims: Mapping[str, PoolSettings]) -> None:
        self._claims = dict(sorted(claims.items()))

    @classmethod
    def of(cls, settings: Settings) -> "Pools":
        return cls(settings.pools)

    @property
    def declared(self) -> tuple[str, ...]:
        """In the order of their names, which is the order in which they are asked. The default pool is not among them."""
        return tuple(self._claims)

    @property
    def names(self) -> tuple[str, ...]:
        return (DEFAULT_POOL, *self._claims)

    def pool_of(self, work: Work) -> str:
        """The one pool that serves `work`: the first by name that claims it, else the default pool."""
        for name, claims in self._claims.items():
            if _claims(claims, work):
                return name
        return DEFAULT_POOL

    def told_by(self, topic: Topic, headers: Mapping[str, str]) -> str | None:
        """The pool of a record by its headers alone, or None where only its body can tell: tasks in other people's form."""
        if topic is TASKS_IN and not _are_ours(headers):
            return None
        return self.pool_of(Work.of_headers(headers))

    def of_task(self, headers: Mapping[str, str], task: TaskSubmitted | None) -> str:
        """The pool of a record of `tasks.in`.

        Args:
            task: what its body was read as, by the same `[defaults]` everywhere; None if it is no task that anybody can read.
                Then it is the default pool's, which dead-letters it.
        """
        told = self.told_by(TASKS_IN, headers)
        if told is not None:
            return told
        return DEFAULT_POOL if task is None else self.pool_of(Work.of(task.environment, task.composition))

    def claims_on(self, work: Work) -> PoolSettings | None:
        """What the pool that serves `work` declares; None of the default pool. What it names need not be known elsewhere."""
        return self._claims.get(self.pool_of(work))

    def named_by(self, dimension: Literal["environments", "harnesses", "sandboxes"], name: str) -> list[str]:
        """The pools that name something, whatever else they ask for."""
        return [pool for pool, claims in self._claims.items() if name in claims.claims()[dimension]]

    def describe(self, name: str) -> str:
        """What a pool claims, as people read it: `environments swe, terminal; harness cli`."""
        claims = self._claims.get(name)
        if claims is None:
            return "what no other pool claims"
        named = (("environment", claims.environments), ("harness", claims.harnesses), ("sandbox", claims.sandboxes))
        return "; ".join(f"{_plural(noun, len(names))} {', '.join(names)}" for noun, names in named if names)


def _claims(claims: PoolSettings, work: Work) -> bool:
    return (
        (not claims.environments or work.environment in claims.environments)
        and (not claims.harnesses or work.harness in claims.harnesses)
        and (not claims.sandboxes or work.sandbox in claims.sandboxes)
    )


def _are_ours(headers: Mapping[str, str]) -> bool:
    """Whether a task's headers say what its body says. Only we write them so; others' are mere defaults of the body."""
    return headers.get("ce_type") == "TaskSubmitted" and "environment" in headers and "harness" in headers


def _plural(noun: str, count: int) -> str:
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "x")) else f"{noun}s"
