"""What every event carries, and the headers that travel beside it.

Headers repeat the ids so that a consumer can filter without decoding, and so that even a record whose body is garbage
can be given its terminal rollout.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import AwareDatetime, Field

from schemas.values import Composition, GroupRef, Name, TaskRef, Value

Headers = list[tuple[str, bytes]]

SOURCE = "rollstream"
SESSION_HEADERS = (
    "run_id",
    "group_id",
    "rollout_id",
    "session_id",
    "round",
    "try",
    "group_index",
    "group_size",
    "environment",
)


def now() -> datetime:
    return datetime.now(UTC)


def utc_of(timestamp_ms: int) -> datetime:
    """Time of a record, by what its producer put there: out of the calendar's range, the nearest time that is in it."""
    return datetime.fromtimestamp(min(max(timestamp_ms, 0), _LAST_MS) / 1000, UTC)


_LAST_MS = 253_402_300_799_000
"""The last second of the year 9999."""


class Event(Value):
    """One thing that happened. Subclasses fix `kind` as a literal, which is what the log is read by."""

    SCHEMA_VERSION: ClassVar[int] = 1

    kind: str
    schema_version: int = 1
    event_id: Name
    """Derived (see `schemas.identities`), so that a repeated event is recognised. The first by offset counts."""
    occurred_at: AwareDatetime
    caused_at: AwareDatetime
    """`occurred_at` of the event that caused this one (its own for a first event): no duplicate is older than this."""

    def key(self) -> bytes:
        """The Kafka record key: what the event's topic is ordered and partitioned by."""
        raise NotImplementedError

    def subject(self) -> str:
        """CloudEvents subject: what the event is about."""
        return self.key().decode()

    def to_json(self) -> bytes:
        return self.__pydantic_serializer__.to_json(self)

    def headers(self) -> Headers:
        """CloudEvents 1.0 in Kafka binary mode, plus whatever the subclass adds."""
        return [
            ("ce_specversion", b"1.0"),
            ("ce_id", self.event_id.encode()),
            ("ce_type", self.kind.encode()),
            ("ce_source", SOURCE.encode()),
            ("ce_time", self.occurred_at.isoformat().encode()),
            ("ce_subject", self.subject().encode()),
            ("content-type", b"application/json"),
        ]


class RunEvent(Event):
    """An event about a whole run, keyed by it."""

    run: Name

    def key(self) -> bytes:
        return self.run.encode()

    def headers(self) -> Headers:
        return [*super().headers(), ("run_id", self.run.encode())]


class SessionIds(Value):
    """All ids of one session, flat enough for headers and complete enough for a terminal record."""

    run: Name
    group: GroupRef
    task: TaskRef | None
    """Null only in records made from headers alone, when the body could not be read."""
    rollout: Name
    session: Name
    round: Annotated[int, Field(ge=0)] = 0
    try_: Annotated[int, Field(ge=0)] = Field(default=0, alias="try")
    environment: Name

    def ids(self) -> dict[str, Any]:
        """The session's ids, as keywords for the next event of the same session."""
        return {
            "run": self.run,
            "group": self.group,
            "task": self.task,
            "rollout": self.rollout,
            "session": self.session,
            "round": self.round,
            "try_": self.try_,
            "environment": self.environment,
        }

    def id_headers(self, event_id: str) -> Headers:
        """The session's ids as headers of one of its events; `session_ids_from` reads them back."""
        return [
            ("traceparent", traceparent(self.rollout, event_id)),
            ("run_id", self.run.encode()),
            ("group_id", self.group.id.encode()),
            ("rollout_id", self.rollout.encode()),
            ("session_id", self.session.encode()),
            ("round", b"%d" % self.round),
            ("try", b"%d" % self.try_),
            ("group_index", b"%d" % self.group.index),
            ("group_size", b"%d" % self.group.size),
            ("environment", self.environment.encode()),
        ]


class SessionEvent(Event, SessionIds):
    """An event inside one session, keyed by it."""

    def key(self) -> bytes:
        return self.session.encode()

    def headers(self) -> Headers:
        return [*super().headers(), *self.id_headers(self.event_id)]


def composition_headers(composition: Composition) -> Headers:
    """What a record asks of its worker beside the environment, so that a pool can pass over what is not its own."""
    sandbox = composition.sandbox
    return [("harness", composition.harness.encode()), *([] if sandbox is None else [("sandbox", sandbox.encode())])]


def traceparent(trace: str, span: str) -> bytes:
    """W3C trace context whose trace id is the rollout, so that one rollout is one trace across every retry."""
    return f"00-{trace.replace('-', '')[:32]:0<32}-{span.replace('-', '')[:16]:0<16}-01".encode()


def header_map(headers: Iterable[tuple[str, bytes]] | None) -> dict[str, str]:
    """Header names to text; a repeated name keeps its first value; bytes that are not UTF-8 are replaced."""
    found: dict[str, str] = {}
    for name, value in headers or ():
        if name not in found and value is not None:
            found[name] = value.decode("utf-8", "replace")
    return found


def session_ids_from(headers: Mapping[str, str]) -> SessionIds | None:
    """The session's ids as far as headers tell them, or None if they do not name a session."""
    try:
        return SessionIds(
            run=headers["run_id"],
            group=GroupRef(id=headers["group_id"], size=int(headers["group_size"]), index=int(headers["group_index"])),
            task=None,
            rollout=headers["rollout_id"],
            session=headers["session_id"],
            round=int(headers["round"]),
            try_=int(headers["try"]),
            environment=headers["environment"],
        )
    except (KeyError, ValueError):
        return None
