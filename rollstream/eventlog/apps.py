"""A worker as a FastStream application: topics in lanes, one producer, failures settled the same way everywhere."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from rollstream.eventlog import provisioning
from rollstream.eventlog.connection import UNCONNECTED, connect_admin, consumer_options
from rollstream.eventlog.control import RunControl
from rollstream.eventlog.failures import Boundary, Settler, TaskFailure, headers_of
from rollstream.eventlog.groups import group_name
from rollstream.eventlog.lanes import Hooks, LaneListener, LaneOptions, LaneSubscriber, Settle, Wants, run_of
from rollstream.eventlog.offsets import GroupOffsets
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.eventlog.retries import policy_of
from rollstream.settings import Settings
from schemas.envelope import header_map, now
from schemas.events import decode_any
from topics.catalogue import Topic

log = logging.getLogger(__name__)
Hook = Callable[[], Awaitable[Any]]


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
class Clients:
    """A worker's own clients of the log, beside its subscribers. The application starts and stops them."""

    producer: EventProducer
    control: RunControl

    @classmethod
    def of(cls, settings: Settings, worker: str) -> "Clients":
        bootstrap = settings.bootstrap_servers or UNCONNECTED
        producer = EventProducer(bootstrap, settings.kafka, client_id=f"rollstream-{worker}")
        return cls(producer, RunControl(bootstrap, settings.kafka))


@dataclass(frozen=True, slots=True)
class Route:
    """One topic that a worker reads, and what it does with each record.

    Attributes:
        handle: returns when the record's outputs are durable; only then is the record acked.
        read: from a record to what `handle` takes; by default, the topic's event.
        wants: by headers alone; a record that is not wanted is acked at once, undecoded. None wants all.
        once: a second record under the same key is acked unrun.
    """

    consumes: Topic
    handle: Callable[[Any], Awaitable[None]]
    lanes: int
    read: Callable[[Record], Any] | None = None
    wants: Callable[[Mapping[str, str]], bool] | None = None
    once: bool = False


@dataclass(frozen=True, slots=True)
class Wiring:
    """What distinguishes one lane worker from another."""

    boundary: Boundary
    routes: Sequence[Route]
    publishes: Sequence[Topic]
    start: Sequence[Hook] = field(default_factory=tuple)
    """Before the first record; the clients are connected already."""
    stop: Sequence[Hook] = field(default_factory=tuple)
    """After the last record; the clients are still connected."""


def worker_app(settings: Settings, wiring: Wiring, clients: Clients) -> WorkerApp:
    """An application that hands every record of its routes to their handlers, in bounded lanes.

    Records of cancelled runs are acked unread, and their running work is stopped.
    """
    name = wiring.boundary.worker
    broker = bare_broker(settings, name)
    admins: list[AIOKafkaAdminClient] = []
    subscribers = [_lanes(broker, settings, name, route) for route in wiring.routes]
    for topic in wiring.publishes:
        broker.publisher(settings.kafka.topic_prefix + topic.name, schema=topic.event, description=topic.purpose)

    async def start() -> None:
        admins.append(await connect_admin(settings.bootstrap_servers or UNCONNECTED))
        await provisioning.require(admins[0], settings.kafka)
        await clients.producer.start()
        await clients.control.start()

    async def stop() -> None:
        await clients.control.close()
        await clients.producer.stop()
        for admin in admins:
            await admin.close()

    app = WorkerApp(broker, name, start=[start, *wiring.start], stop=[*wiring.stop, stop])
    settler = Settler(wiring.boundary, policy_of(settings.retries), settings.retries.budget_per_run)
    for subscriber, route in zip(subscribers, wiring.routes, strict=True):
        subscriber.set_up(
            LaneOptions(
                lanes=route.lanes,
                commit_interval_s=settings.kafka.commit_interval_s,
                drain_timeout_s=settings.kafka.drain_timeout_s,
                session_timeout_s=settings.kafka.session_timeout_s,
                once=route.once,
                queue_timeout_s=settings.limits.queue_timeout_seconds,
            ),
            Hooks(
                settle=_settle(settings, route, settler, clients.producer),
                wants=_wants(route, clients.control),
                offsets=lambda: GroupOffsets(admins[0]),
                broke=app.break_with,
            ),
        )

    def stop_run(run: str) -> None:
        for subscriber in subscribers:
            subscriber.cancel_run(run)

    clients.control.on_cancelled = stop_run
    return app


def _settle(settings: Settings, route: Route, settler: Settler, producer: EventProducer) -> Settle:
    async def settle(raw: "ConsumerRecord[Any, Any]", error: Exception) -> None:
        record = _record(raw, settings.kafka.topic_prefix)
        level = logging.WARNING if isinstance(error, BoundaryFailure | TaskFailure) else logging.ERROR
        log.log(level, "%s/%d/%d: %s", record.topic, record.partition, record.offset, error)
        await producer.publish(settler.settle(record, error, route.consumes.events, now()))

    return settle


def _wants(route: Route, control: RunControl) -> Wants:
    def wants(raw: "ConsumerRecord[Any, Any]") -> bool:
        if control.any_cancelled and control.cancelled(run_of(raw) or ""):
            return False
        return route.wants is None or route.wants(HeaderView(raw.headers))

    return wants


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


def _lanes(broker: KafkaBroker, settings: Settings, worker: str, route: Route) -> LaneSubscriber:
    kafka = settings.kafka
    options = consumer_options(kafka)
    options.pop("enable_auto_commit")  # FastStream derives it from the ack policy
    listener = LaneListener()
    subscriber = broker.subscriber(
        kafka.topic_prefix + route.consumes.name,
        group_id=f"{kafka.topic_prefix}{group_name(worker, route.consumes)}",
        ack_policy=AckPolicy.MANUAL,
        listener=listener,
        title=f"{worker}:{route.consumes.name}",
        description=route.consumes.purpose,
        **options,
    )
    # FastStream constructs the subscriber; this only changes how it consumes. Canary tests watch what it relies on.
    subscriber.__class__ = LaneSubscriber
    assert isinstance(subscriber, LaneSubscriber)
    listener.subscriber = subscriber

    async def decoded(message: StreamMessage[Any]) -> Any:
        if route.read is not None:
            return route.read(_record(message.raw_message, kafka.topic_prefix))
        return decode_any(message.body, route.consumes.events)

    subscriber(route.handle, parser=parse_record, decoder=decoded)
    return subscriber


async def parse_record(record: "ConsumerRecord[Any, Any]") -> KafkaMessage:
    """FastStream's parser, but header bytes that are not UTF-8 do not make a record unreadable."""
    headers: Any = HeaderView(record.headers)
    return KafkaAckableMessage(
        body=record.value,
        headers=headers,
        content_type=headers.get("content-type"),
        message_id=f"{record.offset}-{record.timestamp}",
        correlation_id=headers.get("ce_id", f"{record.topic}/{record.partition}/{record.offset}"),
        raw_message=record,
        consumer=_NEVER_ACKED,
    )


class HeaderView(Mapping[str, str]):
    """Headers as text, decoded when asked for: few are ever read, and thousands of records are in memory at once."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Sequence[tuple[str, bytes]] | None) -> None:
        self._pairs = pairs or ()

    def __getitem__(self, name: str) -> str:
        for key, value in self._pairs:
            if key == name and value is not None:
                return value.decode("utf-8", "replace")
        raise KeyError(name)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def __iter__(self) -> Iterator[str]:
        return iter(header_map(self._pairs))

    def __len__(self) -> int:
        return len(header_map(self._pairs))


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
