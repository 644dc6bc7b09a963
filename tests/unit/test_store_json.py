"""JSON that bites: each item survives, escaped and marked, or becomes a dead row. None stops the store."""

import json
import tempfile
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import duckdb
import orjson
import pytest
from hypothesis import given, settings, strategies as st

from rollstream.store import json_text
from rollstream.store.columns import MAX_VALUE_BYTES, Column, moment
from rollstream.store.database import StoreFiles
from rollstream.store.decoding import decode
from rollstream.store.event_rows import Rows
from rollstream.store.json_text import Unreadable
from rollstream.store.tables import BY_KIND, EVENT_TABLES, LONG_PAYLOADS
from schemas.values import clean
from tests.events import Attempt, Log
from tests.stores import answer, writing
from topics.catalogue import BY_EVENT, CATALOGUE

TEXT = "It is 2."
REWARD = b'"reward":1.0'


def stored(tmp_path: Path, raw: bytes | None, columns: str = "payload") -> list[tuple[object, ...]]:
    """What the store says of one record on `rollouts.scored`, and that the next record is not hurt by it."""
    log = Log()
    with writing(tmp_path) as store:
        store.apply([log.raw("rollouts.scored", raw), log.record(Attempt(index=7).scored())])
        store.publish()
    assert answer(tmp_path, "SELECT count(*) FROM rollout_scored WHERE group_index = 7") == [(1,)]
    assert answer(tmp_path, "SELECT count(payload -> '$.status') FROM rollout_scored")[0][0] in (1, 2)
    return answer(tmp_path, f"SELECT {columns} FROM rollout_scored WHERE group_index = 0")


def with_text(escaped: bytes) -> bytes:
    """A valid record whose message holds the JSON escape, or the bytes, `escaped`."""
    return Attempt(answer=TEXT).scored().to_json().replace(TEXT.encode(), escaped)


def with_reward(raw: bytes) -> bytes:
    body = Attempt().scored().to_json()
    assert REWARD in body
    return body.replace(REWARD, b'"reward":' + raw)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        pytest.param(rb"a\ud800z", r"a\ud800z", id="lone surrogate"),
        pytest.param(b"a\xffz", r"a\udcffz", id="invalid UTF-8"),
        pytest.param(b"a\xed\xa0\x80z", r"a\udced\udca0\udc80z", id="surrogate as UTF-8"),
    ],
)
def test_text_that_json_cannot_carry_is_spelled_out_and_marked(tmp_path: Path, written: bytes, read: str) -> None:
    found = stored(tmp_path, with_text(written), "escaped, payload ->> '$.messages[1].content', submission_text")
    assert found == [(True, read, read)]


def test_nul_survives_in_payload_and_column(tmp_path: Path) -> None:
    found = stored(tmp_path, with_text(rb"a\u0000z"), "escaped, payload ->> '$.messages[1].content', submission_text")
    assert found == [(False, "a\0z", "a\0z")]


@pytest.mark.parametrize("raw", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b'"1.0"', b"true", b"null", b"{}"])
def test_a_reward_that_is_no_finite_number_is_null_and_poisons_no_mean(tmp_path: Path, raw: bytes) -> None:
    stored(tmp_path, with_reward(raw))
    found = answer(tmp_path, "SELECT count(*), count(reward), avg(reward), max(reward) FROM rollout_scored")
    assert found == [(2, 1, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("raw", "reward"),
    [(b"9223372036854775808", 2.0**63), (b"0", 0.0), (b"-0.0", 0.0), (b"1e-400", 0.0), (b"0.1", 0.1)],
)
def test_a_reward_that_is_a_number_is_kept(tmp_path: Path, raw: bytes, reward: float) -> None:
    assert stored(tmp_path, with_reward(raw), "reward") == [(reward,)]


@pytest.mark.parametrize("raw", [b"NaN", b"Infinity", b"1e400", b'"0.5"', b"true", b"null", b"{}", b"[0.5]"])
def test_a_cost_that_is_no_finite_number_is_null_and_poisons_no_sum(tmp_path: Path, raw: bytes) -> None:
    log = Log()
    strange, plain = Attempt(cost_usd=0.5), Attempt(index=1, cost_usd=0.25)
    with writing(tmp_path) as store:
        for event in (strange.stepped(), strange.environment_called()):
            body = event.to_json()
            assert b'"cost_usd":0.5' in body
            store.apply([log.raw(BY_EVENT[type(event)].name, body.replace(b'"cost_usd":0.5', b'"cost_usd":' + raw))])
        store.apply(log.records(plain.stepped(), plain.environment_called()))
        store.publish()
    for table in ("agent_stepped", "environment_called"):
        found = answer(tmp_path, f"SELECT group_index, cost_usd FROM {table} ORDER BY group_index")
        assert found == [(0, None), (1, 0.25)]
    assert answer(tmp_path, "SELECT role, calls, cost_usd FROM usage") == [("policy", 2, 0.25), ("user", 2, 0.25)]


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, 10**30, -(2**63) - 1])
def test_integers_beyond_64_bits_survive_in_the_payload(tmp_path: Path, number: int) -> None:
    raw = Attempt().scored().to_json().replace(b'"prompt_tokens":10', b'"prompt_tokens":%d' % number)
    found = stored(tmp_path, raw, "payload ->> '$.usage.prompt_tokens', prompt_tokens")
    assert found == [(str(number), None)]


def test_of_duplicate_keys_every_reader_sees_the_same(tmp_path: Path) -> None:
    assert stored(tmp_path, with_reward(b'0.5,"reward":0.25'), "reward, payload ->> '$.reward'") == [(0.25, "0.25")]


def test_other_spacing_is_no_reason_to_mark(tmp_path: Path) -> None:
    body = json.dumps(json.loads(Attempt().scored().to_json()), indent=2).encode()
    assert stored(tmp_path, body, "escaped, payload ->> '$.status'") == [(False, "completed")]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(None, "a record without a value", id="tombstone"),
        pytest.param(b"", "0 bytes that are not JSON", id="empty"),
        pytest.param(b"{", "1 bytes that are not JSON", id="cut off"),
        pytest.param(b"\xef\xbb\xbf{}", "5 bytes that are not JSON", id="byte order mark"),
        pytest.param(b"[]", "a JSON list where an object was expected", id="list"),
        pytest.param(b"null", "a JSON null where an object was expected", id="null"),
        pytest.param(b"{}", "without a kind", id="no kind"),
        pytest.param(b'{"kind":7}', "without a kind", id="kind of another type"),
        pytest.param(b'{"kind":"RolloutScored","event_id":"x"}', "a RolloutScored without run_id", id="no ids"),
        pytest.param(b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "nested more than 254 deep", id="300 deep"),
        pytest.param(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested more than 254 deep", id="200,000 deep"),
        pytest.param(b'{"a":' + b"1" * 5_000 + b"}", "more than 4,300 digits", id="5,000 digits"),
    ],
)
def test_what_is_no_event_is_a_dead_row_with_its_first_bytes_in_private(tmp_path: Path, raw: bytes | None, reason: str) -> None:
    assert stored(tmp_path, raw) == []
    found = answer(tmp_path, "SELECT topic, kafka_offset, bytes, reason FROM dead_rows")
    assert found[0][:3] == ("rollouts.scored", 0, len(raw or b""))
    assert reason in str(found[0][3])
    with duckdb.connect(str(StoreFiles(tmp_path).private)) as private:
        assert private.execute("SELECT value FROM raw_records").fetchall() == [(raw and raw[:MAX_VALUE_BYTES],)]


def test_an_event_without_its_id_is_a_dead_row(tmp_path: Path) -> None:
    body = orjson.loads(Attempt().scored().to_json())
    del body["event_id"]
    stored(tmp_path, orjson.dumps(body))
    assert answer(tmp_path, "SELECT reason FROM dead_letters") == [("a RolloutScored without event_id",)]


@pytest.mark.parametrize(
    ("changes", "kind", "version"),
    [
        ({"schema_version": 2}, "RolloutScored", 2),
        ({"kind": "Later"}, "Later", 1),
        ({"kind": "AgentStepped"}, "AgentStepped", 1),
    ],
)
def test_an_event_of_another_version_or_kind_is_kept_and_counted(
    tmp_path: Path, changes: dict[str, object], kind: str, version: int
) -> None:
    raw = orjson.dumps(orjson.loads(Attempt().scored().to_json()) | changes)
    assert stored(tmp_path, raw) == []
    found = answer(tmp_path, "SELECT topic, kind, schema_version, bytes FROM unknown_events")
    assert found == [("rollouts.scored", kind, version, len(raw))]
    with duckdb.connect(str(StoreFiles(tmp_path).private)) as private:
        assert private.execute("SELECT value FROM raw_records").fetchall() == [(raw,)]


def test_fields_of_newer_writers_are_kept_in_the_payload(tmp_path: Path) -> None:
    raw = orjson.dumps(orjson.loads(Attempt().scored().to_json()) | {"novelty": [1]})
    assert stored(tmp_path, raw, "payload ->> '$.novelty[0]'") == [("1",)]


def test_a_task_in_another_form_has_no_ids_and_stays_private(tmp_path: Path) -> None:
    log = Log()
    raw = b'{"question": "1 + 1", "answer": "2"}'
    with writing(tmp_path) as store:
        store.apply([log.raw("tasks.in", raw), log.raw("tasks.in", b'{"kind":"TaskSubmitted","event_id":"x"}')])
        store.publish()
    assert answer(tmp_path, "SELECT run_id, group_id, payload FROM task_submitted") == [(None, None, None)] * 2
    assert answer(tmp_path, "SELECT count(*) FROM tasks") == [(0,)]
    with duckdb.connect(str(StoreFiles(tmp_path).private)) as private:
        found = private.execute("SELECT payload ->> '$.answer' FROM task_rows ORDER BY kafka_offset").fetchall()
    assert found == [("2",), (None,)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_any_json_object_that_python_writes_is_read_as_strict_json(value: object) -> None:
    document = json_text.read(json.dumps({"value": value}).encode())
    assert orjson.loads(document.raw) == document.body


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_unreadable(raw: bytes) -> None:
    try:
        document = json_text.read(raw)
    except Unreadable:
        return
    assert orjson.loads(document.raw) == document.body


@st.composite
def mangled_events(draw: st.DrawFn) -> tuple[str, bytes | None]:
    """An event with some of its fields replaced by anything, on its topic or any other."""
    event = draw(st.sampled_from(Attempt().events()))
    topic = draw(st.just(BY_EVENT[type(event)]) | st.sampled_from(CATALOGUE)).name
    body: dict[str, object] = json.loads(event.to_json())
    for name in draw(st.lists(st.sampled_from([*body, "new"]), max_size=4)):
        body[name] = draw(json_values)
    return topic, draw(st.sampled_from([json.dumps(body).encode(), None]) | st.binary(max_size=20))


@settings(max_examples=200)
@given(st.lists(mangled_events(), max_size=5))
def test_every_record_is_accounted_for(records: list[tuple[str, bytes | None]]) -> None:
    log = Log()
    rows = decode([log.raw(topic, raw) for topic, raw in records])
    topics = {table.name: topic.name for topic in CATALOGUE for event in topic.events if (table := BY_KIND.get(event.__name__))}
    positions = [
        (topics[name], *position)
        for name, found in rows.events.items()
        for position in zip(*(found.arrow()[column].to_pylist() for column in ("kafka_partition", "kafka_offset")), strict=True)
    ]
    positions += [(str(row[0]), *row[-3:-1]) for name, found in rows.public.items() for row in found if name != LONG_PAYLOADS]
    assert sorted(positions) == sorted(
        (topic, 0, offset) for topic, count in counts(records).items() for offset in range(count)
    )


@settings(max_examples=200)
@given(st.lists(mangled_events(), max_size=8))
def test_records_decoded_together_are_the_rows_that_each_is_alone(records: list[tuple[str, bytes | None]]) -> None:
    log = Log()
    found = [log.raw(topic, raw) for topic, raw in records]
    together = rows_of(decode(found, keep_repeated=True))
    alone: Counter[tuple[object, ...]] = Counter()
    for record in found:
        alone += rows_of(decode([record], keep_repeated=True))
    assert together == alone


def rows_of(rows: Rows) -> Counter[tuple[object, ...]]:
    """Every row of every table, with the table's name."""
    found = Counter((name, *map(str, row)) for name, of_table in (rows.public | rows.private).items() for row in of_table)
    for name, events in rows.events.items():
        found += Counter((name, *map(str, row.values())) for row in events.arrow().to_pylist())
    return found


def counts(records: list[tuple[str, bytes | None]]) -> Counter[str]:
    return Counter(topic for topic, _ in records)


@given(st.sampled_from([column for table in EVENT_TABLES for column in table.columns]), st.lists(json_values, max_size=5))
def test_a_column_converted_as_a_whole_is_what_its_values_are_one_by_one(column: Column, values: list[object]) -> None:
    clean_values = [clean(value)[0] for value in values]
    assert column.array(clean_values).to_pylist() == [column.array([value])[0].as_py() for value in clean_values]
    alone = replace(column, plain=frozenset())
    assert column.array(clean_values).equals(alone.array(clean_values))


@given(st.lists(st.datetimes(timezones=st.timezones()) | st.datetimes(), max_size=5))
def test_times_converted_as_a_whole_are_what_they_are_one_by_one(values: list[datetime]) -> None:
    column = moment("at", "at")
    texts = [value.isoformat() for value in values]
    assert column.array(texts).equals(replace(column, plain=frozenset()).array(texts))


@settings(max_examples=15, deadline=None)
@given(st.lists(mangled_events(), min_size=1, max_size=30))
def test_nothing_makes_apply_raise(records: list[tuple[str, bytes | None]]) -> None:
    log = Log()
    with tempfile.TemporaryDirectory() as folder, writing(Path(folder)) as store:
        assert store.apply([log.raw(topic, raw) for topic, raw in records]) == len(records)
        store.publish()
        assert answer(Path(folder), "SELECT count(*) FROM events WHERE NOT json_valid(payload)") == [(0,)]


@pytest.mark.parametrize("version", [True, False, None, "2", -1, 2**40, 1.5])
def test_a_schema_version_that_is_no_number_is_stored_as_the_first(version: object, tmp_path: Path) -> None:
    strange = json.dumps({**json.loads(Attempt().ready().to_json()), "schema_version": version}).encode()
    log = Log()
    with writing(tmp_path) as store:
        store.apply([log.raw("sessions.ready", strange), *log.records(Attempt(try_=1).ready())])
        store.publish()
    assert answer(tmp_path, "SELECT schema_version FROM session_ready") == [(1,), (1,)]
