"""How every Kafka client of the system is configured: one place, so that none runs with a default by accident."""

import asyncio
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from rollstream.cancelling import shielded
from rollstream.errors import BrokerUnavailable
from rollstream.settings import KafkaSettings

CONNECT_S = 15.0

UNCONNECTED = "localhost:9092"
"""Where an application that is only described, not run, pretends to connect."""

LINGER_MS = 5
"""How long a producer waits for more to send, where nobody waits for what it sends."""


def producer_options(kafka: KafkaSettings, linger_ms: int = LINGER_MS) -> dict[str, Any]:
    """Durable, batched, ordered by key; idempotent only if asked for, see `kafka.idempotent_producer`."""
    return {
        "acks": "all",
        "enable_idempotence": kafka.idempotent_producer,
        "compression_type": "zstd",
        "linger_ms": linger_ms,
        "max_batch_size": 256 * 1024,
        "max_request_size": kafka.max_record_bytes,
        "request_timeout_ms": 30_000,
        "retry_backoff_ms": 100,
    }


def consumer_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Read from the start what nobody has committed, fetch in large pieces, never commit by itself."""
    return {
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "max_partition_fetch_bytes": max(1024 * 1024, kafka.max_record_bytes // 4),
        "fetch_max_wait_ms": 100,
        "session_timeout_ms": round(kafka.session_timeout_s * 1000),
        "heartbeat_interval_ms": round(kafka.session_timeout_s * 1000 / 6),
        "rebalance_timeout_ms": 60_000,
        "max_poll_interval_ms": 300_000,
    }


async def connect_admin(bootstrap: str, deadline_s: float = CONNECT_S) -> AIOKafkaAdminClient:
    """A started admin client.

    Raises:
        BrokerUnavailable: nobody answers at `bootstrap` within the deadline.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=round(deadline_s * 1000))
    try:
        async with asyncio.timeout(deadline_s):
            await admin.start()
    except BaseException as error:
        await close_admin(admin)
        if isinstance(error, KafkaError | TimeoutError | OSError):
            raise unreachable(bootstrap, error) from None
        raise
    return admin


async def close_admin(admin: AIOKafkaAdminClient) -> None:
    """Close an admin client, also while the caller is being cancelled."""
    await shielded(admin.close())


async def start_consumer(consumer: AIOKafkaConsumer, bootstrap: str) -> None:
    """Connect a consumer; on failure nothing of it is left open.

    Raises:
        BrokerUnavailable: nobody answers at `bootstrap`.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            await consumer.start()
    except BaseException as error:
        await stop_consumer(consumer)
        if isinstance(error, KafkaError | TimeoutError | OSError):
            raise unreachable(bootstrap, error) from None
        raise


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Stop a consumer, whatever it is doing at the moment, also while the caller is being cancelled."""
    await shielded(_stop(consumer))


async def _stop(consumer: AIOKafkaConsumer) -> None:
    # Stopped while it waits to fetch again, aiokafka lets its own cancellation escape, which looks as if its caller were
    # cancelled, and leaves its client open.
    stopping = asyncio.ensure_future(consumer.stop())
    await asyncio.wait([stopping])
    if stopping.cancelled():
        await consumer._client.close()
    else:
        stopping.result()


async def installation_of(bootstrap: str, kafka: KafkaSettings) -> str:
    """Which installation this is: the Kafka cluster's id, and the prefix of its topics.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    admin = await connect_admin(bootstrap)
    try:
        cluster = await admin.describe_cluster()
    except (KafkaError, OSError, TimeoutError) as error:
        raise unreachable(bootstrap, error) from None
    finally:
        await close_admin(admin)
    return f"{cluster['cluster_id']}/{kafka.topic_prefix}"


def unreachable(bootstrap: str, error: BaseException | None = None) -> BrokerUnavailable:
    reason = f" ({type(error).__name__})" if error else ""
    return BrokerUnavailable(
        f"no Kafka broker answers at {bootstrap}{reason}: start one with `rollstream up`, "
        "or name your own in KAFKA_BOOTSTRAP_SERVERS"
    )
