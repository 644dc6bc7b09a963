"""Records that nobody could handle, as `dead.letters` has them, and the records themselves as they still stand in the log.

A letter is known by its offset: the topic has one partition. It waits for a decision until somebody replays or discards it.
"""

from dataclasses import dataclass

from rollstream.errors import UsageError
from rollstream.eventlog.reading import Record, open_reader
from rollstream.ledger import Ledger
from rollstream.operations import Resumption, resumption
from rollstream.settings import KafkaSettings
from schemas.envelope import Headers
from schemas.events import UndecodableEvent, decode_any
from schemas.failure import DeadLettered, DeadLetterSettled
from topics.catalogue import BY_NAME, DEAD_LETTERS, TASKS_IN

READ_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    number: int
    """Its offset on `dead.letters`, by which people name it."""
    event: DeadLettered
    settled: str | None = None
    """What was done about it; None while it waits."""


@dataclass(frozen=True, slots=True)
class Original:
    """The record that a letter is about."""

    key: bytes | None
    value: bytes | None
    headers: Headers


async def read_letters(bootstrap: str, kafka: KafkaSettings) -> list[Letter]:
    """All dead letters, in the order of the log; a letter that was written twice is there once.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    letters: dict[str, tuple[int, DeadLettered]] = {}
    settled: dict[str, str] = {}
    async with open_reader(bootstrap, kafka, [DEAD_LETTERS]) as reader:
        async for batch in reader.to_end():
            for record in batch:
                try:
                    event = decode_any(record.value, DEAD_LETTERS.events)
                except UndecodableEvent:
                    # Nobody dead-letters a dead letter; the store counts it.
                    continue
                if isinstance(event, DeadLettered):
                    letters.setdefault(event.event_id, (record.offset, event))
                elif isinstance(event, DeadLetterSettled):
                    settled.setdefault(event.letter, event.how)
    return [Letter(number, event, settled.get(name)) for name, (number, event) in letters.items()]


def choose(letters: list[Letter], numbers: list[int], run: str | None, *, everything: bool) -> list[Letter]:
    """The letters that somebody named, or all that wait: of a run, or of any.

    Raises:
        UsageError: nothing was named, or a number that no letter has.
    """
    if not numbers and run is None and not everything:
        raise UsageError("expected numbers of dead letters (`rollstream dead-letters list`), --run or --all")
    by_number = {letter.number: letter for letter in letters}
    if unknown := [str(number) for number in numbers if number not in by_number]:
        raise UsageError(f"no dead letter has the number {', '.join(unknown)}: `rollstream dead-letters list` shows them")
    if numbers:
        return [by_number[number] for number in numbers]
    return [letter for letter in letters if letter.settled is None and run in (None, letter.event.run)]


async def read_original(bootstrap: str, kafka: KafkaSettings, letter: DeadLettered) -> Original:
    """The record that a letter is about, whole: from the log, which never forgets, or else as the letter keeps it.

    Raises:
        UsageError: the log has something else in its place, and the letter did not keep it.
    """
    record = await _record_at(bootstrap, kafka, letter)
    if record is not None and _is_same(record, letter):
        return Original(record.key, record.value, list(record.headers))
    if letter.omitted_bytes is not None:
        raise UsageError(
            f"{letter.subject()} is not in the log any more, and its {letter.omitted_bytes} bytes were too many for the letter"
        )
    key = None if letter.original_key is None else letter.key()
    return Original(key, letter.original_bytes(), letter.original_header_pairs())


def _is_same(record: Record, letter: DeadLettered) -> bool:
    if letter.omitted_bytes is not None:
        return len(record.value or b"") == letter.omitted_bytes
    return record.value == letter.original_bytes()


async def _record_at(bootstrap: str, kafka: KafkaSettings, letter: DeadLettered) -> Record | None:
    topic = BY_NAME.get(letter.topic)
    if topic is None:
        return None
    async with open_reader(bootstrap, kafka, [topic]) as reader:
        if not await reader.has(topic, letter.partition, letter.offset):
            return None
        await reader.seek_to_end()
        reader.seek(topic, {letter.partition: letter.offset})
        for record in await reader.poll(READ_TIMEOUT_S, max_records=1):
            if (record.partition, record.offset) == (letter.partition, letter.offset):
                return record
    return None


def concerned(ledger: Ledger, letter: DeadLettered) -> set[str]:
    """The attempts that ended with the letter's record: of a task, all of its group; of any other record, its own."""
    for ids in ledger.attempts():
        if ids.rollout == letter.rollout:
            if letter.topic != TASKS_IN.name:
                return {ids.rollout}
            return {other.rollout for other in ledger.attempts() if other.group.id == ids.group.id}
    return set()


@dataclass(frozen=True, slots=True)
class Replay:
    """What replaying a letter means: its record once more, or another round of the attempts that ended with it."""

    again: Resumption | None
    """None: nobody's attempt ended with it, so the record itself can be published once more."""


def replay_of(ledger: Ledger | None, letter: DeadLettered) -> Replay:
    """A second record of a session that has its terminal record would change nothing, so such attempts get a new round."""
    if ledger is None:
        return Replay(None)
    attempts = concerned(ledger, letter)
    if not attempts & ledger.counting().keys():
        return Replay(None)
    return Replay(resumption(ledger, ("errored",), attempts))
