"""From bytes to events: the one decoder, lenient about what newer writers add, strict about what it needs."""

from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from schemas.action import ActionRequested, EnvironmentCalled, ObservationReturned, StepRewarded
from schemas.envelope import Event
from schemas.episode import EpisodeCompleted
from schemas.failure import DeadLettered, DeadLetterSettled
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored
from schemas.run import RunCancelled, RunPaused, RunPublished, RunResumed
from schemas.sandbox import SandboxLeased, SandboxReleased
from schemas.session import SessionReady
from schemas.step import AgentStepped
from schemas.task import TaskSubmitted
from schemas.verdict import VerdictReached

EVENTS: dict[str, type[Event]] = {
    "RunPublished": RunPublished,
    "RunPaused": RunPaused,
    "RunResumed": RunResumed,
    "RunCancelled": RunCancelled,
    "TaskSubmitted": TaskSubmitted,
    "SessionReady": SessionReady,
    "ActionRequested": ActionRequested,
    "ObservationReturned": ObservationReturned,
    "AgentStepped": AgentStepped,
    "StepRewarded": StepRewarded,
    "EnvironmentCalled": EnvironmentCalled,
    "EpisodeCompleted": EpisodeCompleted,
    "VerdictReached": VerdictReached,
    "RolloutScored": RolloutScored,
    "RetryScheduled": RetryScheduled,
    "SandboxLeased": SandboxLeased,
    "SandboxReleased": SandboxReleased,
    "DeadLettered": DeadLettered,
    "DeadLetterSettled": DeadLetterSettled,
}

E = TypeVar("E", bound=Event)


class UndecodableEvent(ValueError):
    """The bytes are not the event that was expected. The message is one sentence."""


def decode(raw: bytes | None, expected: type[E]) -> E:
    """Decode one record value as `expected`.

    Raises:
        UndecodableEvent: not JSON, another kind, a newer schema version, or a field that is missing or malformed.
    """
    if raw is None:
        raise UndecodableEvent(f"expected a {expected.__name__}, found a record without a value")
    try:
        event = expected.model_validate_json(raw)
    except ValidationError as error:
        raise UndecodableEvent(_why(raw, expected, error)) from None
    if event.schema_version > expected.SCHEMA_VERSION:
        raise UndecodableEvent(_newer(expected, event.schema_version))
    _forget_given(event)
    return event


def decode_any(raw: bytes | None, expected: tuple[type[Event], ...]) -> Event:
    """Decode one record value as whichever of `expected` its `kind` says.

    Raises:
        UndecodableEvent: as `decode`, and when its kind is none of them.
    """
    if len(expected) == 1 or raw is None:
        return decode(raw, expected[0])
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return decode(raw, expected[0])
    kind = body.get("kind") if isinstance(body, dict) else None
    for event in expected:
        if event.__name__ == kind:
            return decode(raw, event)
    names = ", ".join(event.__name__ for event in expected)
    raise UndecodableEvent(f"expected an event of kind {names}, found kind {kind!r}")


_NOBODY_ASKS: set[str] = set()
_MODEL = type(BaseModel)


def _forget_given(model: BaseModel) -> None:
    """Share one record of which fields were given: a set for each model weighs as much as its values do, and many are held."""
    object.__setattr__(model, "__pydantic_fields_set__", _NOBODY_ASKS)
    for value in model.__dict__.values():
        if type(type(value)) is _MODEL:  # `isinstance` asks an abstract class, and takes as long as the decoding
            _forget_given(value)


def _newer(expected: type[Event], found: object) -> str:
    return (
        f"expected {expected.__name__} of schema version {expected.SCHEMA_VERSION} or lower, found version {found}: "
        "upgrade this worker"
    )


def _why(raw: bytes, expected: type[Event], error: ValidationError) -> str:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        return f"expected {expected.__name__} as JSON, found {len(raw)} bytes that are not: {problem}"
    if not isinstance(body, dict):
        return f"expected {expected.__name__} as a JSON object, found a JSON {type(body).__name__}"
    if body.get("kind") != expected.__name__:
        return f"expected an event of kind {expected.__name__}, found kind {body.get('kind')!r}"
    version = body.get("schema_version")
    if isinstance(version, int) and version > expected.SCHEMA_VERSION:
        return _newer(expected, version)
    return f"expected a valid {expected.__name__}, found {describe(error)}"


def describe(error: ValidationError) -> str:
    """The first problem of a validation, and how many more there are, in half a sentence.

    Says of what type the value is, and never what it is: it may be an answer, and the sentence goes where no answer may.
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"]) or "the whole"
    found = "" if first["type"] == "missing" else f" (it is {_type_of(first['input'])})"
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{where}: {first['msg']}{found}{more}"


_TYPES = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def _type_of(value: object) -> str:
    """What JSON calls a value."""
    if value == "":
        return "empty text"
    return "null" if value is None else _TYPES.get(type(value), f"a {type(value).__name__}")
