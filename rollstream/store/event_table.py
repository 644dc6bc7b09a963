"""What every event table has, and how a row is picked out of an event."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import cast

import pyarrow as pa

from rollstream.store.columns import Column, SqlType, moment
from schemas.values import JsonObject

POSITION: tuple[tuple[str, SqlType], ...] = (
    ("kafka_partition", "INTEGER"),
    ("kafka_offset", "BIGINT"),
    ("recorded_at", "TIMESTAMP"),
)
"""Where the record stands in its topic, and the broker's time for it. Ends every event table."""
HEAD: tuple[tuple[str, SqlType], ...] = (
    ("event_id", "UUID"),
    ("schema_version", "INTEGER"),
    ("occurred_at", "TIMESTAMP"),
    ("caused_at", "TIMESTAMP"),
    ("escaped", "BOOLEAN"),
)
"""Begins every event table."""
TIMES = (moment("occurred_at", "occurred_at"), moment("caused_at", "caused_at"))
"""Picked of every event."""


class Getter:
    """One field of many objects: at the speed of C where all have it."""

    __slots__ = ("_get", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._get: itemgetter[str] = itemgetter(name)

    def all(self, objects: Sequence[JsonObject]) -> list[object]:
        """The field of each, None where there is none."""
        try:
            return list(map(self._get, objects))
        except KeyError:
            name = self._name
            return [one.get(name) for one in objects]


@dataclass(frozen=True, slots=True)
class EventTable:
    """Where the events of one kind go."""

    kind: str
    name: str
    columns: tuple[Column, ...]
    withheld: frozenset[str] = frozenset()
    """Top-level fields that never reach the published payload."""
    repeats_are_copies: bool = False
    """True where an event's id names one execution: then a repeated record has the first one's `caused_at`, and no duplicate
    needs to be looked for before it. Other ids can be reached again much later, by another cause."""

    _objects: tuple[tuple[int, Getter], ...] = field(init=False, compare=False)
    """Where the objects stand that columns are picked from: the first is the event, each other one is a field of an earlier."""
    _picks: tuple[tuple[int, Getter], ...] = field(init=False, compare=False)
    _required: tuple[tuple[int, str], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # An event's objects are looked up once, not once for each of their fields.
        picked = (*TIMES, *self.columns)
        parents = {column.path[:length] for column in picked for length in range(len(column.path))}
        paths = sorted(parents, key=lambda path: (len(path), path))
        objects = ((paths.index(path[:-1]), Getter(path[-1])) for path in paths[1:])
        picks = ((paths.index(column.path[:-1]), Getter(column.path[-1])) for column in picked)
        required = ((index, column.name) for index, column in enumerate(picked) if column.required)
        object.__setattr__(self, "_objects", tuple(objects))
        object.__setattr__(self, "_picks", tuple(picks))
        object.__setattr__(self, "_required", tuple(required))

    def schema(self) -> tuple[tuple[str, SqlType], ...]:
        """All columns in order, with their types."""
        own = tuple((column.name, column.type) for column in self.columns)
        return (*HEAD, *own, ("payload", "PAYLOAD"), *POSITION)

    def pick(self, bodies: Sequence[JsonObject]) -> list[list[object]]:
        """The values of each of `TIMES` and `columns` in some events, as they are."""
        found: list[Sequence[JsonObject]] = [bodies]
        found += (_objects_of(getter.all(found[parent])) for parent, getter in self._objects)
        return [getter.all(found[parent]) for parent, getter in self._picks]

    def arrays(self, picked: Iterable[Sequence[object]]) -> list[pa.Array]:
        """`TIMES` and `columns` of some events, from what was picked of them."""
        return [column.array(values) for column, values in zip((*TIMES, *self.columns), picked, strict=True)]

    def missing(self, picked: Sequence[Sequence[object]]) -> dict[int, str]:
        """Which of some events have no value for a required column, and the first such column, from what was picked of them."""
        missing: dict[int, str] = {}
        for index, name in self._required:
            if not _TEXT.issuperset(map(type, picked[index])):
                lacking = (event for event, value in enumerate(picked[index]) if not isinstance(value, str))
                missing = dict.fromkeys(lacking, name) | missing
        return missing


_TEXT = frozenset({str})
_OBJECT = frozenset({dict})
_NOTHING: JsonObject = {}


def _objects_of(values: list[object]) -> list[JsonObject]:
    """`values`, with an empty object for whatever is none."""
    if _OBJECT.issuperset(map(type, values)):
        return cast("list[JsonObject]", values)
    return [value if isinstance(value, dict) else _NOTHING for value in values]
