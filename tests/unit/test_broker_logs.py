"""Tailing and following a log."""

from itertools import islice
from pathlib import Path
from threading import Timer

import pytest

from rollstream.broker.logs import follow, tail


@pytest.mark.parametrize(("count", "expected"), [(0, []), (2, ["b", "c"]), (9, ["a", "b", "c"])])
def test_tail_gives_the_last_lines(tmp_path: Path, count: int, expected: list[str]) -> None:
    (tmp_path / "log").write_text("a\nb\nc\n")
    assert tail(tmp_path / "log", count) == expected


def test_tail_reads_only_the_end_of_a_large_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(tmp_path / "log", 2) == ["line 99998", "line 99999"]


def test_tail_of_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "log", 5) == []


def test_follow_continues_after_the_last_lines_and_across_rotation(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a\nb\n")
    lines = follow(log, 1, poll_s=0.001)
    assert next(lines) == "b"
    with log.open("a") as file:
        file.write("c\nd")
    assert next(lines) == "c"
    with log.open("a") as file:
        file.write("d\n")
    log.rename(tmp_path / "log.1")
    log.write_text("e\n")
    assert list(islice(lines, 2)) == ["dd", "e"]


def test_follow_waits_for_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    log = tmp_path / "log"
    writer = Timer(0.05, log.write_text, ["first\n"])
    writer.start()
    assert next(follow(log, 5, poll_s=0.001)) == "first"
    writer.join()
