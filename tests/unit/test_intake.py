"""What stands on `tasks.in`: everything that can be understood is, and everything else is refused in one sentence."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from hypothesis import assume, given, strategies as st

from rollstream.environments.intake import (
    ID_NAMES,
    NESTED,
    RUN_NAMES,
    TASK_NAMES,
    NormalisedTask,
    Unreadable,
    normalise_row,
    read_task,
)
from rollstream.settings import Defaults
from schemas import identities
from schemas.task import TaskSubmitted
from schemas.values import EpisodeLimits, Sampling, TaskRef

AT = datetime(2026, 3, 4, 23, 30, tzinfo=UTC)
DEFAULTS = Defaults(environment="math")
TASK = {"question": "2 + 2?", "answer": "4"}
GROUP = identities.group_id("r", "math", "adhoc", "t", 0)
HEADERS = {"run_id": "r", "group_id": GROUP, "group_size": "3", "environment": "math"}


def read(body: object, headers: Mapping[str, str] | None = None, defaults: Defaults = DEFAULTS) -> TaskSubmitted:
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    return read_task(raw, headers or {}, defaults, EpisodeLimits(max_steps=7), AT)


def refusal(body: object, headers: Mapping[str, str] | None = None, defaults: Defaults = DEFAULTS) -> Unreadable:
    with pytest.raises(Unreadable) as refused:
        read(body, headers, defaults)
    return refused.value


def normalised(row: Mapping[str, object], environment: str | None = None, **fields: str) -> NormalisedTask:
    return normalise_row(row, environment=environment, fields=fields, defaults=DEFAULTS)


def event(**fields: Any) -> TaskSubmitted:
    return TaskSubmitted.create(run="r", environment="math", task=TaskRef(id="t"), row=dict(TASK), at=AT, attempts=3, **fields)


class TestBareTasks:
    def test_a_bare_object_gets_everything_else_from_the_defaults(self) -> None:
        task = read(TASK, defaults=Defaults(environment="math", harness="h", model="m", attempts=4, dataset="d"))
        assert (task.run, task.environment, task.attempts) == ("adhoc-2026-03-04", "math", 4)
        assert (task.composition.harness, task.composition.models) == ("h", {"policy": "m"})
        assert task.task == TaskRef(id=identities.task_id_of(TASK), dataset="d")
        assert task.row == TASK
        assert task.limits.max_steps == 7
        assert task.occurred_at == AT

    def test_reading_a_record_again_gives_the_same_event(self) -> None:
        assert read(TASK) == read(TASK)

    def test_the_same_task_in_another_run_keeps_its_id(self) -> None:
        one, other = read({**TASK, "run": "one"}), read({**TASK, "run": "other", "attempts": 2, "model": "m"})
        assert one.task.id == other.task.id == read(TASK).task.id
        assert one.group != other.group

    def test_the_task_says_what_its_defaults_leave_open(self) -> None:
        said = {
            "environment": "multiple_choice",
            "id": "t7",
            "run_id": "r",
            "dataset": "d",
            "split": "test",
            "attempts": 8,
            "harness": "h",
            "model": "m",
            "epoch": 2,
            "sampling": {"temperature": 0, "max_tokens": 9},
        }
        task = read({**TASK, **said})
        assert task.task == TaskRef(id="t7", dataset="d", split="test", epoch=2)
        assert (task.run, task.environment, task.attempts) == ("r", "multiple_choice", 8)
        assert (task.composition.harness, task.composition.models) == ("h", {"policy": "m"})
        assert task.composition.sampling == Sampling(temperature=0, max_tokens=9)
        assert task.row == {**TASK, "id": "t7"}

    def test_headers_say_it_too_and_the_body_wins(self) -> None:
        headers = {"environment": "e", "task_id": "t", "run": "r", "attempts": "5", "epoch": "1", "model": "m", "dataset": "d"}
        task = read({**TASK, "dataset": "own"}, {**headers, "sampling": '{"top_p": 0.5}'})
        assert (task.run, task.environment, task.attempts, task.composition.models["policy"]) == ("r", "e", 5, "m")
        assert task.task == TaskRef(id="t", dataset="own", epoch=1)
        assert task.composition.sampling.top_p == 0.5

    @pytest.mark.parametrize(
        "given_id", [{"task_id": "a", "id": "b"}, {"id": "a", "uuid": "b"}, {"uuid": "a"}, {"id": "", "uuid": "a"}]
    )
    def test_ids_have_an_order(self, given_id: dict[str, str]) -> None:
        assert read({**TASK, **given_id}).task.id == "a"

    def test_the_first_row_of_a_file_may_be_number_zero(self) -> None:
        assert read({**TASK, "id": 0}).task.id == "0"

    def test_a_field_called_kind_makes_no_event(self) -> None:
        assert read({**TASK, "kind": "arithmetic"}).row["kind"] == "arithmetic"

    @pytest.mark.parametrize(
        ("said", "found"),
        [
            ({"attempts": "3"}, "expected attempts as an integer from 1 to 10000, found '3'"),
            ({"attempts": True}, "found True"),
            ({"attempts": 1.5}, r"found 1\.5"),
            ({"attempts": 3.0}, r"found 3\.0"),
            ({"attempts": float("nan")}, "found 'nan'"),
            ({"attempts": 0}, "found 0"),
            ({"attempts": 10_001}, "found 10001"),
            ({"attempts": [1]}, r"found \[1\]"),
            ({"epoch": -1}, "expected epoch as an integer from 0"),
            ({"epoch": "1"}, "expected epoch as an integer"),
            ({"id": True}, "expected id as text of at most 512 characters, found True"),
            ({"id": 1.5}, "expected id as text"),
            ({"id": "x" * 513}, "expected id as text"),
            ({"run": 5}, "expected run as text"),
            ({"environment": {"name": "math"}}, "expected environment as text"),
            ({"model": ["m"]}, "expected model as text"),
            ({"sampling": "greedy"}, "expected sampling as an object, found 'greedy'"),
            ({"sampling": {"temprature": 1}}, "expected valid sampling, found temprature"),
            ({"sampling": {"temperature": "1"}}, "temperature: Input should be a valid number"),
            ({"sampling": {"temperature": True}}, "temperature: Input should be a valid number"),
            ({"sampling": {"max_tokens": 2.5}}, "max_tokens: Input should be a valid integer"),
            ({"sampling": {"temperature": float("inf")}}, "temperature"),
        ],
    )
    def test_a_value_of_the_wrong_kind_is_refused(self, said: dict[str, object], found: str) -> None:
        with pytest.raises(Unreadable, match=found):
            read({**TASK, **said})

    @pytest.mark.parametrize("digits", ["three", "3.0", "-1", "\u0663", "9" * 5000])
    def test_a_header_that_is_no_number_is_refused(self, digits: str) -> None:
        assert "expected attempts as an integer" in str(refusal(TASK, {"attempts": digits}))

    def test_a_header_of_sampling_must_be_json(self) -> None:
        assert "expected the header sampling as a JSON object" in str(refusal(TASK, {"sampling": "greedy"}))


class TestTheEnvironment:
    @pytest.mark.parametrize(
        ("argument", "row", "headers", "agent_ref", "default", "environment"),
        [
            ("a", "b", "c", "d", "e", "a"),
            (None, "b", "c", "d", "e", "b"),
            (None, None, "c", "d", "e", "c"),
            (None, None, None, "d", "e", "d"),
            (None, None, None, None, "e", "e"),
        ],
    )
    def test_it_is_chosen_in_order(
        self, argument: str | None, row: str | None, headers: str | None, agent_ref: str | None, default: str, environment: str
    ) -> None:
        task = normalise_row(
            {**TASK, "environment": row, "agent_ref": {"type": "agents", "name": "simple"}},
            environment=argument,
            fields={},
            defaults=Defaults(environment=default, agent_ref={"simple": agent_ref} if agent_ref else {}),
            headers={"environment": headers} if headers else {},
        )
        assert task.environment == environment
        assert "agent_ref" not in task.row
        assert "environment" not in task.row

    def test_none_is_refused_with_where_to_say_it(self) -> None:
        told = str(refusal(TASK, defaults=Defaults()))
        assert told.startswith("expected an environment in the task, a header or [defaults] of the settings, found none")
        assert "answer, question" in told

    def test_an_agent_that_nothing_maps_is_named(self) -> None:
        assert "found agent_ref 'simple', which" in str(refusal({**TASK, "agent_ref": {"name": "simple"}}, defaults=Defaults()))


class TestEvents:
    def test_an_event_is_read_as_it_is(self) -> None:
        submitted = event()
        assert read(submitted.to_json(), defaults=Defaults()) == submitted

    def test_an_event_of_another_kind_is_no_task(self) -> None:
        assert str(refusal({"kind": "VerdictReached"})) == "expected a task, found an event of kind 'VerdictReached'"
        assert "kind 'TaskWithdrawn'" in str(refusal({"kind": "TaskWithdrawn", "event_id": "e"}))

    def test_a_newer_event_asks_for_an_upgrade(self) -> None:
        body = {**orjson.loads(event().to_json()), "schema_version": 99}
        assert "found version 99: upgrade this worker" in str(refusal(body))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"attempts": "3"},
            {"attempts": True},
            {"attempts": 2.0},
            {"row": []},
            {"task": {"id": 5}},
            {"environment": ""},
            {"limits": {"max_steps": 0}},
            {"limits": {"episode_timeout_s": -1}},
            {"limits": {"max_output_bytes": 0}},
        ],
    )
    def test_an_event_with_a_malformed_field_is_refused(self, wrong: dict[str, object]) -> None:
        assert "expected a valid TaskSubmitted, found " in str(refusal({**orjson.loads(event().to_json()), **wrong}))

    def test_a_group_must_be_a_uuid_because_ids_are_derived_from_it(self) -> None:
        refused = refusal({**orjson.loads(event().to_json()), "group": "g"})
        assert str(refused) == "expected the group of a TaskSubmitted as a UUID, found 'g'"
        assert refused.group is None

    def test_what_json_cannot_carry_survives_in_the_row(self) -> None:
        raw = event().to_json().replace(b'"2 + 2?"', b'[NaN, "\\ud800", 123456789012345678901]')
        assert read(raw).row["question"] == ["nan", "\\ud800", "123456789012345678901"]


class TestWhoMustBeTold:
    def test_garbage_with_headers_names_every_attempt(self) -> None:
        group = refusal(b"\xff", HEADERS).group
        assert group is not None
        sessions = list(group.sessions())
        assert [ids.group.index for ids in sessions] == [0, 1, 2]
        assert sessions[1].rollout == identities.rollout_id(GROUP, 1)
        assert sessions[1].session == identities.session_id(sessions[1].rollout, 0, 0)
        assert (sessions[1].run, sessions[1].environment, sessions[1].task) == ("r", "math", None)

    def test_a_broken_event_is_named_by_its_body(self) -> None:
        group = refusal({**orjson.loads(event().to_json()), "limits": 5}).group
        assert group is not None
        assert (group.group, group.size, group.task) == (event().group, 3, TaskRef(id="t"))

    def test_a_broken_event_without_its_size_is_named_by_its_headers(self) -> None:
        group = refusal({**orjson.loads(event().to_json()), "attempts": "many"}, HEADERS).group
        assert group is not None
        assert group.size == 3

    def test_a_bare_task_with_an_id_is_named(self) -> None:
        group = refusal({**TASK, "id": "t", "run": "r", "attempts": 2, "sampling": 5}).group
        assert group is not None
        assert (group.group, group.size) == (GROUP, 2)

    @pytest.mark.parametrize(
        "headers", [{}, {**HEADERS, "group_id": "g"}, {**HEADERS, "group_size": "many"}, {**HEADERS, "run_id": ""}]
    )
    def test_nobody_is_named_where_nobody_can_be(self, headers: dict[str, str]) -> None:
        assert refusal(b"not JSON", headers).group is None


class TestNemoGymRows:
    def test_responses_items_become_chat_messages(self) -> None:
        items = [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ]
        row = read({"responses_create_params": {"instructions": "Help.", "input": items}, "answer": "4"}).row
        calls = [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
            {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        ]
        assert row["messages"] == [
            {"role": "system", "content": "Help."},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "One moment.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c2", "content": "rain"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]

    def test_text_input_and_images_are_understood(self) -> None:
        assert read({"responses_create_params": {"input": "Hello"}}).row["messages"] == [{"role": "user", "content": "Hello"}]
        part = {"type": "input_image", "image_url": "data:x"}
        row = read({"responses_create_params": {"input": [{"role": "user", "content": [part]}]}}).row
        content = [{"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}]
        assert row["messages"] == [{"role": "user", "content": content}]

    def test_tools_take_the_chat_form_whichever_they_had(self) -> None:
        flat = {"type": "function", "name": "f", "description": "", "parameters": {"type": "object"}, "strict": True}
        chat = {"type": "function", "function": {"name": "g"}}
        row = read({"responses_create_params": {"input": "Hi", "tools": [flat, chat]}}).row
        function = {"name": "f", "description": "", "parameters": {"type": "object"}, "strict": True}
        assert row["tools"] == [{"type": "function", "function": function}, chat]

    def test_sampling_comes_from_the_request_and_the_task_wins(self) -> None:
        params = {"input": "Hi", "temperature": 1.0, "top_p": 0.9, "max_output_tokens": 64, "parallel_tool_calls": False}
        task = read({"responses_create_params": params, "sampling": {"temperature": 0.5, "seed": 3}})
        assert task.composition.sampling == Sampling(temperature=0.5, top_p=0.9, max_tokens=64, seed=3)

    @pytest.mark.parametrize("nested", ["verifier_metadata", "task_data"])
    def test_nested_grading_fields_are_merged_and_the_top_level_wins(self, nested: str) -> None:
        row = read({"question": "?", "answer": "top", nested: {"answer": "nested", "hint": "h", "id": "t"}}).row
        assert row == {"question": "?", "answer": "top", "hint": "h", "id": "t"}

    @pytest.mark.parametrize("name", ["messages", "tools", "environment", "run", "sampling", "responses_create_params"])
    def test_grading_data_never_becomes_what_the_agent_sees(self, name: str) -> None:
        task = read({**TASK, "verifier_metadata": {name: "secret", "hint": "h"}})
        assert task.row == {**TASK, "hint": "h", "verifier_metadata": {name: "secret"}}

    def test_an_unusual_verifier_metadata_is_a_field_like_any_other(self) -> None:
        assert read({**TASK, "verifier_metadata": "text"}).row["verifier_metadata"] == "text"

    @pytest.mark.parametrize(
        ("params", "found"),
        [
            ("text", "expected responses_create_params as an object, found 'text'"),
            ({"input": 5}, r"expected responses_create_params\.input as text or a list, found a int"),
            ({"input": [5]}, r"expected responses_create_params\.input\.0 as an object"),
            ({"input": [{"role": "robot", "content": ""}]}, r"input\.0\.role as one of system, developer, user, assistant"),
            ({"input": [{"role": "user", "content": 5}]}, "as text or a list of parts, found a int"),
            ({"input": [{"role": "user"}]}, "as text or a list of parts, found nothing"),
            ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "found 'input_file'"),
            ({"input": [{"type": "computer_call"}]}, "found 'computer_call'"),
            ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, r"call_id as text, found nothing"),
            ({"input": "Hi", "tools": {}}, None),
            ({"input": "Hi", "tools": {"f": 1}}, "expected tools as a list"),
            ({"input": "Hi", "tools": [{"type": "web_search_preview"}]}, "of type function, found 'web_search_preview'"),
            ({"input": "Hi", "temperature": "hot"}, "expected valid sampling"),
        ],
    )
    def test_what_chat_cannot_express_is_refused(self, params: object, found: str | None) -> None:
        body = {**TASK, "responses_create_params": params}
        if found is None:
            read(body)
            return
        with pytest.raises(Unreadable, match=found):
            read(body)

    def test_two_observations_are_one_too_many(self) -> None:
        body = {"responses_create_params": {"input": "Hi"}, "messages": [{"role": "user", "content": "Hello"}]}
        assert str(refusal(body)) == "expected messages or responses_create_params.input, found both"


class TestFileRows:
    def test_columns_are_renamed(self) -> None:
        task = normalised({"prompt": "2 + 2?", "gold": "4", "level": 1}, question="prompt", answer="gold")
        assert task.row == {"question": "2 + 2?", "answer": "4", "level": 1}

    def test_a_renamed_column_replaces_one_of_that_name(self) -> None:
        assert normalised({"question": "long", "short": "2 + 2?"}, question="short").row == {"question": "2 + 2?"}

    def test_one_column_may_serve_two_fields(self) -> None:
        assert normalised({"text": "x"}, question="text", answer="text").row == {"question": "x", "answer": "x"}

    def test_a_nested_column_is_found(self) -> None:
        assert normalised({"question": "?", "task_data": {"gold": "4"}}, answer="gold").row == {"question": "?", "answer": "4"}

    def test_text_that_becomes_messages_is_the_users(self) -> None:
        assert normalised({"prompt": "Hi"}, messages="prompt").row == {"messages": [{"role": "user", "content": "Hi"}]}

    def test_a_missing_column_is_named_with_those_there_are(self) -> None:
        with pytest.raises(Unreadable, match="expected a column 'prompt', found answer, question"):
            normalised(TASK, question="prompt")

    def test_names_of_runs_are_ordinary_columns(self) -> None:
        row = {**TASK, "model": "the author's", "run": 7, "attempts": "many", "harness": None}
        assert normalised(row).row == row

    def test_what_a_row_says_of_its_task_is_read(self) -> None:
        task = normalised({**TASK, "id": 3, "dataset": "d", "split": "test", "epoch": 1, "sampling": {"seed": 1}})
        assert (task.task_id, task.dataset, task.split, task.epoch, task.sampling) == ("3", "d", "test", 1, Sampling(seed=1))

    def test_a_row_nested_too_deeply_is_refused(self) -> None:
        deep: object = 1
        for _ in range(200):
            deep = [deep]
        with pytest.raises(Unreadable, match="nested deeper than 100 levels"):
            normalised({**TASK, "deep": deep})


class TestBytes:
    @pytest.mark.parametrize(
        ("raw", "found"),
        [
            (None, "a record without a value"),
            (b"", "0 bytes that are not JSON"),
            (b"{", "1 bytes that are not JSON"),
            (b"[]", "a JSON list"),
            (b"3", "a JSON number"),
            (b"true", "a JSON boolean"),
            (b"null", "JSON null"),
            (b'"text"', "a JSON string"),
            (b"NaN", "a JSON number"),
            (b'{"question": "\xff"}', "byte 0xff at position 14, which is not UTF-8"),
            (b'\xef\xbb\xbf{"question": "\xff"}', "byte 0xff at position 17, which is not UTF-8"),
            (b'{"question": "\xed\xa0\x80"}', "byte 0xed at position 14, which is not UTF-8"),
            (b"[" * 1_000_000, "JSON nested deeper than 100 levels"),
            (b'{"a":' * 101 + b"1" + b"}" * 101, "JSON nested deeper than 100 levels"),
            (b'{"a":NaN,"b":' * 900 + b"1" + b"}" * 900, "JSON nested deeper than 100 levels"),
        ],
    )
    def test_what_is_no_object_is_refused(self, raw: bytes | None, found: str) -> None:
        assert str(refusal(raw)).startswith(f"expected a task as a JSON object, found {found}")

    def test_what_json_cannot_carry_survives_escaped(self) -> None:
        numbers = b'"a": NaN, "b": -Infinity, "c": 1e999, "d": 18446744073709551616, "e": -9223372036854775809'
        raw = b'{"question": "\\ud800!", ' + numbers + b"}"
        assert read(raw).row == {
            "question": "\\ud800!",
            "a": "nan",
            "b": "-inf",
            "c": "inf",
            "d": "18446744073709551616",
            "e": "-9223372036854775809",
        }

    def test_integers_within_64_bits_stay_integers(self) -> None:
        row = read(b'{"a": 9223372036854775807, "b": -9223372036854775808, "c": 1234567890123456789}').row
        assert row == {"a": 2**63 - 1, "b": -(2**63), "c": 1234567890123456789}

    def test_an_integer_of_any_length_is_read(self) -> None:
        assert read(b'{"a": ' + b"7" * 100_000 + b"}").row["a"] == "7" * 100_000

    def test_a_byte_order_mark_is_skipped(self) -> None:
        assert read(b"\xef\xbb\xbf" + json.dumps(TASK).encode()).row == TASK

    def test_nul_and_non_ascii_survive(self) -> None:
        assert read({"question": "a\x00\u00fc\U0001f642"}).row["question"] == "a\x00\u00fc\U0001f642"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(categories=["L", "N", "Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from([*TASK_NAMES, *RUN_NAMES, *ID_NAMES, *NESTED, "question", "messages", "tools", "kind", "event_id"])
params = st.fixed_dictionaries(
    {},
    optional={
        "input": json_values
        | st.lists(st.fixed_dictionaries({"type": st.text(max_size=3), "role": st.just("user"), "content": json_values})),
        "tools": json_values,
        "temperature": json_values,
    },
)
tasks = st.dictionaries(names, json_values | params, max_size=6)


header_values = st.text(alphabet=st.characters(categories=["L", "N", "Cs"]), max_size=5)


def read_or_refused(raw: bytes, headers: Mapping[str, str]) -> TaskSubmitted | Unreadable:
    try:
        return read(raw, headers)
    except Unreadable as refused:
        return refused


@given(tasks, st.dictionaries(names, header_values, max_size=3))
def test_any_object_is_a_task_or_unreadable(body: dict[str, object], headers: dict[str, str]) -> None:
    found = read_or_refused(json.dumps(body).encode(), headers)
    if isinstance(found, TaskSubmitted):
        assert TaskSubmitted.model_validate_json(found.to_json()) == found
        return
    assert str(found).startswith("expected ")
    assert "\n" not in str(found)
    if found.group:
        assert next(found.group.sessions()).model_dump_json()


@given(st.binary(max_size=200), st.dictionaries(names, header_values, max_size=3))
def test_any_bytes_are_a_task_or_unreadable(raw: bytes, headers: dict[str, str]) -> None:
    found = read_or_refused(raw, headers)
    assert isinstance(found, TaskSubmitted) or str(found).startswith("expected ")


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5))
def test_a_row_without_names_of_ours_survives_as_it_is_or_escaped(row: dict[str, object]) -> None:
    assume({*TASK_NAMES, *RUN_NAMES, *ID_NAMES, *NESTED, "messages", "tools", "kind"}.isdisjoint(row))
    assert len(read(row).row) == len(json.loads(json.dumps(row)))
