"""Whether the topics of an installation are still those that a worker began with.

Kafka tells no consumer that a topic was deleted and made anew: it goes on at an offset of the old log, and passes over the
first records of the new one. A topic with more partitions than before puts one session's records into two of them. Both end the
worker with one sentence; the next one begins with the topics as they are then.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from uuid import UUID

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from rollstream.cancelling import ended
from rollstream.errors import RollstreamError
from rollstream.eventlog.metadata import TopicFound, describe_topics
from rollstream.settings import KafkaSettings
from topics.catalogue import CATALOGUE, Topic

LOOK_EVERY_S = 5.0
LOOK_AGAIN_S = 1.0
"""After a change: a broker that has only just started may not know all topics yet."""


class TopicsChanged(RollstreamError):
    """A topic is not the one any more that this worker began with."""


def change(began: Mapping[str, TopicFound], found: Mapping[str, TopicFound | None], read: Collection[str]) -> str | None:
    """One sentence on the first topic that is another than when the worker began; None if none is.

    Args:
        read: topics that the worker reads: of those alone it matters which log it is.
    """
    for name, before in began.items():
        now = found[name]
        if now is None:
            return f"topic {name} is gone: the worker ends; one that starts makes it anew"
        if now.partitions != before.partitions:
            return (
                f"topic {name}: expected {before.partitions} partitions, found {now.partitions} (partition counts are frozen: "
                "set kafka.partitions to what exists, or use another kafka.topic_prefix)"
            )
        if name in read and before.id is not None and now.id != before.id:
            return f"topic {name} was deleted and made anew: the worker ends; one that starts begins at the new topic's start"
    return None


class TopicWatch:
    """Looks at the topics every few seconds. One for each worker; `start` before the first record."""

    def __init__(self, kafka: KafkaSettings, reads: Collection[Topic], changed: Callable[[RollstreamError], None]) -> None:
        self._names = [kafka.topic_prefix + topic.name for topic in CATALOGUE]
        self._read = {kafka.topic_prefix + topic.name for topic in reads}
        self._changed = changed
        self._began: dict[str, TopicFound] = {}
        self._task: asyncio.Task[None] | None = None
        self.ids: dict[str, UUID] = {}
        """Of each topic, as the worker began with it; none from brokers that have no topic ids."""

    async def start(self, admin: AIOKafkaAdminClient) -> None:
        """Learn which topics there are, and watch them.

        Raises:
            KafkaError: the broker does not say.
        """
        found = await describe_topics(admin._client, self._names)
        self._began = {name: topic for name, topic in found.items() if topic is not None}
        self.ids.update({name: topic.id for name, topic in self._began.items() if topic.id is not None})
        self._task = asyncio.create_task(self._watch(admin))

    async def close(self) -> None:
        await ended(self._task)

    async def _watch(self, admin: AIOKafkaAdminClient) -> None:
        before: str | None = None
        while True:
            await asyncio.sleep(LOOK_AGAIN_S if before else LOOK_EVERY_S)
            # A broker that is away has not changed a topic.
            with suppress(KafkaError, OSError, TimeoutError):
                found = await describe_topics(admin._client, self._names, deadline_s=LOOK_EVERY_S)
                sentence = change(self._began, found, self._read)
                if sentence and sentence == before:
                    self._changed(TopicsChanged(sentence))
                    return
                before = sentence
