"""Output in bounded memory: beginning and end are kept, and how much there was."""

from hypothesis import given, strategies as st

from rollstream.sandboxes.capture import Capture
from rollstream.sandboxes.protocol import Output


def captured(chunks: list[bytes], limit: int) -> Output:
    capture = Capture(limit)
    for chunk in chunks:
        capture.add(chunk)
    return capture.output()


@given(st.lists(st.binary(max_size=30)), st.integers(0, 60))
def test_beginning_and_end_are_kept_whatever_the_pieces(chunks: list[bytes], limit: int) -> None:
    whole = b"".join(chunks)
    output = captured(chunks, limit)
    assert output.size == len(whole)
    assert len(output.head) + len(output.tail) == min(limit, len(whole))
    assert whole.startswith(output.head)
    assert whole.endswith(output.tail)
    assert output.truncated == (len(whole) > limit)
    if not output.truncated:
        assert output.data == whole


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1), st.integers(1, 50))
def test_no_more_is_held_than_the_limit_and_one_piece(chunks: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for chunk in chunks:
        capture.add(chunk)
        assert len(capture._head) + sum(map(len, capture._tail)) <= limit + 9


def test_what_was_left_out_is_marked_with_the_original_size() -> None:
    output = captured([b"begin", b"x" * 1000, b"end"], 10)
    assert output.data == b"begin\n[truncated by rollstream: 1008 bytes in all, 10 kept]\nxxend"


def test_bytes_that_are_no_text_are_spelled_out() -> None:
    assert captured([b"\xff\xfe", b"ok \xe2\x82\xac"], 100).text == "\\xff\\xfeok €"
