"""`rollstream topics` against a real broker."""

import os
import subprocess
import sys

import pytest

from rollstream.settings import Settings
from topics.catalogue import CATALOGUE

pytestmark = pytest.mark.kafka


def topics(settings: Settings, *arguments: str, partitions: int | None = None) -> "subprocess.CompletedProcess[str]":
    assert settings.bootstrap_servers is not None
    environment = {
        "KAFKA_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLSTREAM_KAFKA__TOPIC_PREFIX": settings.kafka.topic_prefix,
        "ROLLSTREAM_KAFKA__PARTITIONS": str(partitions or settings.kafka.partitions),
    }
    return subprocess.run(
        [sys.executable, "-m", "rollstream.cli", "topics", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_topics_are_created_once_and_found_the_second_time(settings: Settings) -> None:
    count = len(CATALOGUE)
    first, second = topics(settings, "ensure"), topics(settings, "ensure")
    assert first.stdout.endswith(f"{count} created, 0 were there\n")
    assert second.stdout == f"0 created, {count} were there\n"
    assert (first.returncode, second.returncode) == (0, 0)


def test_missing_topics_are_told_with_the_remedy(settings: Settings) -> None:
    done = topics(settings, "describe")
    assert done.returncode == 1
    assert f"topic {settings.kafka.topic_prefix}tasks.in does not exist: `rollstream topics ensure`" in done.stderr


def test_provisioned_topics_are_described_as_the_broker_has_them(settings: Settings) -> None:
    topics(settings, "ensure")
    done = topics(settings, "describe")
    assert done.returncode == 0
    assert all(settings.kafka.topic_prefix + topic.name in done.stdout for topic in CATALOGUE)


@pytest.mark.parametrize("command", ["ensure", "describe"])
def test_another_partition_count_is_a_mismatch_and_changes_nothing(settings: Settings, command: str) -> None:
    topics(settings, "ensure")
    done = topics(settings, command, partitions=settings.kafka.partitions + 2)
    assert done.returncode == 1
    assert f"topic {settings.kafka.topic_prefix}tasks.in: expected 5 partitions, found 3" in done.stderr
    assert topics(settings, "describe").returncode == 0
