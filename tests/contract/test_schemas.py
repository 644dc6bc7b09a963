"""The contracts of the log: what stands in an event, what its ids and headers are, and what a reader accepts."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin
from uuid import NAMESPACE_DNS, UUID, uuid5

import orjson
import pytest

from schemas import identities
from schemas.action import ActionRequested, ObservationReturned
from schemas.envelope import SESSION_HEADERS, Event, RunEvent, SessionEvent, header_map, session_ids_from
from schemas.episode import EpisodeCompleted
from schemas.events import EVENTS, UndecodableEvent, decode
from schemas.failure import DeadLettered, DeadLetterSettled, ErrorInfo
from schemas.retry import RetryScheduled
from schemas.rollout import RolloutScored, StepReward
from schemas.run import RunCancelled, RunPaused, RunResumed
from schemas.sandbox import SandboxEvent, SandboxReleased
from schemas.session import SessionReady
from schemas.snapshots import FOLDER, path_of, render
from schemas.step import AgentStepped
from schemas.task import Redrive, TaskSubmitted
from schemas.verdict import VerdictReached
from tests.events import START, Attempt, at, run_published, sandbox_leased, task_submitted

REGENERATE = "run `python -m schemas.snapshots`, and say in the commit why the contract changes"
KINDS = pytest.mark.parametrize("kind", sorted(EVENTS))
CLOUD_EVENTS = ["ce_specversion", "ce_id", "ce_type", "ce_source", "ce_time", "ce_subject", "content-type"]


def dead_lettered() -> DeadLettered:
    return DeadLettered.of_record(
        boundary="agent_worker",
        reason="expected JSON, found 7 bytes that are not",
        topic="sessions.ready",
        partition=3,
        offset=42,
        key=b"k",
        value=b"garbage",
        headers=[("run_id", b"run-1")],
        recorded_at=START,
    )


EXAMPLES: dict[str, Event] = {
    event.kind: event
    for event in (
        run_published(),
        RunPaused.create(run="run-1", reason="the model server refuses the key", cause="model_unauthorized", by="agent_worker"),
        RunResumed.create(run="run-1"),
        RunCancelled.create(run="run-1"),
        task_submitted(),
        *Attempt(components={"format": 0.5}).interaction(),
        Attempt().retry(),
        sandbox_leased(),
        SandboxReleased.create("box-1", how="closed", by="agent_worker@host:1", run="run-1", session=None, caused_at=START),
        dead_lettered(),
        DeadLetterSettled.create(dead_lettered(), "replayed"),
    )
}
OWN_HEADERS = {
    "SessionReady": ["harness"],
    "ActionRequested": ["harness"],
    "EpisodeCompleted": ["harness"],
    "RetryScheduled": ["harness", "stage", "next_round", "next_try", "revision"],
}
"""Of records of a session that say more than whose they are: what they ask of the worker that reads them."""
SESSION_KEYED = pytest.mark.parametrize("kind", [kind for kind, event in EVENTS.items() if issubclass(event, SessionEvent)])


# Schemas.


def test_there_is_an_example_of_every_event_here() -> None:
    assert EXAMPLES.keys() == EVENTS.keys()


@KINDS
def test_the_schema_of_an_event_is_the_one_that_is_checked_in(kind: str) -> None:
    path = path_of(kind)
    assert path.exists(), f"{path.name} is missing: {REGENERATE}"
    assert path.read_text() == render(EVENTS[kind]), f"the contract of {kind} has changed: {REGENERATE}"


def test_no_schema_is_checked_in_for_an_event_that_is_none() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == EVENTS.keys(), REGENERATE


@pytest.mark.parametrize("seed", ["1", "2"])
def test_schemas_are_the_same_in_every_process(seed: str) -> None:
    command = [sys.executable, "-m", "schemas.snapshots", "--check"]
    checked = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def concrete(event: type[Event] = Event) -> Iterator[type[Event]]:
    for child in event.__subclasses__():
        if child not in (RunEvent, SandboxEvent, SessionEvent):
            yield child
        yield from concrete(child)


def test_every_event_class_can_be_decoded_under_its_own_name() -> None:
    classes = [event for event in concrete() if event.__module__.startswith("schemas.")]
    assert {event.__name__: event for event in classes} == EVENTS


@KINDS
def test_the_kind_of_an_event_is_a_literal_and_its_class_name(kind: str) -> None:
    field = EVENTS[kind].model_fields["kind"]
    assert get_origin(field.annotation) is Literal
    assert get_args(field.annotation) == (kind,)
    assert field.default == kind


@KINDS
def test_an_event_is_written_with_kind_version_id_and_both_times(kind: str) -> None:
    written = orjson.loads(EXAMPLES[kind].to_json())
    assert written["kind"] == kind
    assert written["schema_version"] == EVENTS[kind].SCHEMA_VERSION
    assert str(UUID(written["event_id"])) == written["event_id"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", written["occurred_at"])
    assert written["caused_at"] <= written["occurred_at"]


@KINDS
def test_an_event_survives_the_log(kind: str) -> None:
    event = EXAMPLES[kind]
    assert decode(event.to_json(), EVENTS[kind]) == event
    assert decode(event.to_json(), EVENTS[kind]).to_json() == event.to_json()


def property_names(schema: object) -> Iterator[str]:
    """Every name of a field anywhere in a JSON schema, and every literal that a tag may have."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        for value in schema.values():
            yield from property_names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from property_names(value)


@pytest.mark.parametrize("event", [AgentStepped, ActionRequested, ObservationReturned, EpisodeCompleted])
def test_what_the_agent_side_writes_or_reads_has_no_field_for_reward(event: type[Event]) -> None:
    names = set(property_names(event.model_json_schema(mode="serialization")))
    assert "ticket" in names or event in (AgentStepped, ObservationReturned)
    for word in ("reward", "success", "verdict", "score", "mask"):
        assert not [name for name in names if word in name.lower()], f"{event.__name__} can say {word}"


def test_what_tells_an_agent_how_to_interact_has_no_field_for_grading_but_the_sealed_one() -> None:
    names = set(property_names(SessionReady.model_json_schema(mode="serialization")))
    assert {"ticket", "reference"} <= names
    assert not names & {"row", "answer", "expected_answer", "reward", "verifier_metadata", "task_data"}


# Identities.


def test_ids_are_these_for_ever() -> None:
    group = identities.group_id("run-1", "math", "gsm8k", "task-1", 0)
    rollout = identities.rollout_id(group, 3)
    session = identities.session_id(rollout, 1, 2)
    assert group == "d7dc33be-617e-5202-8afd-99ed7c045b9d"
    assert identities.group_id("run-1", "math", "gsm8k", "task-1", 1) == "e815e4ba-33c3-56c9-bd4a-0068fde581ab"
    assert rollout == "0bd9fe0d-cb37-5e56-b5a3-3ad0662aa84c"
    assert session == "a5d35bf0-ac94-5266-ba5e-7f35cd03099a"
    assert {
        (kind, *parts): identities.event_id(kind, *parts)
        for kind, *parts in (
            ("RunPublished", "run-1"),
            ("TaskSubmitted", group),
            ("SessionReady", session),
            ("EpisodeCompleted", session),
            ("RolloutScored", session),
            ("AgentStepped", session, "exec", "agent", 0),
            ("AgentStepped", session, "exec", "gateway", 0),
            ("VerdictReached", session, 0, "exec"),
            ("DeadLettered", "agent_worker", "sessions.ready", 3, 42),
        )
    } == {
        ("RunPublished", "run-1"): "31ddeb32-9f5f-560d-b194-013f191c4601",
        ("TaskSubmitted", group): "6a3ef1a3-d17b-5461-98a9-78f31196ae76",
        ("SessionReady", session): "bb4aea5f-42f7-5095-8197-e8cd6adfa1ad",
        ("EpisodeCompleted", session): "1d720f1a-6796-5498-8282-34be84b6d936",
        ("RolloutScored", session): "1228803e-16b3-58ad-8be7-a673007dfcc9",
        ("AgentStepped", session, "exec", "agent", 0): "4ba57150-d31d-57ea-9855-2350af420e33",
        ("AgentStepped", session, "exec", "gateway", 0): "f114f439-d360-5009-a9bb-3f2c0e0d7ff0",
        ("VerdictReached", session, 0, "exec"): "f33d01bf-ab34-5a10-b2df-24135bcd2bce",
        ("DeadLettered", "agent_worker", "sessions.ready", 3, 42): "9f3cd48d-b69c-59c6-b963-9537bd820260",
    }
    assert identities.task_id_of({"question": "1 + 1?", "answer": 2}) == "aaea1a0fbb0e4f83"
    assert identities.task_id_of({"answer": 2, "question": "1 + 1?"}) == "aaea1a0fbb0e4f83"
    assert [identities.repeated("t", ordinal) for ordinal in range(3)] == ["t", "t#1", "t#2"]
    assert identities.adhoc_run_id(START) == "adhoc-2026-03-01"


def test_ids_can_be_derived_with_nothing_but_the_standard_library() -> None:
    root = uuid5(NAMESPACE_DNS, "rollstream")
    group = uuid5(root, '["run-1","math","gsm8k","täsk",0]')
    assert identities.group_id("run-1", "math", "gsm8k", "täsk", 0) == str(group)
    assert identities.rollout_id(str(group), 3) == str(uuid5(group, "3"))
    assert identities.session_id(str(group), 1, 2) == str(uuid5(group, "1/2"))
    assert identities.event_id("SessionReady", "s") == str(uuid5(uuid5(root, "event"), '["SessionReady","s"]'))


def test_ids_do_not_collide_where_names_run_together() -> None:
    assert identities.group_id("a", "b", "c", "d,e", 0) != identities.group_id("a", "b", "c,d", "e", 0)
    assert identities.event_id("A", "b", "c") != identities.event_id("A", 'b","c')
    assert identities.event_id("A", 1) != identities.event_id("A", "1")


def test_events_have_the_ids_of_the_table() -> None:
    attempt = Attempt()
    events = {event.kind: event.event_id for event in attempt.events()}
    for kind in ("SessionReady", "EpisodeCompleted", "RolloutScored"):
        assert events[kind] == identities.event_id(kind, attempt.session)
    assert attempt.scored(revision=1).event_id == identities.event_id("RolloutScored", attempt.session, 1)
    assert attempt.failed().event_id == events["RolloutScored"]


# Headers.


@SESSION_KEYED
def test_a_record_of_a_session_has_these_headers_and_no_others(kind: str) -> None:
    assert [name for name, _ in EXAMPLES[kind].headers()] == [
        *CLOUD_EVENTS,
        "traceparent",
        *SESSION_HEADERS,
        *OWN_HEADERS.get(kind, []),
    ]


def test_a_terminal_record_has_the_headers_of_its_session_its_revision_and_its_status() -> None:
    scored = EXAMPLES["RolloutScored"]
    assert [name for name, _ in scored.headers()] == [*CLOUD_EVENTS, "traceparent", *SESSION_HEADERS, "revision", "status"]
    headers = header_map(scored.headers())
    assert (headers["revision"], headers["status"]) == ("0", "completed")
    assert header_map(Attempt().scored(revision=2).headers())["revision"] == "2"


def test_the_headers_of_a_session_are_the_ones_of_the_design() -> None:
    names = "run_id group_id rollout_id session_id round try group_index group_size environment"
    assert list(SESSION_HEADERS) == names.split()


@KINDS
def test_every_record_is_a_cloud_event_in_binary_mode(kind: str) -> None:
    event = EXAMPLES[kind]
    headers = header_map(event.headers())
    assert [name for name, _ in event.headers()][: len(CLOUD_EVENTS)] == CLOUD_EVENTS
    assert (headers["ce_specversion"], headers["ce_id"], headers["ce_type"]) == ("1.0", event.event_id, kind)
    assert headers["content-type"] == "application/json"
    assert headers["ce_time"] == event.occurred_at.isoformat()
    assert headers["ce_subject"]
    assert len({name for name, _ in event.headers()}) == len(event.headers())


@SESSION_KEYED
def test_the_headers_alone_say_whose_record_it_is(kind: str) -> None:
    event = EXAMPLES[kind]
    assert isinstance(event, SessionEvent)
    ids = session_ids_from(header_map(event.headers()))
    assert ids is not None
    assert ids.model_dump() == {**event.model_dump(include=set(type(ids).model_fields)), "task": None}


@SESSION_KEYED
def test_the_key_of_a_session_event_is_its_session_and_of_a_retry_its_rollout(kind: str) -> None:
    expected = Attempt().rollout if kind == "RetryScheduled" else Attempt().session
    assert EXAMPLES[kind].key() == expected.encode()


def test_one_rollout_is_one_trace_across_every_retry() -> None:
    def trace(event: Event) -> str:
        found = header_map(event.headers())["traceparent"]
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", found)
        _, trace_id, span_id, _ = found.split("-")
        assert int(trace_id, 16)
        assert int(span_id, 16)
        return trace_id

    first, second, other = Attempt(), Attempt(try_=1), Attempt(index=1)
    assert {trace(event) for event in (*first.events(), *second.events())} == {first.rollout.replace("-", "")}
    assert trace(other.ready()) != trace(first.ready())


# What a reader accepts.


def written(event: Event, **changes: object) -> bytes:
    return orjson.dumps({**orjson.loads(event.to_json()), **changes})


@KINDS
def test_an_event_with_fields_of_a_newer_writer_is_read(kind: str) -> None:
    event = EXAMPLES[kind]
    raw = json.loads(written(event, brand_new={"a": 1}))
    for name in raw.keys() & {"task", "composition", "execution", "call", "limits"}:
        raw[name]["brand_new"] = True
    assert decode(json.dumps(raw).encode(), EVENTS[kind]) == event


@KINDS
def test_a_newer_schema_version_is_refused_whatever_else_it_holds(kind: str) -> None:
    event = EVENTS[kind]
    sentence = f"^expected {kind} of schema version 1 or lower, found version 2: upgrade this worker$"
    for raw in (written(EXAMPLES[kind], schema_version=2), orjson.dumps({"kind": kind, "schema_version": 2, "ids": 7})):
        with pytest.raises(UndecodableEvent, match=sentence):
            decode(raw, event)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (None, "expected a SessionReady, found a record without a value"),
        (b"", "expected SessionReady as JSON, found 0 bytes that are not"),
        (b"\xff\xfe", "expected SessionReady as JSON, found 2 bytes that are not"),
        (b"[]", "expected SessionReady as a JSON object, found a JSON list"),
        (b"{}", "expected an event of kind SessionReady, found kind None"),
        (Attempt().verdict().to_json(), "expected an event of kind SessionReady, found kind 'VerdictReached'"),
        (written(Attempt().ready(), ticket=None), "expected a valid SessionReady, found ticket: "),
        (written(Attempt().ready(), occurred_at="2026-03-01T12:00:00"), "expected a valid SessionReady, found occurred_at: "),
        (written(Attempt().ready(), session=""), "expected a valid SessionReady, found session: "),
        (written(Attempt().ready(), messages=[{"role": "wizard"}]), "expected a valid SessionReady, found messages.0.role"),
    ],
)
def test_what_is_not_the_expected_event_is_refused_in_one_sentence(raw: bytes | None, sentence: str) -> None:
    with pytest.raises(UndecodableEvent, match=f"^{re.escape(sentence)}") as caught:
        decode(raw, SessionReady)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


NOT_A_REWARD = pytest.mark.parametrize("reward", ["true", '"1"', "NaN", "Infinity", "1e400", "[1]", "{}"])


@NOT_A_REWARD
@pytest.mark.parametrize("where", ['"reward":1.0', '"format":0.5'], ids=["reward", "component"])
@pytest.mark.parametrize("event", [VerdictReached, RolloutScored])
def test_a_reward_is_a_finite_json_number_and_nothing_else(event: type[Event], where: str, reward: str) -> None:
    raw = EXAMPLES[event.__name__].to_json()
    field = where.partition(":")[0]
    assert raw.count(where.encode()) == 1
    with pytest.raises(UndecodableEvent):
        decode(raw.replace(where.encode(), f"{field}:{reward}".encode()), event)


@pytest.mark.parametrize("reward", [True, "1", float("nan"), float("inf"), b"1"])
def test_a_reward_in_python_is_a_finite_number_and_nothing_else(reward: Any) -> None:
    with pytest.raises(ValueError, match="reward"):
        StepReward(index=0, reward=reward)
    with pytest.raises(ValueError, match="reward"):
        VerdictReached.model_validate({**dict(Attempt().verdict()), "reward": reward})


@pytest.mark.parametrize(("reward", "read"), [("0", 0.0), ("-1", -1.0), ("0.1", 0.1), ("1e300", 1e300), ("null", None)])
def test_any_finite_reward_and_none_at_all_are_read(reward: str, read: float | None) -> None:
    raw = Attempt().verdict().to_json().replace(b'"reward":1.0', f'"reward":{reward}'.encode())
    assert decode(raw, VerdictReached).reward == read


def test_a_reward_must_be_said_even_if_there_is_none() -> None:
    for event in (VerdictReached, RolloutScored):
        raw = orjson.loads(EXAMPLES[event.__name__].to_json())
        del raw["reward"]
        with pytest.raises(UndecodableEvent, match="reward: Field required"):
            decode(orjson.dumps(raw), event)


def test_a_failed_attempt_has_no_reward_and_is_masked_twice() -> None:
    error = ErrorInfo(kind="model_unavailable", stage="agent", message="503", retryable=True)
    scored = RolloutScored.of_failure(Attempt().ready(), error, caused_at=at(1))
    written = orjson.loads(scored.to_json())
    assert (written["reward"], written["success"], written["status"]) == (None, None, "errored")
    assert written["mask"] == {"loss": True, "baseline": True, "reason": "model_unavailable"}


def test_the_retry_number_is_called_try_in_json() -> None:
    assert orjson.loads(Attempt(try_=2).ready().to_json())["try"] == 2
    assert decode(Attempt(try_=2).ready().to_json(), SessionReady).try_ == 2


def test_grading_data_in_the_clear_stands_in_the_task_alone() -> None:
    assert "row" in TaskSubmitted.model_fields
    assert [kind for kind, event in EVENTS.items() if "row" in event.model_fields] == ["TaskSubmitted"]


def test_a_cancelled_attempt_has_no_reward_and_is_masked_twice() -> None:
    attempt = Attempt()
    scored = RolloutScored.of_cancellation(attempt.ready(), caused_at=at(1))
    assert (scored.status, scored.stop_reason, scored.reward, scored.success) == ("cancelled", "cancelled", None, None)
    assert (scored.mask.loss, scored.mask.baseline, scored.error) == (True, True, None)
    assert scored.event_id == attempt.scored().event_id


def test_a_retry_of_a_verification_carries_its_episode_and_no_other_does() -> None:
    for stage, episode in (("verification", None), ("agent", Attempt().completed())):
        with pytest.raises(ValueError, match="a retry of stage verification carries its episode"):
            RetryScheduled.model_validate({**dict(Attempt().retry()), "stage": stage, "episode": episode})


def test_a_task_that_is_published_again_for_some_attempts_says_so_in_its_headers() -> None:
    task = task_submitted(attempts=4)
    again = Redrive(round=2, indices=frozenset({3, 1}))
    assert again.headers() == [("redrive_round", b"2"), ("redrive_indices", b"1,3")]
    assert Redrive.of(header_map([*task.headers(), *again.headers()])) == again
    sessions = list(again.sessions(task.sessions()))
    assert [ids.session for ids in sessions] == [Attempt(task, index=index, round_=2).session for index in (1, 3)]
    assert {(ids.round, ids.try_) for ids in sessions} == {(2, 0)}


@pytest.mark.parametrize(
    "headers", [{"redrive_round": "1"}, {"redrive_round": "x", "redrive_indices": "1"}, {"redrive_round": "-1"}]
)
def test_half_of_what_says_which_attempts_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|greater than"):
        Redrive.of(headers)
    assert Redrive.of({}) is None
