"""Choosing between Java and Docker, and what is said when neither will do."""

from pathlib import Path

import pytest

from rollstream.broker import ensure_broker
from rollstream.broker.runtime import Surroundings, choose_runtime, look_around, parse_java_version
from rollstream.broker.state import Via
from rollstream.errors import BrokerUnavailable
from rollstream.settings import Settings

JAVA = Surroundings(java="/usr/bin/java", java_version=17, maven="/usr/bin/mvn")
OLD_JAVA = Surroundings(java="/usr/bin/java", java_version=11, maven="/usr/bin/mvn")
JAVA_ALONE = Surroundings(java="/usr/bin/java", java_version=21)
JARS_ALONE = Surroundings(java="/usr/bin/java", java_version=21, jars_cached=True)
DOCKER = Surroundings(docker="/usr/bin/docker", docker_answers=True)
SILENT_DOCKER = Surroundings(docker="/usr/bin/docker")
BOTH = Surroundings(java="/usr/bin/java", java_version=17, maven="/usr/bin/mvn", docker="/usr/bin/docker", docker_answers=True)
OLD_JAVA_AND_DOCKER = Surroundings(java="/usr/bin/java", java_version=8, docker="/usr/bin/docker", docker_answers=True)


@pytest.mark.parametrize(
    ("found", "remembered", "expected"),
    [
        (JAVA, None, "java"),
        (JARS_ALONE, None, "java"),
        (BOTH, None, "java"),
        (DOCKER, None, "docker"),
        (OLD_JAVA_AND_DOCKER, None, "docker"),
        (BOTH, "docker", "docker"),
        (JAVA, "java", "java"),
    ],
)
def test_what_can_run_a_broker_is_chosen(found: Surroundings, remembered: Via | None, expected: Via) -> None:
    assert choose_runtime(found, remembered) == expected


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Surroundings(), "Java was not found, and Docker was not found"),
        (OLD_JAVA, "/usr/bin/java is Java 11 where 17 or newer is needed"),
        (JAVA_ALONE, "Maven, which fetches Kafka, was not found"),
        (SILENT_DOCKER, "the Docker engine does not answer"),
        (Surroundings(java="/usr/bin/java"), "/usr/bin/java does not run"),
    ],
)
def test_without_a_way_to_run_one_the_sentence_has_reason_and_remedy(found: Surroundings, reason: str) -> None:
    with pytest.raises(BrokerUnavailable) as caught:
        choose_runtime(found)
    sentence = str(caught.value)
    assert reason in sentence
    assert "install Java 17+ and Maven, or Docker, or name a broker of your own in KAFKA_BOOTSTRAP_SERVERS" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(("found", "remembered"), [(DOCKER, "java"), (JAVA, "docker")])
def test_a_data_directory_never_changes_over_to_an_empty_log(found: Surroundings, remembered: Via) -> None:
    with pytest.raises(BrokerUnavailable, match="the log of this data directory was written with"):
        choose_runtime(found, remembered)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_402"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "25-ea" 2025-09-16', 25),
        ("Unable to locate a Java Runtime.", None),
    ],
)
def test_java_version_is_read_in_every_form(text: str, expected: int | None) -> None:
    assert parse_java_version(text) == expected


def write_command(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_java_home_wins_over_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_command(tmp_path / "path", "java", "echo 'openjdk version \"11.0.2\"' >&2")
    (tmp_path / "home").mkdir()
    write_command(tmp_path / "home" / "bin", "java", "echo 'openjdk version \"21.0.1\"' >&2")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert look_around(jars=tmp_path / "none").java_version == 21


def test_docker_is_asked_only_where_java_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_command(tmp_path, "java", "echo 'openjdk version \"17.0.15\"' >&2")
    write_command(tmp_path, "mvn", "")
    write_command(tmp_path, "docker", f"echo asked >> {tmp_path}/asked")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    look_around(jars=tmp_path / "none")
    assert not (tmp_path / "asked").exists()
    assert look_around(jars=tmp_path / "none", remembered="docker").docker_answers


def test_with_an_empty_path_ensure_broker_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROLLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(BrokerUnavailable, match=r"^no broker can be started here: Java was not found, and Docker"):
        ensure_broker(Settings(data_dir=tmp_path / "data"))


def test_a_broker_named_in_the_settings_is_used_and_nothing_is_started(tmp_path: Path) -> None:
    assert ensure_broker(Settings(data_dir=tmp_path, bootstrap_servers="kafka:9092")) == "kafka:9092"
    assert list(tmp_path.iterdir()) == []
