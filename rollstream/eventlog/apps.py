"""A worker as a FastStream application: one subscriber in lanes, one producer, failures settled the same way everywhere."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiokafka import ConsumerRecord
from aiokafka.admin import AIOKafkaAdminClient
from faststream import AckPolicy, FastStream
from faststream._internal.broker import BrokerUsecase
from faststream.kafka import KafkaBroker
from faststream.kafka.message import KafkaAckableMessage, KafkaMessage
from faststream.message import StreamMessage
from faststream.specification import AsyncAPI

import rollstream
from rollstream.errors import BoundaryFailure
from rollstream.eventlog import failures, provisioning
from rollstream.eventlog.connection import UNCONNECTED, connect_admin, consumer_options
from rollstream.eventlog.failures import Boundary, headers_of
from rollstream.eventlog.lanes import LaneListener, LaneOptions, LaneSubscriber
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.settings import Settings
from schemas.envelope import header_map
from schemas.events import decode
from topics.catalogue import Topic

log = logging.getLogger(__name__)
Hook = Callable[[], Awaitable[Any]]
Decoded = TypeVar("Decoded")


class WorkerApp(FastStream):
    """A FastStream application that can say that it broke, so that its process ends instead of living on as a zombie."""

    def __init__(self, broker: KafkaBroker, worker: str, start: Sequence[Hook], stop: Sequence[Hook]) -> None:
        super().__init__(broker, logger=None, on_startup=start, after_shutdown=stop, specification=specification(worker))
        self.broken = asyncio.Event()
        self.failure: BaseException | None = None

    def break_with(self, failure: BaseException) -> None:
        """Say that this worker cannot go on. The first reason is kept."""
        self.failure = self.failure or failure
        self.broken.set()


@dataclass(frozen=True, slots=True)
class Wiring:
    """What distinguishes one lane worker from another."""

    boundary: Boundary
    consumes: Topic
    publishes: Sequence[Topic]
    lanes: int
    start: Sequence[Hook] = field(default_factory=tuple)
    """Before the first record; the producer is connected already."""
    stop: Sequence[Hook] = field(default_factory=tuple)
    """After the last record; the producer is still connected."""


def worker_app(
    settings: Settings,
    wiring: Wiring,
    producer: EventProducer,
    handle: Callable[[Decoded], Awaitable[None]],
    read: Callable[[Record], Decoded] | None = None,
) -> WorkerApp:
    """An application that hands every record of one topic to `handle`, in bounded lanes.

    Args:
        handle: returns when the record's outputs are durable; only then is the record acked.
        read: from a record to what `handle` takes; by default, the topic's event.
    """
    name = wiring.boundary.worker
    broker = bare_broker(settings, name)
    admins: list[AIOKafkaAdminClient] = []

    async def settle(raw: "ConsumerRecord[Any, Any]", error: Exception) -> None:
        record = _record(raw, settings.kafka.topic_prefix)
        level = logging.ERROR if not isinstance(error, BoundaryFailure) else logging.WARNING
        log.log(level, "%s: %s/%d/%d: %s", name, record.topic, record.partition, record.offset, error)
        await producer.publish(failures.settle(record, error, wiring.boundary))

    async def decoded(message: StreamMessage[Any]) -> Any:
        if read is not None:
            return read(_record(message.raw_message, settings.kafka.topic_prefix))
        return decode(message.body, wiring.boundary.expected)

    subscriber = _lanes(broker, settings, wiring)
    subscriber(handle, parser=_parse, decoder=decoded)
    for topic in wiring.publishes:
        broker.publisher(settings.kafka.topic_prefix + topic.name, schema=topic.event, description=topic.purpose)

    async def start() -> None:
        admins.append(await connect_admin(settings.bootstrap_servers or UNCONNECTED))
        await provisioning.require(admins[0], settings.kafka)
        await producer.start()

    async def stop() -> None:
        await producer.stop()
        for admin in admins:
            await admin.close()

    app = WorkerApp(broker, name, start=[start, *wiring.start], stop=[*wiring.stop, stop])
    lanes = LaneOptions(wiring.lanes, settings.kafka.commit_interval_s, settings.kafka.drain_timeout_s)
    subscriber.set_up(lanes, settle, lambda: admins[0], app.break_with)
    return app


def bare_broker(settings: Settings, worker: str) -> KafkaBroker:
    """A FastStream broker that only consumes: our producer and admin client have their own options."""
    return KafkaBroker(
        settings.bootstrap_servers or UNCONNECTED,
        client_id=f"rollstream-{worker}",
        consumer_only=True,
        allow_auto_create_topics=False,
        apply_types=False,
        graceful_timeout=5.0,
        logger=None,
    )


def worker_name(worker: str) -> str:
    """Which process this is, for people: worker, host and pid."""
    return f"{worker}@{socket.gethostname()}:{os.getpid()}"


def specification(title: str, *brokers: BrokerUsecase[Any, Any, Any]) -> AsyncAPI:
    return AsyncAPI(*brokers, title=title, version=rollstream.__version__, schema_version="3.0.0")


def asyncapi(brokers: Sequence[BrokerUsecase[Any, Any, Any]]) -> str:
    """One AsyncAPI document, JSON, over what several workers consume and publish."""
    return specification("rollstream", *brokers).to_specification().to_json()


def _lanes(broker: KafkaBroker, settings: Settings, wiring: Wiring) -> LaneSubscriber:
    kafka = settings.kafka
    options = consumer_options(kafka)
    options.pop("enable_auto_commit")  # FastStream derives it from the ack policy
    listener = LaneListener()
    subscriber = broker.subscriber(
        kafka.topic_prefix + wiring.consumes.name,
        group_id=kafka.topic_prefix + wiring.boundary.worker,
        ack_policy=AckPolicy.MANUAL,
        listener=listener,
        title=f"{wiring.boundary.worker}:{wiring.consumes.name}",
        description=wiring.consumes.purpose,
        **options,
    )
    # FastStream constructs the subscriber; this only changes how it consumes. Canary tests watch what it relies on.
    subscriber.__class__ = LaneSubscriber
    assert isinstance(subscriber, LaneSubscriber)
    listener.subscriber = subscriber
    return subscriber


async def _parse(record: "ConsumerRecord[Any, Any]") -> KafkaMessage:
    """FastStream's parser, but header bytes that are not UTF-8 do not make a record unreadable."""
    headers = header_map(record.headers)
    return KafkaAckableMessage(
        body=record.value,
        headers=headers,
        content_type=headers.get("content-type"),
        message_id=f"{record.offset}-{record.timestamp}",
        correlation_id=headers.get("ce_id", f"{record.topic}/{record.partition}/{record.offset}"),
        raw_message=record,
        consumer=_NEVER_ACKED,
    )


class _NeverAcked:
    """The consumer a message sees: lanes commit, messages do not."""

    async def commit(self) -> None:
        raise AssertionError("lanes commit by themselves")

    def seek(self, partition: object, offset: int) -> None:
        raise AssertionError("lanes seek by themselves")


_NEVER_ACKED = _NeverAcked()


def _record(raw: "ConsumerRecord[Any, Any]", prefix: str) -> Record:
    return Record(
        topic=raw.topic.removeprefix(prefix),
        partition=raw.partition,
        offset=raw.offset,
        timestamp_ms=raw.timestamp,
        key=raw.key,
        value=raw.value,
        headers=headers_of(raw.headers),
    )
