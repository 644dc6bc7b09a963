"""What stands on `tasks.in` or in a task file, made into tasks: lenient in form, strict in meaning.

Three forms are read: a TaskSubmitted event, a bare JSON object with or without headers, and an unmodified NeMo Gym row.
Nothing is guessed about values: `attempts: "3"` is refused, because `"3"` is as likely a mistake as three attempts.

Everything an author wrote stays in the row, in one flat object that the environment's schema then reads. What stood under
`verifier_metadata` or `task_data` is grading data by declaration, so it can neither become the observation (`messages`,
`tools`) nor choose the environment; and a field at the top level wins over one of the same name below.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import orjson
from pydantic import ValidationError

from rollstream.environments.responses import Unconvertible, messages_of, sampling_of, tools_of
from rollstream.environments.tolerant_json import NotAnObject, parse_object, require_shallow
from rollstream.errors import Poison
from rollstream.settings import Defaults, SamplingSettings
from schemas import identities
from schemas.envelope import SessionIds
from schemas.events import EVENTS, describe
from schemas.task import TaskSubmitted, first_sessions
from schemas.values import Composition, EpisodeLimits, JsonObject, Sampling, TaskRef, clean_text

NESTED = ("verifier_metadata", "task_data")
TASK_NAMES = ("environment", "dataset", "split", "epoch", "sampling", "agent_ref", "responses_create_params")
"""Names that say something about a task. They are read, then left out of the row."""
RUN_NAMES = ("run", "run_id", "attempts", "harness", "model")
"""Names that a record on `tasks.in` may carry besides; in a file they are ordinary columns."""
ID_NAMES = ("task_id", "id", "uuid")
MAX_ATTEMPTS = 10_000
_KEPT_APART = frozenset({"messages", "tools", *TASK_NAMES, *RUN_NAMES})


@dataclass(frozen=True, slots=True)
class GroupIds:
    """Which attempts a record stood for, as far as it could be made out."""

    run: str
    group: str
    size: int
    environment: str
    task: TaskRef | None

    def sessions(self) -> Iterator[SessionIds]:
        """The first session of each attempt, for a terminal record of each."""
        return first_sessions(self.run, self.group, self.size, self.environment, self.task)


class Unreadable(Poison):
    """A record that is no task. The message is one sentence.

    Attributes:
        group: the attempts that must be told so; None when nobody can say which they were.
    """

    def __init__(self, message: str, group: GroupIds | None = None) -> None:
        super().__init__(message)
        self.group = group


@dataclass(frozen=True, slots=True)
class NormalisedTask:
    """A row understood: which task it is, and its fields flat. The environment has not validated it yet."""

    environment: str
    task_id: str
    row: JsonObject
    sampling: Sampling
    dataset: str | None
    split: str | None
    epoch: int


def read_task(
    raw: bytes | None, headers: Mapping[str, str], defaults: Defaults, limits: EpisodeLimits, recorded_at: datetime
) -> TaskSubmitted:
    """Understand one record of `tasks.in`.

    Args:
        limits: of tasks that are no TaskSubmitted events, which bring their own.
        recorded_at: the record's own time, so that reading it again gives the same ids.

    Raises:
        Unreadable: with what was expected and what was found.
    """
    headers = {name: clean_text(value) for name, value in headers.items()}
    try:
        body = _parsed(raw)
        if "kind" in body and (body["kind"] in list(EVENTS) or "event_id" in body):
            return _read_event(body, headers)
        return _read_bare(body, headers, defaults, limits, recorded_at)
    except Unreadable as error:
        error.group = error.group or _group_of({}, headers)
        raise


def normalise_row(
    row: Mapping[str, object],
    *,
    environment: str | None,
    fields: Mapping[str, str],
    defaults: Defaults,
    headers: Mapping[str, str] | None = None,
) -> NormalisedTask:
    """Understand one row of a task file.

    The environment is, by precedence: `environment`, the row's own `environment`, the header, `agent_ref` through
    `defaults.agent_ref`, `defaults.environment`. The id is the row's `task_id`, `id` or `uuid`, else its content hash.

    Args:
        row: any parsed JSON object, cleaned by `schemas.values.clean`.
        fields: field of the environment -> column of the row that holds it.

    Raises:
        Unreadable: with what was expected and what was found.
    """
    try:
        require_shallow(row)
    except NotAnObject as error:
        raise Unreadable(f"expected a row, found {error}") from None
    flat = _flat(row, fields)
    return _with_content(flat, _identify(flat, environment, defaults, headers or {}))


@dataclass(frozen=True, slots=True)
class _Identity:
    environment: str
    task_id: str | None
    dataset: str | None
    split: str | None
    epoch: int


def _parsed(raw: bytes | None) -> JsonObject:
    try:
        body = parse_object(raw)
        require_shallow(body)
    except NotAnObject as error:
        raise Unreadable(f"expected a task as a JSON object, found {error}") from None
    return body


def _read_event(body: JsonObject, headers: Mapping[str, str]) -> TaskSubmitted:
    kind, version = body["kind"], body.get("schema_version")
    group = _group_of(body, headers)
    if kind != "TaskSubmitted":
        raise Unreadable(f"expected a task, found an event of kind {_short(kind)}", group)
    if isinstance(version, int) and version > TaskSubmitted.SCHEMA_VERSION:
        expected = f"TaskSubmitted of schema version {TaskSubmitted.SCHEMA_VERSION} or lower"
        raise Unreadable(f"expected {expected}, found version {version}: upgrade this worker", group)
    try:
        event = TaskSubmitted.model_validate_json(orjson.dumps(body), strict=True)
        UUID(event.group)
    except ValidationError as error:
        raise Unreadable(f"expected a valid TaskSubmitted, found {describe(error)}", group) from None
    except ValueError:
        raise Unreadable(f"expected the group of a TaskSubmitted as a UUID, found {_short(body['group'])}", group) from None
    return event


def _read_bare(
    body: JsonObject, headers: Mapping[str, str], defaults: Defaults, limits: EpisodeLimits, recorded_at: datetime
) -> TaskSubmitted:
    flat = _flat(body, {})
    identity = _identify(flat, None, defaults, headers)
    dataset = identity.dataset or defaults.dataset
    run = _name(flat, ("run", "run_id"), headers) or defaults.run or identities.adhoc_run_id(recorded_at)
    attempts = _integer(flat, "attempts", headers)
    attempts = defaults.attempts if attempts is None else attempts
    try:
        harness = _name(flat, ("harness",), headers) or defaults.harness
        model = _name(flat, ("model",), headers) or defaults.model
        row = {name: value for name, value in flat.items() if name not in RUN_NAMES}
        task = _with_content(row, identity, headers)
        return TaskSubmitted.create(
            run=run,
            environment=task.environment,
            task=TaskRef(id=task.task_id, dataset=dataset, split=task.split, epoch=task.epoch),
            row=task.row,
            at=recorded_at,
            composition=Composition(harness=harness, models={"policy": model}, sampling=task.sampling),
            attempts=attempts,
            limits=limits,
        )
    except Unreadable as error:
        if identity.task_id is not None:
            task_ref = TaskRef(id=identity.task_id, dataset=dataset, split=identity.split, epoch=identity.epoch)
            group = identities.group_id(run, identity.environment, dataset, identity.task_id, identity.epoch)
            error.group = GroupIds(run, group, attempts, identity.environment, task_ref)
        raise


def _flat(row: Mapping[str, object], fields: Mapping[str, str]) -> JsonObject:
    """One level: nested grading data merged in, columns under the names that the environment knows."""
    flat = dict(row)
    for nested in NESTED:
        inner = row.get(nested)
        if not isinstance(inner, dict):
            continue
        apart = {name: value for name, value in inner.items() if name in _KEPT_APART}
        flat = {name: value for name, value in inner.items() if name not in _KEPT_APART} | flat
        flat[nested] = apart
        if not apart:
            del flat[nested]
    missing = [column for column in fields.values() if column not in flat]
    if missing:
        raise Unreadable(f"expected a column {_short(missing[0])}, found {', '.join(sorted(flat)) or 'none at all':.300}")
    renamed = {name: flat[column] for name, column in fields.items()}
    return {name: value for name, value in flat.items() if name not in fields.values()} | renamed


def _identify(flat: JsonObject, environment: str | None, defaults: Defaults, headers: Mapping[str, str]) -> _Identity:
    agent = _agent_name(flat)
    environment = (
        environment or _name(flat, ("environment",), headers) or defaults.agent_ref.get(agent or "") or defaults.environment
    )
    if environment is None:
        told = f"agent_ref {agent!r}, which [defaults.agent_ref] does not map" if agent else "none"
        raise Unreadable(
            f"expected an environment in the task, a header or [defaults] of the settings, found {told}; "
            f"the task has the fields {', '.join(sorted(flat)):.300}"
        )
    return _Identity(
        environment=environment,
        task_id=_task_id(flat, headers),
        dataset=_name(flat, ("dataset",), headers),
        split=_name(flat, ("split",), headers),
        epoch=_integer(flat, "epoch", headers, least=0, most=2**31) or 0,
    )


def _with_content(flat: JsonObject, identity: _Identity, headers: Mapping[str, str] | None = None) -> NormalisedTask:
    params = flat.get("responses_create_params")
    if params is not None and not isinstance(params, dict):
        raise Unreadable(f"expected responses_create_params as an object, found {_short(params)}")
    row = {name: value for name, value in flat.items() if name not in TASK_NAMES}
    params = params or {}
    try:
        asked, offered = messages_of(params), tools_of(params.get("tools"))
        if asked is not None and row.get("messages"):
            raise Unreadable("expected messages or responses_create_params.input, found both")
        if isinstance(row.get("messages"), str):
            asked = [{"role": "user", "content": str(row["messages"])}]
        offered = offered or tools_of(row.get("tools"))
    except Unconvertible as error:
        raise Unreadable(str(error)) from None
    row |= {"messages": asked} if asked else {}
    row |= {"tools": offered} if offered else {}
    return NormalisedTask(
        environment=identity.environment,
        task_id=identity.task_id or identities.task_id_of(row),
        row=row,
        sampling=_sampling(sampling_of(params), flat, headers or {}),
        dataset=identity.dataset,
        split=identity.split,
        epoch=identity.epoch,
    )


def _sampling(asked: JsonObject, flat: JsonObject, headers: Mapping[str, str]) -> Sampling:
    """`sampling` of the task or the header, over what its request asks for, name by name."""
    own = flat.get("sampling")
    if own is None and "sampling" in headers:
        try:
            own = parse_object(headers["sampling"].encode(errors="replace"))
        except NotAnObject as error:
            raise Unreadable(f"expected the header sampling as a JSON object, found {error}") from None
    if own is not None and not isinstance(own, dict):
        raise Unreadable(f"expected sampling as an object, found {_short(own)}")
    try:
        return Sampling(**SamplingSettings.model_validate(asked | (own or {}), strict=True).model_dump())
    except ValidationError as error:
        raise Unreadable(f"expected valid sampling, found {describe(error)}") from None


def _agent_name(flat: JsonObject) -> str | None:
    agent = flat.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else agent
    return name if isinstance(name, str) else None


def _task_id(flat: JsonObject, headers: Mapping[str, str]) -> str | None:
    for name in ID_NAMES:
        value = flat.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value not in (None, ""):
            return _name(flat, (name,), {})
    return _name({}, ("task_id",), headers)


def _name(fields: Mapping[str, object], names: Sequence[str], headers: Mapping[str, str]) -> str | None:
    """The first of `names` that the task or else a header gives; an empty one is not given."""
    for source in (fields, headers):
        for name in names:
            value = source.get(name)
            if value is None or value == "":
                continue
            if not isinstance(value, str) or len(value) > 512:
                raise Unreadable(f"expected {name} as text of at most 512 characters, found {_short(value)}")
            return value
    return None


def _integer(
    fields: Mapping[str, object], name: str, headers: Mapping[str, str], least: int = 1, most: int = MAX_ATTEMPTS
) -> int | None:
    """An integer of the task, or the digits of a header; a bool, a text or a fraction is never one."""
    value: object = fields.get(name)
    if value is None and name in headers:
        text = headers[name]
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Unreadable(f"expected {name} as an integer from {least} to {most}, found {_short(value)}")
    return value


def _group_of(body: JsonObject, headers: Mapping[str, str]) -> GroupIds | None:
    """Ids of an event that cannot be read, field by field, from its body or else from its headers."""
    run, group = body.get("run") or headers.get("run_id"), body.get("group") or headers.get("group_id")
    environment = body.get("environment") or headers.get("environment")
    told, size = body.get("attempts"), headers.get("group_size")
    try:
        attempts = _integer({"attempts": told if type(told) is int else None}, "attempts", {"attempts": size} if size else {})
        task = TaskRef.model_validate(body.get("task"), strict=True)
    except Unreadable:
        return None
    except ValidationError:
        task = None
    if not (isinstance(run, str) and isinstance(group, str) and isinstance(environment, str) and attempts):
        return None
    try:
        ids = GroupIds(run=run, group=str(UUID(group)), size=attempts, environment=environment, task=task)
        next(ids.sessions())
    except ValueError:
        return None
    return ids


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
