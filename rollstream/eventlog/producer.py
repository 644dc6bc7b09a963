"""Events out: batched, acknowledged by all replicas, keyed as the catalogue says."""

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, ProducerClosed

from rollstream.errors import BoundaryFailure
from rollstream.eventlog.connection import UNCONNECTED, producer_options, unreachable
from rollstream.settings import KafkaSettings
from schemas.envelope import Event
from topics.catalogue import BY_EVENT

RETRY_S = 0.2
"""Pause before events that the broker did not take are sent again."""


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

    def __init__(self, bootstrap: str | None, kafka: KafkaSettings, client_id: str = "rollstream") -> None:
        self._bootstrap = bootstrap or UNCONNECTED
        self._kafka = kafka
        self._client_id = client_id
        self._producer: AIOKafkaProducer | None = None

    async def start(self) -> "EventProducer":
        """Connect.

        Raises:
            BrokerUnavailable: nobody answers.
        """
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap, client_id=self._client_id, **producer_options(self._kafka)
        )
        try:
            await producer.start()
        except (KafkaError, OSError) as error:
            await producer.stop()
            raise unreachable(self._bootstrap, error) from None
        self._producer = producer
        return self

    async def stop(self) -> None:
        if self._producer is not None:
            await self._producer.stop()
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
        """
        pending = await self._send(list(events))
        while pending:
            await asyncio.sleep(RETRY_S)
            pending = await self._send(pending)

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
            except KafkaError:
                # The buffer of a partition is full, and nobody has emptied it for as long as a request may take.
                failed = events[position:]
                break
        results = await asyncio.gather(*sent, return_exceptions=True)
        for event, result in zip(events, results, strict=False):
            if isinstance(result, MessageSizeTooLargeError):
                raise RecordTooLarge(event, self._kafka.max_record_bytes) from None
            if isinstance(result, KafkaError):
                failed.append(event)
            elif isinstance(result, BaseException):
                raise result
        return failed
