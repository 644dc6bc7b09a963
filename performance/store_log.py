"""A log of many attempts for `performance.store`, made quickly; as a program, it writes it to a broker.

    python -m performance.store_log BOOTSTRAP ATTEMPTS

A process of its own, so that what it holds is not measured with what reads it. Says how much it wrote, as JSON.
"""

import asyncio
import json
import os
import random
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiokafka import AIOKafkaProducer

from rollstream.eventlog.connection import producer_options
from rollstream.eventlog.reading import Record
from rollstream.settings import KafkaSettings
from tests.events import Attempt, task_submitted

STEPS = 16
EVENTS_PER_ATTEMPT = STEPS + 4
GROUP = 4


@dataclass(slots=True)
class Log:
    """Records of attempts whose ids, texts and times differ, made from one attempt's by replacement: quickly."""

    attempts: int
    first: int = 0
    """The number of the first attempt: a log goes on where another ends."""
    _offsets: dict[str, int] = field(default_factory=dict)

    def records(self) -> Iterator[Record]:
        words = random.Random(1)
        vocabulary = ["".join(words.choices(string.ascii_lowercase, k=words.randint(2, 9))) for _ in range(3_000)]
        texts = [" ".join(words.choices(vocabulary, k=130)).encode() for _ in range(2_000)]
        task = task_submitted("TASK-NAME", attempts=GROUP)
        one = Attempt(task, question="QUESTION-TEXT", answer="ANSWER-TEXT")
        templates = [
            (event, event.to_json()) for event in (one.ready(), one.stepped(), one.completed(), one.verdict(), one.scored())
        ]
        own = {event.event_id: kind for kind, (event, _) in enumerate(templates)}
        for number in range(self.first, self.first + self.attempts):
            group, index = divmod(number, GROUP)
            minute = f"2026-03-{1 + group // 1440 % 28:02}T{group // 60 % 24:02}:{group % 60:02}".encode()
            ids = {task.group: f"group-{group}", one.rollout: _id(), one.session: _id(), **{id_: _id() for id_ in own}}
            if index == 0:
                yield self._record(
                    "tasks.in", _replaced(task.to_json(), {task.group: ids[task.group], task.event_id: _id()}, minute)
                )
            for event, raw in templates:
                for step in range(STEPS if event.kind == "AgentStepped" else 1):
                    made = _replaced(raw, {**ids, event.event_id: ids[event.event_id] if step == 0 else _id()}, minute)
                    made = made.replace(b"ANSWER-TEXT", words.choice(texts)).replace(b"QUESTION-TEXT", texts[group % 2_000])
                    made = made.replace(b'"index":0,"role"', b'"index":%d,"role"' % step)
                    made = made.replace(b'"index":0}', b'"index":%d}' % index)
                    yield self._record(_TOPICS[event.kind], made)

    def _record(self, topic: str, value: bytes) -> Record:
        offset = self._offsets.get(topic, 0)
        self._offsets[topic] = offset + 1
        return Record(topic, 0, offset, 1_772_000_000_000 + offset, None, value, ())


_TOPICS = {
    "SessionReady": "sessions.ready",
    "AgentStepped": "agent.steps",
    "EpisodeCompleted": "episodes.completed",
    "VerdictReached": "verdicts",
    "RolloutScored": "rollouts.scored",
}


def _id() -> str:
    raw = os.urandom(16).hex()
    return f"{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


def _replaced(raw: bytes, ids: dict[str, str], minute: bytes) -> bytes:
    for old, new in ids.items():
        raw = raw.replace(old.encode(), new.encode())
    return raw.replace(b"2026-03-01T12:00", minute)


async def write(bootstrap: str, attempts: int) -> tuple[int, int]:
    """Write a log; returns how many events and bytes."""
    kafka = KafkaSettings()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **producer_options(kafka))
    await producer.start()
    count = size = 0
    for record in Log(attempts).records():
        assert record.value is not None
        await producer.send(kafka.topic_prefix + record.topic, value=record.value, key=b"%d" % (count // EVENTS_PER_ATTEMPT))
        count += 1
        size += len(record.value)
    await producer.stop()
    return count, size


if __name__ == "__main__":
    events, written = asyncio.run(write(sys.argv[1], int(sys.argv[2])))
    print(json.dumps({"events": events, "bytes": written}), flush=True)
