"""The other end of a bare request and reply: what Kafka and aiokafka alone cost, there and back.

    python -m performance.echo BOOTSTRAP REQUESTS REPLIES BYTES

Reads one topic and answers each record with one of so many bytes under the same key, at once.
"""

import os
import sys

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from rollstream.eventlog.connection import consumer_options, producer_options
from rollstream.settings import KafkaSettings


async def run(bootstrap: str, requests: str, replies: str, size: int) -> None:
    consumer = AIOKafkaConsumer(
        requests,
        bootstrap_servers=bootstrap,
        group_id="echo",
        **consumer_options(KafkaSettings()) | {"auto_offset_reset": "latest"},
    )
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **producer_options(KafkaSettings(), linger_ms=0))
    await consumer.start()
    await producer.start()
    # The first fetch comes after the group has formed.
    await consumer.getmany(timeout_ms=1_000)
    print("ready", flush=True)
    payload = os.urandom(size // 3).hex().encode()[:size].ljust(size, b"x")
    async for record in consumer:
        await producer.send_and_wait(replies, payload, key=record.key)


if __name__ == "__main__":
    uvloop.run(run(*sys.argv[1:4], int(sys.argv[4])))
