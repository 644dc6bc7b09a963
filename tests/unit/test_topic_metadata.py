"""What a broker says of topics: there, not there, or not known yet, which is never taken for not there."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from aiokafka.errors import KafkaError, LeaderNotAvailableError

from rollstream.eventlog.connection import stop_consumer
from rollstream.eventlog.metadata import TopicFound, describe_topics

ID = UUID("973195c0-a010-4850-856a-c5e5a50373df")
LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC = 5, 3


class Answer:
    def __init__(self, *topics: dict[str, Any]) -> None:
        self._topics = topics

    def to_object(self) -> dict[str, Any]:
        return {"topics": self._topics}


class Client:
    """As much of aiokafka's client as is asked; the last answer is given for ever."""

    def __init__(self, *answers: Answer | KafkaError) -> None:
        self._answers: Sequence[Answer | KafkaError] = answers
        self.asked = 0

    def get_random_node(self) -> int:
        return 1

    async def send(self, node: int, request: object) -> Answer:
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if isinstance(answer, KafkaError):
            raise answer
        return answer


def topic(name: str, *, error: int = 0, partitions: int = 3, topic_id: UUID | None = ID) -> dict[str, Any]:
    return {"topic": name, "error_code": error, "partitions": [{}] * partitions, "topic_id": topic_id}


async def test_a_topic_that_is_there_and_one_that_is_not() -> None:
    client = Client(Answer(topic("a"), topic("b", error=UNKNOWN_TOPIC, partitions=0)))
    assert await describe_topics(client, ["a", "b"]) == {"a": TopicFound(3, ID), "b": None}


async def test_a_broker_without_topic_ids_gives_none() -> None:
    client = Client(Answer(topic("a", topic_id=UUID(int=0)), topic("b", topic_id=None)))
    assert await describe_topics(client, ["a", "b"]) == {"a": TopicFound(3, None), "b": TopicFound(3, None)}


@pytest.mark.parametrize(
    "not_yet",
    [
        Answer(topic("a", error=LEADER_NOT_AVAILABLE, partitions=0)),
        Answer(topic("a", partitions=0)),
        Answer(),
        KafkaError("away"),
    ],
    ids=["no leader", "no partitions", "not a word", "away"],
)
async def test_a_topic_that_cannot_be_described_yet_is_asked_for_again_and_never_taken_for_missing(
    not_yet: Answer | KafkaError,
) -> None:
    client = Client(not_yet, not_yet, Answer(topic("a")))
    assert await describe_topics(client, ["a"]) == {"a": TopicFound(3, ID)}
    assert client.asked == 3


async def test_a_topic_that_can_never_be_described_is_a_failure() -> None:
    client = Client(Answer(topic("a", error=LEADER_NOT_AVAILABLE, partitions=0)))
    with pytest.raises(LeaderNotAvailableError, match="a cannot be described yet"):
        await describe_topics(client, ["a"], deadline_s=0.3)


class Consumer:
    """A consumer whose stop lets the cancellation of its own task escape, as aiokafka's may."""

    def __init__(self) -> None:
        self.closed = False
        self._client = self

    async def stop(self) -> None:
        raise asyncio.CancelledError

    async def close(self) -> None:
        self.closed = True


async def test_a_consumer_that_lets_its_own_cancellation_escape_is_stopped_and_its_client_closed() -> None:
    consumer = Consumer()
    await stop_consumer(consumer)
    assert consumer.closed
