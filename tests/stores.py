"""Stores for tests: written in one line, read as published."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollstream.settings import StoreSettings
from rollstream.store.projection import Store
from rollstream.store.reader import ask, open_snapshot
from schemas.envelope import Event
from tests.events import Log

SETTINGS = StoreSettings(memory_limit_mib=256)


@contextmanager
def writing(data_dir: Path) -> Iterator[Store]:
    """The store of `data_dir`, closed at the end."""
    store = Store.open(data_dir, SETTINGS)
    try:
        yield store
    finally:
        store.close()


def publish_events(data_dir: Path, *events: Event) -> Path:
    """A published store of `events`; returns its data directory."""
    with writing(data_dir) as store:
        store.apply(Log().records(*events))
        store.publish()
    return data_dir


def answer(data_dir: Path, query: str) -> list[tuple[object, ...]]:
    """What the published store says."""
    with open_snapshot(data_dir) as connection:
        return list(ask(connection, query).rows)
