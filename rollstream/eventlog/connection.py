"""How every Kafka client of the system is configured: one place, so that none runs with a default by accident."""

import asyncio
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from rollstream.errors import BrokerUnavailable
from rollstream.settings import KafkaSettings

UNCONNECTED = "localhost:9092"
"""Where an application that is only described, not run, pretends to connect."""


def producer_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Durable, batched, ordered by key. Not idempotent: correctness comes from event ids, on any Kafka-compatible broker."""
    return {
        "acks": "all",
        "enable_idempotence": False,
        "compression_type": "zstd",
        "linger_ms": 5,
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


async def connect_admin(bootstrap: str, deadline_s: float = 15.0) -> AIOKafkaAdminClient:
    """A started admin client.

    Raises:
        BrokerUnavailable: nobody answers at `bootstrap` within the deadline.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=round(deadline_s * 1000))
    try:
        await asyncio.wait_for(admin.start(), deadline_s)
    except (KafkaError, TimeoutError, OSError) as error:
        await admin.close()
        raise unreachable(bootstrap, error) from None
    return admin


def unreachable(bootstrap: str, error: BaseException | None = None) -> BrokerUnavailable:
    reason = f" ({type(error).__name__})" if error else ""
    return BrokerUnavailable(
        f"no Kafka broker answers at {bootstrap}{reason}: start one with `rollstream up`, "
        "or name your own in KAFKA_BOOTSTRAP_SERVERS"
    )
