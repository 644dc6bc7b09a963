"""The embedded broker on a machine that has Docker and no Java."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from rollstream.broker import EmbeddedBroker
from rollstream.eventlog.connection import connect_admin
from rollstream.eventlog.provisioning import ensure
from rollstream.settings import KafkaSettings

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture
def only_docker(kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program on PATH but `docker`."""
    docker = shutil.which("docker")
    assert docker is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").symlink_to(docker)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)


@pytest.fixture
def embedded(only_docker: None, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path / "data, with a comma")
    yield broker
    broker.stop()


async def test_records_survive_a_restart_of_the_container(embedded: EmbeddedBroker) -> None:
    running = embedded.start()
    admin = await connect_admin(running.bootstrap)
    await ensure(admin, KafkaSettings(partitions=1))
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=running.bootstrap, acks="all")
    await producer.start()
    await producer.send_and_wait("tasks.in", b"kept")
    await producer.stop()

    assert embedded.stop()
    assert embedded.status() is None
    again = embedded.start()

    consumer = AIOKafkaConsumer("tasks.in", bootstrap_servers=again.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    record = await consumer.getone()
    await consumer.stop()
    assert (running.via, again.via, again.bootstrap) == ("docker", "docker", running.bootstrap)
    assert record.value == b"kept"


def test_a_killed_container_is_replaced_and_only_the_loopback_address_is_published(embedded: EmbeddedBroker) -> None:
    running = embedded.start()
    container = subprocess.run(
        ["docker", "ps", "-q", "--filter", f"publish={running.bootstrap.rpartition(':')[2]}"], capture_output=True, text=True
    ).stdout.strip()
    published = subprocess.run(["docker", "port", container], capture_output=True, text=True).stdout

    subprocess.run(["docker", "kill", container], capture_output=True, check=True)
    found_dead = embedded.status()
    again = embedded.start()

    assert published.strip().endswith(f"-> {running.bootstrap}")
    assert found_dead is None
    assert again.answers
