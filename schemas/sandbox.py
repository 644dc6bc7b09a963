"""Sandboxes: what a box must be, and who holds one.

The specification is a policy: a field that a reader does not know is refused, because ignoring it would run the box open.
"""

from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from schemas.envelope import Event, Headers, now
from schemas.identities import event_id
from schemas.values import Name, Value

NetworkPolicy = Literal["none", "gateway", "allowlist", "public"]
User = Literal["agent", "root"]


class SandboxSpec(Value):
    """What a box must be, for any provider. A provider that cannot enforce one of its limits refuses it."""

    model_config = ConfigDict(extra="forbid")

    image: str | None = None
    """What the box is made of, in the provider's own terms; null takes what the provider has by default."""
    workdir: Annotated[str, Field(pattern=r"^/.+")] = "/workspace"
    """Where commands run and what they may write; a provider without a file system of its own says where that is instead."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Path, relative to `workdir` or absolute -> text; there before the first command."""
    cpus: Annotated[float, Field(gt=0)] | None = 1.0
    """Null, here and below, is "not limited", which every provider can do."""
    memory_mib: Annotated[int, Field(ge=16)] | None = 1024
    pids: Annotated[int, Field(ge=8)] | None = 256
    disk_mib: Annotated[int, Field(ge=1)] | None = 512
    """Of `workdir`, and as much again of `/tmp`, the home directory and `/dev/shm` each; what stands there may count as
    memory, too. Null makes everything else writable as well, where the image lets the user."""
    network: NetworkPolicy = "none"
    """`gateway`: no network but a socket that the holder passes in. `allowlist`: `allowed_hosts` and nothing else."""
    allowed_hosts: tuple[str, ...] = ()
    ttl_s: Annotated[float, Field(ge=1)] = 3600.0
    """The box ends by itself after so long, whoever is left to end it."""
    user: User = "agent"
    """Who runs commands that do not say otherwise: `agent` is uid 1000, `root` has no capabilities."""

    def shown(self) -> "SandboxSpec":
        """Without environment and files, which may hold keys, or tell what grades."""
        return self.model_copy(update={"env": {}, "files": {}})


class SandboxHolder(Value):
    """On whose behalf a box exists."""

    worker: Name
    """The process, for people: `agent_worker@host:1`."""
    run: Name | None = None
    session: Name | None = None
    """Null for a box that belongs to no session, such as a warm one."""
    consumer_group: Name | None = None
    """Whose generation `fence` is; fences of different consumer groups do not compare."""
    fence: int | None = None
    """Of the execution; a box of the same session and consumer group under a lower one is nobody's any more."""


class SandboxEvent(Event):
    """An event about one box, keyed by it."""

    sandbox: Name

    def key(self) -> bytes:
        return self.sandbox.encode()

    def headers(self) -> Headers:
        return [*super().headers(), ("sandbox_id", self.sandbox.encode())]


class SandboxLeased(SandboxEvent):
    """A box is held until `expires_at`: said before it is started, and again when use renews it."""

    kind: Literal["SandboxLeased"] = "SandboxLeased"
    provider: Name
    installation: Name
    """Kafka cluster and topic prefix: a box of another installation is never touched."""
    host: Name
    """The machine that the box is on, as its provider knows it."""
    holder: SandboxHolder
    renewal: Annotated[int, Field(ge=0)] = 0
    expires_at: AwareDatetime
    spec: SandboxSpec
    """As far as it may be `shown`."""

    @classmethod
    def create(
        cls,
        sandbox: str,
        *,
        provider: str,
        installation: str,
        host: str,
        holder: SandboxHolder,
        spec: SandboxSpec,
        lease_s: float,
        at: datetime | None = None,
    ) -> "SandboxLeased":
        at = at or now()
        return cls(
            event_id=event_id("SandboxLeased", sandbox, 0),
            occurred_at=at,
            caused_at=at,
            sandbox=sandbox,
            provider=provider,
            installation=installation,
            host=host,
            holder=holder,
            expires_at=at + timedelta(seconds=lease_s),
            spec=spec.shown(),
        )

    def renewed(self, lease_s: float, at: datetime | None = None) -> "SandboxLeased":
        """The lease again, from now on; never shorter than it was."""
        at = at or now()
        return self.model_copy(
            update={
                "event_id": event_id("SandboxLeased", self.event_id, self.renewal + 1),
                "occurred_at": at,
                "caused_at": self.occurred_at,
                "renewal": self.renewal + 1,
                "expires_at": max(self.expires_at, at + timedelta(seconds=lease_s)),
            }
        )

    def handed_over(self, holder: SandboxHolder, lease_s: float) -> "SandboxLeased":
        """The lease again, in the name of a session that gets a box which was nobody's."""
        return self.renewed(lease_s).model_copy(update={"holder": holder})

    def taken_over(self, worker: str) -> "SandboxLeased":
        """The first lease of another process, which found the box that was started under this one.

        The holder's fence stays: it is written on the box, and a lease under a higher one would make the box nobody's.
        """
        return self.model_copy(
            update={
                "event_id": event_id("SandboxLeased", self.sandbox, worker, self.occurred_at.isoformat()),
                "holder": self.holder.model_copy(update={"worker": worker}),
                "renewal": 1,
            }
        )


ReleasedHow = Literal["closed", "expired", "fenced", "forced"]


class SandboxReleased(SandboxEvent):
    """A box is gone."""

    kind: Literal["SandboxReleased"] = "SandboxReleased"
    how: ReleasedHow
    """By its holder; or reaped: its lease had run out, its session had a newer box, or somebody said so."""
    by: Name
    run: Name | None = None
    session: Name | None = None

    @classmethod
    def create(
        cls,
        sandbox: str,
        *,
        how: ReleasedHow,
        by: str,
        run: str | None,
        session: str | None,
        caused_at: datetime | None = None,
    ) -> "SandboxReleased":
        at = now()
        return cls(
            event_id=event_id("SandboxReleased", sandbox),
            occurred_at=at,
            caused_at=min(caused_at or at, at),
            sandbox=sandbox,
            how=how,
            by=by,
            run=run,
            session=session,
        )
