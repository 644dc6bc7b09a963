"""Task files as people have them: whole, odd, damaged."""

import gzip
import json
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rollstream.datasets import MAX_LINE_BYTES, BadLine, Row, format_of, read_rows
from rollstream.errors import UsageError


def written(folder: Path, content: bytes | str, name: str = "tasks.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def contents(path: Path) -> list[object]:
    return [row.content if isinstance(row, Row) else row.reason for row in read_rows(path)]


ROWS = [{"question": "1+1", "answer": "2"}, {"question": "ü", "answer": "3"}]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tasks.jsonl", JSONL),
        ("tasks.jsonl", JSONL.rstrip("\n")),
        ("tasks.jsonl", JSONL.replace("\n", "\r\n")),
        ("tasks.jsonl", "\ufeff" + JSONL),
        ("tasks.jsonl", "\n\n" + JSONL.replace("\n", "\n\n")),
        ("tasks.ndjson", JSONL),
        ("tasks.json", json.dumps(ROWS, indent=2)),
        ("tasks.json", json.dumps(ROWS)),
        ("tasks.json", JSONL),
        ("tasks", JSONL),
        ("tasks.txt", json.dumps(ROWS, indent=2)),
        ("tasks.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)),
        ("tasks.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("tasks.jsonl", gzip.compress(JSONL.encode(), mtime=0)),
    ],
)
def test_the_same_rows_are_read_from_every_form(tmp_path: Path, name: str, content: bytes | str) -> None:
    assert contents(written(tmp_path, content, name)) == ROWS


def test_parquet_rows_are_read_as_json_values_without_their_null_fields(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(
        [
            {
                "q": "a",
                "at": datetime(2024, 1, 2, tzinfo=UTC),
                "score": float("nan"),
                "raw": b"\xff",
                "m": [{"k": 1, "v": None}],
            },
            {"q": "b", "at": None, "score": 1.5, "raw": None, "m": None},
        ]
    )
    path = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(table, path)

    assert contents(path) == [
        {"q": "a", "at": "2024-01-02T00:00:00+00:00", "score": "nan", "raw": "\\xff", "m": [{"k": 1}]},
        {"q": "b", "score": 1.5},
    ]


def test_parquet_is_recognised_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": "a"}]), path)
    assert contents(path) == [{"q": "a"}]


def test_one_object_is_a_file_of_one_row(tmp_path: Path) -> None:
    assert contents(written(tmp_path, json.dumps(ROWS[0], indent=1), "one.json")) == [ROWS[0]]


def test_rows_know_their_index_and_their_line(tmp_path: Path) -> None:
    rows = list(read_rows(written(tmp_path, '\n{"a": 1}\n\nnonsense\n{"a": 2}\n')))
    assert [(row.index, row.line) for row in rows] == [(0, 2), (1, 4), (2, 5)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"nonsense", "expected JSON, found none: Expecting value at column 1"),
        (b'{"a": 1', "expected JSON, found none: Expecting ',' delimiter at column 8"),
        (b"[1, 2]", "expected a JSON object, found a list"),
        (b'"text"', "expected a JSON object, found a string"),
        (b"true", "expected a JSON object, found a boolean"),
        (b"null", "expected a JSON object, found null"),
        (b"NaN", "expected a JSON object, found a number"),
        (b'{"a": "\xff"}', "expected UTF-8, found byte 0xff at position 7"),
        (b"[" * 5000 + b"]" * 5000, "expected JSON, found it nested too deeply"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "expected JSON, found it nested too deeply"),
        (b'{"a": "' + b"x" * MAX_LINE_BYTES + b'"}', "expected at most 16 MiB on a line, found more"),
    ],
    ids=lambda value: value[:20].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_a_bad_line_is_told_with_its_number_and_the_rest_goes_on(tmp_path: Path, line: bytes, reason: str) -> None:
    rows = list(read_rows(written(tmp_path, b'{"a": 1}\n' + line + b'\n{"a": 2}\n')))
    assert rows == [Row(0, 1, {"a": 1}), BadLine(1, 2, reason), Row(2, 3, {"a": 2})]


def test_what_json_cannot_carry_survives_escaped(tmp_path: Path) -> None:
    line = '{"nan": NaN, "inf": -Infinity, "huge": 123456789012345678901234567890, "lone": "\\ud800", "true": true, "one": "1"}'
    (row,) = read_rows(written(tmp_path, line))
    assert isinstance(row, Row)
    assert row.escaped
    assert row.content == {
        "nan": "nan",
        "inf": "-inf",
        "huge": "123456789012345678901234567890",
        "lone": "\\ud800",
        "true": True,
        "one": "1",
    }


def test_a_line_of_10_mb_is_a_row(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, json.dumps({"text": "x" * 10_000_000})))
    assert isinstance(row, Row)
    assert len(str(row.content["text"])) == 10_000_000


def test_an_endless_line_is_not_held_in_memory(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"a": 1}\n' + b"x" * (8 * MAX_LINE_BYTES) + b"\n")
    tracemalloc.start()
    rows = list(read_rows(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [type(row) for row in rows] == [Row, BadLine]
    assert peak < 5 * MAX_LINE_BYTES


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tasks.jsonl", b""),
        ("tasks.jsonl", b" \n\n \n"),
        ("tasks.json", b"[]"),
        ("tasks.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("tasks.jsonl", b"\xef\xbb\xbf"),
    ],
)
def test_an_empty_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(UsageError, match="is empty"):
        list(read_rows(written(tmp_path, content, name)))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tasks.json", b'{"a": 1', "expected JSON, found none"),
        ("tasks.parquet", b'{"a": 1}', "is named Parquet, but does not start with the bytes PAR1"),
        ("tasks.parquet", b"PAR1 and nothing more", "is not Parquet that can be read"),
        ("tasks.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)[:-12], "is not a whole gzip file"),
    ],
)
def test_a_file_that_cannot_be_read_at_all_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        list(read_rows(written(tmp_path, content, name)))


def test_a_missing_file_is_told_with_the_names_that_are_close(tmp_path: Path) -> None:
    written(tmp_path, JSONL, "gsm8k-test.jsonl")
    with pytest.raises(UsageError, match=r"does not exist; did you mean .*gsm8k-test.jsonl\?"):
        read_rows(tmp_path / "gsm8k_test.jsonl")


def test_a_folder_is_no_task_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        read_rows(tmp_path)


def test_the_first_line_decides_what_a_file_without_suffix_is(tmp_path: Path) -> None:
    assert format_of(written(tmp_path, '{"a": 1}\n{"a": 2}\n', "one")) == "jsonl"
    assert format_of(written(tmp_path, '{\n "a": 1\n}\n', "two")) == "json"
    assert format_of(written(tmp_path, 'garbage\n{"a": 1}\n', "three")) == "jsonl"
