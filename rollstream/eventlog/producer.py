"""Events out: batched, acknowledged by all replicas, keyed as the catalogue says."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidTimestampError,
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    ProducerClosed,
    TopicAuthorizationFailedError,
)

from rollstream.cancelling import shielded
from rollstream.errors import BoundaryFailure, BrokerRefuses
from rollstream.eventlog.connection import LINGER_MS, UNCONNECTED, producer_options, unreachable
from rollstream.settings import KafkaSettings, Settings
from schemas.envelope import Event
from topics.catalogue import BY_EVENT

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause before events that the broker did not take are sent again."""
REFUSALS = (
    ClusterAuthorizationFailedError,
    InvalidTimestampError,
    InvalidTopicError,
    PolicyViolationError,
    TopicAuthorizationFailedError,
)
"""Answers of a broker that does not want a record. Every other failure may pass, and is waited out."""


class RecordTooLarge(BoundaryFailure):
    """An event does not fit the broker's record size; the same event will never fit."""

    def __init__(self, event: Event, limit: int) -> None:
        super().__init__(
            f"{event.kind} does not fit a record of {limit} bytes: lower `limits.max_output_bytes` "
            "or raise `kafka.max_record_bytes` and the topic's max.message.bytes",
            stage="agent",
            kind="record_too_large",
            retryable=False,
        )


class Publisher(Protocol):
    """Where events go. Returns once every one of them is durable."""

    async def publish(self, events: Iterable[Event]) -> None: ...


class EventProducer:
    """`Publisher` on Kafka. One per process."""

    def __init__(
        self, bootstrap: str | None, kafka: KafkaSettings, client_id: str = "rollstream", *, linger_ms: int = LINGER_MS
    ) -> None:
        self._linger_ms = linger_ms
        self._bootstrap = bootstrap or UNCONNECTED
        self._kafka = kafka
        self._client_id = client_id
        self._producer: AIOKafkaProducer | None = None
        self._waits = False

    @classmethod
    def prompt(cls, settings: Settings, name: str) -> "EventProducer":
        """A producer for what somebody waits for: it sends at once, and batches what comes while it sends."""
        return cls(settings.bootstrap_servers, settings.kafka, f"rollstream-{name}", linger_ms=0)

    async def start(self) -> "EventProducer":
        """Connect.

        Raises:
            BrokerUnavailable: nobody answers.
        """
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap, client_id=self._client_id, **producer_options(self._kafka, self._linger_ms)
        )
        try:
            await producer.start()
        except BaseException as error:
            await shielded(producer.stop())
            if isinstance(error, KafkaError | OSError):
                raise unreachable(self._bootstrap, error) from None
            raise
        self._producer = producer
        return self

    async def stop(self) -> None:
        if self._producer is not None:
            await shielded(self._producer.stop())
            self._producer = None

    async def __aenter__(self) -> "EventProducer":
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def publish(self, events: Iterable[Event]) -> None:
        """Send events to their topics and wait until all are durable.

        A broker that is away is waited for, however long: the caller's record is not acked meanwhile.

        Raises:
            RecordTooLarge: an event is over `kafka.max_record_bytes`.
            BrokerRefuses: the broker will not have an event, whatever its size.
        """
        pending = await self._send(list(events))
        while pending:
            await asyncio.sleep(RETRY_S)
            pending = await self._send(pending)
        self._waits = False

    async def publish_raw(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]] = ()
    ) -> None:
        """Send one record as it is, to a topic named without the installation's prefix."""
        assert self._producer is not None, "start() first"
        await self._producer.send_and_wait(self._kafka.topic_prefix + topic, value=value, key=key, headers=list(headers))

    async def _send(self, events: list[Event]) -> list[Event]:
        """Send all; return those that the broker did not take in time, to be sent again (their ids make that harmless)."""
        assert self._producer is not None, "start() first"
        sent: list[asyncio.Future[object]] = []
        failed: list[Event] = []
        for position, event in enumerate(events):
            topic = self._kafka.topic_prefix + BY_EVENT[type(event)].name
            try:
                sent.append(await self._producer.send(topic, value=event.to_json(), key=event.key(), headers=event.headers()))
            except MessageSizeTooLargeError:
                raise RecordTooLarge(event, self._kafka.max_record_bytes) from None
            except ProducerClosed:
                raise
            except REFUSALS as error:
                raise _refused(event, topic, error) from None
            except KafkaError as error:
                # The buffer of a partition is full, and nobody has emptied it for as long as a request may take.
                self._wait(error)
                failed = events[position:]
                break
        results = await asyncio.gather(*sent, return_exceptions=True)
        for event, result in zip(events, results, strict=False):
            if isinstance(result, MessageSizeTooLargeError):
                raise RecordTooLarge(event, self._kafka.max_record_bytes) from None
            if isinstance(result, REFUSALS):
                raise _refused(event, self._kafka.topic_prefix + BY_EVENT[type(event)].name, result)
            if isinstance(result, KafkaError):
                self._wait(result)
                failed.append(event)
            elif isinstance(result, BaseException):
                raise result
        return failed

    def _wait(self, error: KafkaError) -> None:
        """Say once that events wait for the broker."""
        if not self._waits:
            log.warning("the broker takes no events at the moment, they are sent again: %r", error)
        self._waits = True


def _refused(event: Event, topic: str, error: KafkaError) -> BrokerRefuses:
    hint = ""
    if isinstance(error, InvalidTimestampError):
        hint = ": the clock of this machine is wrong, or the topic needs message.timestamp.type=LogAppendTime"
    return BrokerRefuses(f"the broker does not take a {event.kind} on {topic} ({type(error).__name__}){hint}")
