"""Topics as they are against topics as the catalogue wants them. Idempotent: what exists is compared, never changed."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import NoError, TopicAlreadyExistsError, for_code

from rollstream.errors import UsageError
from rollstream.eventlog.metadata import describe_topics
from rollstream.settings import KafkaSettings
from topics.catalogue import CATALOGUE, Topic

KNOWN_WITHIN_S = 15.0


class TopicMismatch(UsageError):
    """Topics exist with other partitions or retention than this installation needs."""


class TopicsRefused(UsageError):
    """The broker would not create topics."""


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What provisioning found and did. Names carry the installation's prefix."""

    created: list[str] = field(default_factory=list)
    existing: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    """One sentence each: the topic, what was expected, what was found."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic of the catalogue as the broker has it; `partitions` is None when it does not exist."""

    topic: Topic
    name: str
    partitions: int | None
    config: dict[str, str]


async def describe(admin: AIOKafkaAdminClient, kafka: KafkaSettings) -> list[TopicState]:
    """All topics of the catalogue, in its order."""
    names = {topic: kafka.topic_prefix + topic.name for topic in CATALOGUE}
    found = await describe_topics(admin._client, list(names.values()))
    counts = {name: topic.partitions for name, topic in found.items() if topic}
    configs = await _configs(admin, list(counts)) if counts else {}
    return [TopicState(topic, name, counts.get(name), configs.get(name, {})) for topic, name in names.items()]


async def _configs(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    found: dict[str, dict[str, str]] = {}
    for response in await admin.describe_configs(resources):
        for resource in response.resources:
            name, entries = resource[3], resource[4]
            found[name] = {entry[0]: entry[1] for entry in entries}
    return found


def compare(states: Sequence[TopicState], kafka: KafkaSettings) -> list[str]:
    """What differs from the catalogue, one sentence a difference. Missing topics are not a difference."""
    sentences = []
    for state in states:
        if state.partitions is None:
            continue
        expected = state.topic.partitions(kafka.partitions)
        if state.partitions != expected:
            sentences.append(
                f"topic {state.name}: expected {expected} partitions, found {state.partitions} "
                "(partition counts are frozen: set kafka.partitions to what exists, or use another kafka.topic_prefix)"
            )
        for key, value in state.topic.config(kafka.max_record_bytes).items():
            found = state.config.get(key)
            if found is not None and found != value:
                sentences.append(f"topic {state.name}: expected {key}={value}, found {found}")
    return sentences


async def ensure(admin: AIOKafkaAdminClient, kafka: KafkaSettings) -> Provisioned:
    """Create what is missing and compare what exists."""
    states = await describe(admin, kafka)
    missing = [state for state in states if state.partitions is None]
    if missing:
        response = await admin.create_topics(
            [
                NewTopic(
                    name=state.name,
                    num_partitions=state.topic.partitions(kafka.partitions),
                    replication_factor=kafka.replication_factor,
                    topic_configs=state.topic.config(kafka.max_record_bytes),
                )
                for state in missing
            ]
        )
        _require_created(response.topic_errors)
        await _until_known(admin, [state.name for state in missing])
    existing = [state for state in states if state.partitions is not None]
    return Provisioned(
        created=[state.name for state in missing],
        existing=[state.name for state in existing],
        mismatches=compare(existing, kafka),
    )


async def _until_known(admin: AIOKafkaAdminClient, names: Sequence[str]) -> None:
    """Wait until the broker tells of topics that it has just made: until then they read as missing, which means empty.

    Raises:
        TopicsRefused: it does not.
    """
    give_up = time.monotonic() + KNOWN_WITHIN_S
    while unknown := [name for name, found in (await describe_topics(admin._client, names)).items() if found is None]:
        if time.monotonic() > give_up:
            raise TopicsRefused(f"the broker made {', '.join(unknown)}, and does not know of them {KNOWN_WITHIN_S:g} s later")
        await asyncio.sleep(0.05)


def _require_created(errors: Iterable[Sequence[Any]]) -> None:
    """Look at what the broker says of each topic: (name, error code, message if its version has one).

    Raises:
        TopicsRefused: it did not make one of them. That somebody else was first is no failure.
    """
    refused = [
        f"{name} ({'; '.join(filter(None, [for_code(code).__name__, *rest]))})"
        for name, code, *rest in errors
        if code not in (NoError.errno, TopicAlreadyExistsError.errno)
    ]
    if refused:
        raise TopicsRefused(f"the broker did not create {', '.join(refused)}; look at kafka.replication_factor and its log")


async def require(admin: AIOKafkaAdminClient, kafka: KafkaSettings) -> None:
    """Make sure a worker can run on these topics.

    Raises:
        TopicMismatch: some exist with another partition count; co-partitioning would silently break.
    """
    outcome = await ensure(admin, kafka)
    wrong = [sentence for sentence in outcome.mismatches if "partitions" in sentence]
    if wrong:
        raise TopicMismatch("; ".join(wrong))
