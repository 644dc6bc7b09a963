"""The catalogue of topics says everything once, and everything that is made from it agrees."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.envelope import SESSION_HEADERS, SessionEvent
from schemas.events import EVENTS
from schemas.retry import RetryScheduled
from services.__main__ import WORKERS
from topics import docs
from topics.catalogue import BY_EVENT, BY_NAME, CATALOGUE, Topic

PAGE = Path(__file__).parents[2] / "docs" / "topics.md"
ROLES = {*WORKERS, "cli", "users", "trainers"}
TOPICS = pytest.mark.parametrize("topic", CATALOGUE, ids=lambda topic: topic.name)


def test_every_event_has_exactly_one_topic_and_every_topic_an_event_of_its_own() -> None:
    assert [event for topic in CATALOGUE for event in topic.events] == list(BY_EVENT)
    assert len({topic.event for topic in CATALOGUE}) == len(CATALOGUE)
    assert {event.__name__: event for event in BY_EVENT} == EVENTS
    assert [topic.name for topic in CATALOGUE] == list(BY_NAME)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_topics_of_a_session_have_the_same_count_and_so_the_same_partition(count: int) -> None:
    of_sessions = [topic for topic in CATALOGUE if topic.key == "session_id"]
    assert {event for event in BY_EVENT if issubclass(event, SessionEvent)} - {
        event for topic in of_sessions for event in topic.events
    } == {RetryScheduled}
    assert {topic.partitioning for topic in of_sessions} == {"session"}
    assert {topic.partitions(count) for topic in CATALOGUE if topic.partitioning != "single"} == {count}
    assert {topic.partitions(count) for topic in CATALOGUE if topic.partitioning == "single"} == {1}


@TOPICS
def test_nothing_is_ever_compacted_or_deleted_by_default(topic: Topic) -> None:
    config = topic.config(1_000_000)
    assert (config["cleanup.policy"], config["retention.ms"], config["retention.bytes"]) == ("delete", "-1", "-1")
    assert config["max.message.bytes"] == "1000000"


@TOPICS
def test_the_time_of_a_record_is_the_brokers(topic: Topic) -> None:
    assert topic.config(1_000_000)["message.timestamp.type"] == "LogAppendTime"


@TOPICS
def test_a_topic_is_written_and_read_by_somebody_we_know_and_kept_by_the_store(topic: Topic) -> None:
    assert topic.written_by
    assert {*topic.written_by, *topic.read_by} <= ROLES
    assert "store_worker" in topic.read_by
    assert topic.purpose.endswith(".")


@TOPICS
def test_a_key_that_is_an_id_is_also_a_header(topic: Topic) -> None:
    assert topic.key in {*SESSION_HEADERS, "sandbox_id"} or topic.name == "dead.letters"


# The page.


def test_the_page_on_topics_is_made_from_the_catalogue() -> None:
    page = PAGE.read_text()
    assert docs.rewritten(page) == page, "run `python -m topics.docs docs/topics.md`"


@TOPICS
def test_the_page_on_topics_names_every_topic_and_its_schemas(topic: Topic) -> None:
    page = PAGE.read_text()
    assert f"`{topic.name}`" in page
    for event in topic.events:
        assert f"schemas/snapshots/{event.__name__}.json" in page
        assert (PAGE.parents[1] / "schemas" / "snapshots" / f"{event.__name__}.json").is_file()


def test_the_page_names_every_header_of_a_session() -> None:
    page = PAGE.read_text()
    assert [name for name in SESSION_HEADERS if name not in page] == []


def test_a_page_without_markers_is_not_rewritten() -> None:
    with pytest.raises(ValueError, match="found none"):
        docs.rewritten("# Topics\n")
    with pytest.raises(ValueError, match="found only the first"):
        docs.rewritten(f"{docs.BEGIN}\n")


# The AsyncAPI document.


@pytest.fixture(scope="module")
def document() -> Any:
    command = [sys.executable, "-m", "services", "asyncapi"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert printed.returncode == 0, printed.stderr
    return json.loads(printed.stdout)


def test_the_asyncapi_document_is_one_of_version_3(document: Any) -> None:
    assert document["asyncapi"] == "3.0.0"
    assert document["info"]["title"] == "rollstream"


@TOPICS
def test_the_asyncapi_document_has_a_channel_for_every_topic(topic: Topic, document: Any) -> None:
    addresses = {channel["address"] for channel in document["channels"].values()}
    assert topic.name in addresses


@TOPICS
def test_the_asyncapi_document_has_the_schema_of_every_event_that_a_worker_writes(topic: Topic, document: Any) -> None:
    assert topic.event.__name__ in document["components"]["schemas"] or not {*topic.written_by} & {*WORKERS}
