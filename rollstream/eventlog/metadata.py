"""Which topics there are, asked for by name and without making them.

aiokafka's own look-ups make a topic that is missing, wherever the broker allows it, and do not tell it from one that could not
be described. They also know nothing of topic ids, by which alone a topic can be told from another of the same name.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from uuid import UUID

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, NodeNotReadyError, UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.metadata import MetadataRequest_v4, MetadataRequest_v5
from aiokafka.protocol.types import AbstractType, Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

DESCRIBE_S = 15.0
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class TopicFound:
    """A topic that is there."""

    partitions: int
    id: UUID | None
    """None from brokers that have no topic ids."""


class _Id(AbstractType):  # type: ignore[misc]
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


class _MetadataResponse_v12(Response):  # type: ignore[misc]  # noqa: N801
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString("utf-8")),
                ("topic_id", _Id),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _MetadataRequest_v12(RequestStruct):  # type: ignore[misc]  # noqa: N801
    API_KEY = 3
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _MetadataResponse_v12
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Id), ("topic", CompactString("utf-8")), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _TopicsRequest(Request[MetadataRequest_v4 | MetadataRequest_v5 | _MetadataRequest_v12]):  # type: ignore[misc]
    """Metadata of named topics, in the latest version that the broker knows; none of them is made."""

    API_KEY = 3

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def build(self, request_struct_class: Any) -> Any:
        if request_struct_class.API_VERSION < 12:
            return request_struct_class(list(self._names), False)
        return request_struct_class([(UUID(int=0), name, {}) for name in self._names], False, False, {})


async def describe_topics(
    client: AIOKafkaClient, names: Collection[str], *, deadline_s: float = DESCRIBE_S
) -> dict[str, TopicFound | None]:
    """Each topic as the broker has it, or None if there is no such topic.

    A broker that cannot say yet, because a topic's leaders are being chosen, is asked again.

    Args:
        client: connected; of a consumer or an admin client.

    Raises:
        KafkaError: it could not say until the deadline.
    """
    give_up = time.monotonic() + deadline_s
    while True:
        try:
            return _found(await _ask(client, names), names)
        except KafkaError:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(RETRY_S)


async def _ask(client: AIOKafkaClient, names: Collection[str]) -> list[Mapping[str, Any]]:
    node = client.get_random_node()
    if node is None:
        raise NodeNotReadyError("no broker is known")
    found: list[Mapping[str, Any]] = (await client.send(node, _TopicsRequest(names))).to_object()["topics"]
    return found


def _known(topic_id: UUID | None) -> UUID | None:
    """A topic without an id has one of zeros."""
    return topic_id if topic_id is not None and topic_id.int else None


def _found(answers: Collection[Mapping[str, Any]], names: Collection[str]) -> dict[str, TopicFound | None]:
    """What a broker's answer says of each topic.

    Raises:
        KafkaError: of one of them it says nothing, or nothing final.
    """
    found: dict[str, TopicFound | None] = {}
    for answer in answers:
        error = for_code(answer["error_code"])
        if error is UnknownTopicOrPartitionError:
            found[answer["topic"]] = None
        elif answer["error_code"] or not answer["partitions"]:
            raise error(f"{answer['topic']} cannot be described yet")
        else:
            found[answer["topic"]] = TopicFound(len(answer["partitions"]), _known(answer.get("topic_id")))
    if unanswered := set(names) - found.keys():
        raise KafkaError(f"the broker says nothing of {', '.join(sorted(unanswered))}")
    return found
