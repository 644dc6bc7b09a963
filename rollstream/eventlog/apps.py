"""A worker as a FastStream application: topics in lanes, one producer, failures settled the same way everywhere."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from faststream import AckPolicy, FastStream
from faststream._internal.broker import BrokerUsecase
from faststream.kafka import KafkaBroker
from faststream.kafka.message import KafkaAckableMessage, KafkaMessage
from faststream.message import StreamMessage
from faststream.specification import AsyncAPI

import rollstream
from rollstream.errors import BoundaryFailure, BrokerRefuses
from rollstream.eventlog import provisioning
from rollstream.eventlog.connection import UNCONNECTED, close_admin, connect_admin, consumer_options
from rollstream.eventlog.control import RunControl
from rollstream.eventlog.failures import Boundary, Settler, TaskFailure, headers_of
from rollstream.eventlog.groups import group_name
from rollstream.eventlog.handover import Handover, Places
from rollstream.eventlog.lanes import Hooks, LaneListener, LaneOptions, LaneSubscriber, Settle, Wants
from rollstream.eventlog.offsets import GroupOffsets
from rollstream.eventlog.ownership import Assignment
from rollstream.eventlog.pools import Pools
from rollstream.eventlog.producer import EventProducer
from rollstream.eventlog.reading import Record
from rollstream.eventlog.retries import policy_of
from rollstream.eventlog.running import run_of
from rollstream.eventlog.topic_watch import TopicWatch
from rollstream.health import WorkerHealth
from rollstream.settings import DEFAULT_POOL, Settings
from schemas.envelope import header_map, now
from schemas.events import decode_any
from topics.catalogue import RUNS_CONTROL, Topic

log = logging.getLogger(__name__)
Hook = Callable[[], Awaitable[Any]]


class WorkerApp(FastStream):
    """A FastStream application that can say that it broke, so that its process ends instead of living on as a zombie."""

    def __init__(self, broker: KafkaBroker, worker: str, start: Sequence[Hook], stop: Sequence[Hook]) -> None:
        super().__init__(broker, logger=None, on_startup=start, after_shutdown=stop, specification=specification(worker))
        self.worker = worker
        self.broken = asyncio.Event()
        self.failure: BaseException | None = None

    def break_with(self, failure: BaseException) -> None:
        """Say that this worker cannot go on. The first reason is kept."""
        self.failure = self.failure or failure
        self.broken.set()

    def health(self) -> WorkerHealth:
        """How this worker is at the moment."""
        lanes = [one for broker in self.brokers for one in broker.subscribers if isinstance(one, LaneSubscriber)]
        failure = None if self.failure is None else str(self.failure) or repr(self.failure)
        return WorkerHealth(self.worker, failure, tuple(one.health() for one in lanes))


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
        assigned: told which partitions of the topic this worker owns, before their first record.
        queue_timeout_s: how long a fetched record may wait for a lane before it fails, retryably; None waits for ever.
    """

    consumes: Topic
    handle: Callable[[Any], Awaitable[None]]
    lanes: int
    read: Callable[[Record], Any] | None = None
    wants: Callable[[Mapping[str, str]], bool] | None = None
    once: bool = False
    queue_timeout_s: float | None = None
    assigned: Callable[[Assignment], None] | None = None


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

    Records of cancelled runs are acked unread, and their running work is stopped; so are records that another pool serves.
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
        await watch.start(admins[0])
        await places.start(GroupOffsets(admins[0]))
        await clients.producer.start()
        await clients.control.start()

    async def stop() -> None:
        await places.close()
        await watch.close()
        await clients.control.close()
        await clients.producer.stop()
        for admin in admins:
            await close_admin(admin)

    app = WorkerApp(broker, name, start=[start, *wiring.start], stop=[*wiring.stop, stop])
    handovers = [_handover(settings, name, route.consumes) for route in wiring.routes if settings.pools]
    places = Places(handovers, keeping=settings.pool == DEFAULT_POOL, broke=app.break_with)
    watch = TopicWatch(settings.kafka, [RUNS_CONTROL, *(route.consumes for route in wiring.routes)], app.break_with)
    settler = Settler(wiring.boundary, policy_of(settings.retries), settings.retries.budget_per_run)
    for subscriber, route in zip(subscribers, wiring.routes, strict=True):
        subscriber.set_up(
            LaneOptions(
                lanes=route.lanes,
                commit_interval_s=settings.kafka.commit_interval_s,
                drain_timeout_s=settings.kafka.drain_timeout_s,
                session_timeout_s=settings.kafka.session_timeout_s,
                once=route.once,
                queue_timeout_s=route.queue_timeout_s,
            ),
            Hooks(
                settle=_settle(settings, route, settler, clients.producer),
                wants=_wants(settings, route, clients.control),
                offsets=_offsets(admins, watch, subscriber),
                broke=app.break_with,
                assigned=route.assigned,
            ),
        )

    def stop_run(run: str) -> None:
        for subscriber in subscribers:
            subscriber.cancel_run(run)

    clients.control.on_cancelled = stop_run
    return app


def _offsets(
    admins: Sequence[AIOKafkaAdminClient], watch: TopicWatch, subscriber: LaneSubscriber
) -> Callable[[], GroupOffsets]:
    def offsets() -> GroupOffsets:
        assert subscriber.consumer is not None, "only a subscriber that is started has offsets"
        return GroupOffsets(admins[0], watch.ids, subscriber.consumer.end_offsets)

    return offsets


def _settle(settings: Settings, route: Route, settler: Settler, producer: EventProducer) -> Settle:
    async def settle(raw: "ConsumerRecord[Any, Any]", error: Exception) -> None:
        if isinstance(error, BrokerRefuses):
            # What is wrong is the deployment, not the record: the worker ends, and the record is still to be done.
            raise error
        record = _record(raw, settings.kafka.topic_prefix)
        level = logging.WARNING if isinstance(error, BoundaryFailure | TaskFailure) else logging.ERROR
        log.log(level, "%s/%d/%d: %s", record.topic, record.partition, record.offset, error)
        await producer.publish(settler.settle(record, error, route.consumes.events, now()))

    return settle


def _wants(settings: Settings, route: Route, control: RunControl) -> Wants:
    pools = Pools.of(settings)

    def wants(raw: "ConsumerRecord[Any, Any]") -> bool:
        if control.any_cancelled and control.cancelled(run_of(raw) or ""):
            return False
        headers = HeaderView(raw.headers)
        # Where headers do not tell, the handler asks what it has decoded.
        if pools.declared and pools.told_by(route.consumes, headers) not in (settings.pool, None):
            return False
        return route.wants is None or route.wants(headers)

    return wants


def _handover(settings: Settings, worker: str, topic: Topic) -> Handover:
    kafka = settings.kafka
    default, *pools = [kafka.topic_prefix + group_name(worker, topic, pool) for pool in Pools.of(settings).names]
    numbers = range(topic.partitions(kafka.partitions))
    return Handover(default, pools, [TopicPartition(kafka.topic_prefix + topic.name, number) for number in numbers])


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
    options["auto_offset_reset"] = "none"  # lanes go to the start of a log themselves, and say what they pass over
    listener = LaneListener()
    subscriber = broker.subscriber(
        kafka.topic_prefix + route.consumes.name,
        group_id=f"{kafka.topic_prefix}{group_name(worker, route.consumes, settings.pool)}",
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
