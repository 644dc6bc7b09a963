"""The one Kafka request that we speak by hand."""

import socket
import struct
import threading
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from rollstream.broker.wire import ClusterAnswer, ask_cluster, metadata_request, parse_metadata


def metadata_response(ports: list[int], cluster_id: str | None, rack: str | None = None) -> bytes:
    def text(value: str | None) -> bytes:
        return struct.pack(">h", -1) if value is None else struct.pack(">h", len(value)) + value.encode()

    brokers = b"".join(struct.pack(">i", 1) + text("127.0.0.1") + struct.pack(">i", port) + text(rack) for port in ports)
    return struct.pack(">iii", 1, 0, len(ports)) + brokers + text(cluster_id) + struct.pack(">ii", 1, 0)


@pytest.mark.parametrize("rack", [None, "r1"])
@pytest.mark.parametrize("ports", [[], [21_000], [21_000, 21_001]])
def test_brokers_and_cluster_id_are_read(ports: list[int], rack: str | None) -> None:
    assert parse_metadata(metadata_response(ports, "abc", rack)) == ClusterAnswer("abc", tuple(ports))


def test_a_cluster_without_an_id_is_read() -> None:
    assert parse_metadata(metadata_response([1], None)).cluster_id is None


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: struct.pack(">ii", 1, 0) + tail))
def test_any_bytes_are_an_answer_or_a_value_error(body: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(parse_metadata(body), ClusterAnswer)


def serve_once(answer: bytes | None) -> tuple[int, threading.Thread]:
    """A server on a free port that reads one request and sends `answer`, or hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            assert connection.recv(1024) == metadata_request()
            connection.sendall(answer or b"")

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize("answer", [None, b"\0", b"HTTP/1.1 400 Bad Request\r\n", struct.pack(">i", 100) + b"short"])
def test_what_does_not_speak_kafka_is_no_answer(answer: bytes | None) -> None:
    port, thread = serve_once(answer)
    assert ask_cluster(port) is None
    thread.join(5)


def test_an_answer_is_understood_off_the_socket() -> None:
    body = metadata_response([21_000], "abc")
    port, thread = serve_once(struct.pack(">i", len(body)) + body)
    assert ask_cluster(port) == ClusterAnswer("abc", (21_000,))
    thread.join(5)


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask_cluster(silent.getsockname()[1], timeout_s=0.05) is None
