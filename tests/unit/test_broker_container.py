"""What is asked of the `docker` command, with one that is a shell script and keeps a container as a file."""

from pathlib import Path

import pytest

from rollstream.broker.container import ContainerBroker, container_name, java_in, run_arguments
from rollstream.broker.state import BrokerState
from rollstream.errors import BrokerUnavailable

STATE = BrokerState(via="docker", version="4.4.0", port=21_000, controller_port=21_001, cluster_id="abc", started_at=0.0)

DOCKER = """
echo "$*" >> calls
case "$1" in
  image) [ -e image ];;
  pull) echo pulled > image;;
  run) [ "$2" = --rm ] || echo true > container;;
  inspect) [ -e container ] && read running < container && echo "$running";;
  logs) [ -e container ] && echo "printed by the JVM";;
  stop) echo false > container;;
  rm) /bin/rm -f container;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an engine without images or containers."""
    engine = tmp_path / "engine"
    engine.mkdir()
    write_docker(engine, DOCKER)
    monkeypatch.setenv("PATH", str(engine))
    return engine


def write_docker(engine: Path, script: str) -> None:
    (engine / "docker").write_text(f"#!/bin/sh\ncd {engine}\n{script}")
    (engine / "docker").chmod(0o755)


def test_only_the_clients_port_is_published_and_only_on_loopback() -> None:
    arguments = run_arguments(Path("/data/broker-docker"), "name", "apache/kafka:4.4.0", 21_000)
    assert [arguments[at + 1] for at, option in enumerate(arguments) if option == "--publish"] == ["127.0.0.1:21000:21000"]
    assert "rollstream.broker=/data/broker-docker" in arguments
    assert arguments[-2:] == ["kafka.Kafka", "server.properties"]


def test_a_home_with_a_comma_is_mounted_as_one_path() -> None:
    assert 'type=bind,"source=/a, b/broker-docker",target=/broker' in java_in(Path("/a, b/broker-docker"), "image")


@pytest.mark.parametrize("data_dir", ["/a dir/.rollstream", "/.rollstream", "/ü"])
def test_names_are_legal_for_docker_and_differ_by_data_directory(data_dir: str) -> None:
    name = container_name(Path(data_dir) / "broker-docker")
    assert name.startswith("rollstream-broker-")
    assert name.isascii()
    assert " " not in name
    assert name != container_name(Path("/other") / "broker-docker")


def test_an_image_that_is_missing_is_pulled_once_and_announced(docker: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        ContainerBroker(tmp_path, version="4.4.0", notice=said.append).prepare()
    assert said == ["pulling the image apache/kafka:4.4.0 (once)"]


def test_a_container_lives_from_launch_to_end(docker: Path, tmp_path: Path) -> None:
    broker = ContainerBroker(tmp_path / "broker-docker", version="4.4.0", notice=print)
    assert broker.find(STATE) is None
    broker.format_storage("abc", "format.properties")
    assert broker.launch(STATE).pid is None
    assert broker.find(STATE) == STATE
    assert broker.last_lines(5) == ["printed by the JVM"]
    broker.end(STATE, timeout_s=7)
    assert broker.find(STATE) is None
    assert f"stop -t 7 {broker.name}" in (docker / "calls").read_text().splitlines()


def test_a_container_that_died_is_replaced(docker: Path, tmp_path: Path) -> None:
    broker = ContainerBroker(tmp_path, version="4.4.0", notice=print)
    broker.launch(STATE)
    (docker / "container").write_text("false\n")
    assert broker.find(STATE) is None
    broker.launch(STATE)
    assert broker.find(STATE) == STATE


def test_the_engines_last_word_is_passed_on(docker: Path, tmp_path: Path) -> None:
    write_docker(docker, "echo Unable to find image >&2; echo no route to the registry >&2; exit 125")
    with pytest.raises(BrokerUnavailable, match=r"`docker pull` failed .* no route to the registry"):
        ContainerBroker(tmp_path, version="4.4.0", notice=print).prepare()


def test_a_docker_that_went_away_is_said(docker: Path, tmp_path: Path) -> None:
    (docker / "docker").unlink()
    with pytest.raises(BrokerUnavailable, match="runs in Docker, which was not found"):
        ContainerBroker(tmp_path, version="4.4.0", notice=print).launch(STATE)
