"""A broker of their own for tests that kill it."""

from collections.abc import Iterator

import pytest

from rollstream.broker import EmbeddedBroker
from rollstream.eventlog import lanes as lanes_module, ownership


@pytest.fixture(scope="session")
def mortal_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A real Apache Kafka that a test may kill, if it starts it again."""
    broker = EmbeddedBroker(tmp_path_factory.mktemp("mortal-broker"))
    running = broker.start()
    if running.pid is None:
        broker.stop()
        pytest.skip("the embedded broker runs in a container here, which has no process to kill: Java 17 is missing")
    yield broker
    broker.stop()


@pytest.fixture(autouse=True)
def _quiet_client(caplog: pytest.LogCaptureFixture) -> None:
    """aiokafka reports every attempt to reach a broker that is dead; that would bury the diary of a failed test."""
    caplog.set_level("CRITICAL", logger="aiokafka")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that are seconds on a real broker."""
    monkeypatch.setattr(lanes_module, "LANE_WAIT_S", 0.01)
    monkeypatch.setattr(ownership, "READ_SAVED_S", 0.05)
