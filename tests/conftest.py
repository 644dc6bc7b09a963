"""What tests share: one embedded broker for the whole session, and settings that isolate each test on it."""

import os
import shutil
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from rollstream.broker import EmbeddedBroker
from rollstream.settings import KafkaSettings, Settings
from tests import hanging


@dataclass(frozen=True, slots=True)
class TestBroker:
    """A real Apache Kafka for tests."""

    __test__ = False

    bootstrap: str
    data_dir: Path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test whose time is over says what it waits for."""
    report = yield
    if call.excinfo is not None and "pytest-timeout" in str(call.excinfo.value) and (text := hanging.stacks(call.excinfo.tb)):
        report.sections.append(("Tasks that were waiting", text))
    return report


@pytest.fixture(scope="session", autouse=True)
def _own_environment() -> Iterator[None]:
    """No setting of whoever runs the tests leaks in."""
    saved = {name: value for name, value in os.environ.items() if name.startswith(("ROLLSTREAM_", "KAFKA_", "OPENAI_"))}
    for name in saved:
        if name != "ROLLSTREAM_CACHE_DIR":
            del os.environ[name]
    yield
    os.environ.update(saved)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBroker]:
    """The session's broker, started at first use and stopped at the end."""
    data_dir = tmp_path_factory.mktemp("broker")
    embedded = EmbeddedBroker(data_dir)
    running = embedded.start()
    yield TestBroker(running.bootstrap, data_dir)
    embedded.stop()
    shutil.rmtree(data_dir, ignore_errors=True)


@pytest.fixture
def settings(broker: TestBroker, tmp_path: Path) -> Settings:
    """Settings of an installation of its own: own topics and groups on the shared broker, own data directory."""
    return Settings(
        data_dir=tmp_path / "data",
        bootstrap_servers=broker.bootstrap,
        kafka=KafkaSettings(topic_prefix=f"t{uuid4().hex[:8]}.", partitions=3, commit_interval_s=0.1, session_timeout_s=6),
    )


@pytest.fixture
async def topics(settings: Settings) -> AsyncIterator[None]:
    """The installation's topics, provisioned."""
    from rollstream.eventlog.connection import connect_admin
    from rollstream.eventlog.provisioning import ensure

    assert settings.bootstrap_servers is not None
    admin = await connect_admin(settings.bootstrap_servers)
    await ensure(admin, settings.kafka)
    yield
    await admin.close()
