"""The same hops with nothing of ours in them: what Kafka and aiokafka alone cost on this machine.

    python -m performance.bare_chain STAGE PREFIX BOOTSTRAP SPEC

A stage reads one topic, writes records of given sizes to others and commits, in batches. `SPEC` is JSON:
{"reads": topic, "writes": [[topic, bytes, copies], …]}. A stage without `writes` only reads.
"""

import asyncio
import json
import os
import sys

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from rollstream.eventlog.connection import consumer_options, producer_options
from rollstream.settings import KafkaSettings


async def run(stage: str, prefix: str, bootstrap: str, reads: list[str], writes: list[tuple[str, int, int]]) -> None:
    kafka = KafkaSettings()
    consumer = AIOKafkaConsumer(
        *(prefix + topic for topic in reads),
        bootstrap_servers=bootstrap,
        group_id=prefix + stage,
        **consumer_options(kafka),
    )
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **producer_options(kafka))
    await consumer.start()
    await producer.start()
    print("ready", flush=True)
    # Random text that compresses about as well as events do.
    payloads = {topic: os.urandom(size // 6).hex().encode().ljust(size, b"x") for topic, size, _ in writes}
    while True:
        batches = await consumer.getmany(timeout_ms=200, max_records=500)
        sent = [
            await producer.send(prefix + topic, payloads[topic], key=(record.key or b"") + b"%d" % copy)
            for records in batches.values()
            for record in records
            for topic, _, copies in writes
            for copy in range(copies)
        ]
        if batches:
            await asyncio.gather(*sent)
            await consumer.commit()


if __name__ == "__main__":
    name, prefix, bootstrap, spec = sys.argv[1:5]
    parsed = json.loads(spec)
    uvloop.run(run(name, prefix, bootstrap, parsed["reads"], [tuple(write) for write in parsed["writes"]]))
