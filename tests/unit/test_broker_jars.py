"""Fetching Kafka's jars, with a Maven that is a shell script."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollstream.broker.jars import cache_dir, fetch_jars, first_error, jars_dir, kafka_version, pom_path
from rollstream.errors import BrokerUnavailable

VERSION = "9.9.9"
FETCHES = f"""
for argument in "$@"; do case "$argument" in -DoutputDirectory=*) into="${{argument#-DoutputDirectory=}}";; esac; done
echo fetched >> "$0.calls"
/bin/mkdir -p "$into" && echo jar > "$into/kafka_2.13-{VERSION}.jar"
"""


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that stands for Maven; it fetches nothing until it is written."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ROLLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "bin" / "mvn"


def write_script(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_pom_is_found_and_pins_kafka_4() -> None:
    assert kafka_version(pom_path().read_text()).startswith("4.")


def test_a_pom_without_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kafka\.version"):
        kafka_version("<project/>")


def test_cache_directory_follows_own_variable_then_xdg_then_home() -> None:
    both = {"ROLLSTREAM_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}
    assert cache_dir(both) == Path("/own")
    assert cache_dir({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/rollstream")
    assert cache_dir({}) == Path.home() / ".cache" / "rollstream"


def test_fetched_jars_are_announced_once_and_kept(maven: Path) -> None:
    write_script(maven, FETCHES)
    said: list[str] = []
    for _ in range(2):
        assert fetch_jars(VERSION, said.append) == jars_dir(VERSION)
    assert said == [f"fetching Apache Kafka {VERSION} with Maven (once, about 45 MB)"]
    assert [jar.name for jar in jars_dir(VERSION).iterdir()] == [f"kafka_2.13-{VERSION}.jar"]


def test_concurrent_fetches_run_maven_once(maven: Path) -> None:
    write_script(maven, f"/bin/sleep 0.2\n{FETCHES}")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch_jars(VERSION, lambda line: None), range(4)))
    assert Path(f"{maven}.calls").read_text() == "fetched\n"


def test_a_failed_fetch_leaves_nothing_and_says_why(maven: Path) -> None:
    write_script(maven, f"{FETCHES}\necho '[ERROR] Unknown host repo -> [Help 1]'\nexit 1")
    with pytest.raises(BrokerUnavailable, match=r"could not fetch Apache Kafka 9\.9\.9 \(Unknown host repo\); check the net"):
        fetch_jars(VERSION, lambda line: None)
    assert [path.name for path in jars_dir(VERSION).parent.iterdir()] == [f"kafka-{VERSION}.lock"]


def test_what_a_killed_fetch_left_behind_is_removed_by_the_next(maven: Path) -> None:
    write_script(maven, FETCHES)
    half = jars_dir(VERSION).with_name(f".kafka-{VERSION}-abandoned")
    (half / "jars").mkdir(parents=True)
    fetch_jars(VERSION, lambda line: None)
    assert not half.exists()


def test_success_without_kafka_is_a_failure(maven: Path) -> None:
    write_script(maven, "exit 0")
    with pytest.raises(BrokerUnavailable, match="no error was printed"):
        fetch_jars(VERSION, lambda line: None)


def test_missing_maven_is_said(maven: Path) -> None:
    assert not maven.exists()
    with pytest.raises(BrokerUnavailable, match="Maven was not found"):
        fetch_jars(VERSION, lambda line: None)


def test_first_error_of_maven_is_plain_text() -> None:
    output = "\x1b[1;31m[ERROR]\x1b[m \n[ERROR] No plugin found for prefix 'dependency' -> [Help 1]\n[ERROR] To see more"
    assert first_error(output) == "No plugin found for prefix 'dependency'"
