"""Ports and properties of the embedded broker."""

import socket
from pathlib import Path

import pytest

from rollstream.broker.config import MAX_RECORD_BYTES, PORTS, choose_ports, is_free, server_properties
from rollstream.errors import BrokerUnavailable
from rollstream.settings import KafkaSettings

HERE, THERE = Path("/data/here"), Path("/data/there")


def properties() -> dict[str, str]:
    lines = server_properties(port=20_001, controller_port=20_002).splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_one_data_directory_gets_the_same_ports_and_two_get_different_ones() -> None:
    ours = choose_ports(None, HERE, free=lambda port: True)
    assert ours == choose_ports(None, HERE, free=lambda port: True)
    assert not set(ours) & set(choose_ports(None, THERE, free=lambda port: True))


def test_remembered_ports_are_kept() -> None:
    assert choose_ports((25_000, 25_007), HERE, free=lambda port: True) == (25_000, 25_007)


def test_only_a_taken_port_is_replaced() -> None:
    port, controller_port = choose_ports((25_000, 25_007), HERE, free=lambda port: port != 25_007)
    assert port == 25_000
    assert controller_port not in (25_000, 25_007)


def test_taken_candidates_are_passed_over() -> None:
    first = choose_ports(None, HERE, free=lambda port: True)
    assert not set(first) & set(choose_ports(None, HERE, free=lambda port: port not in first))


def test_no_free_port_is_said() -> None:
    with pytest.raises(BrokerUnavailable, match="no free port between 20000 and 29999"):
        choose_ports(None, HERE, free=lambda port: False)


def test_ports_are_below_those_of_outgoing_connections() -> None:
    assert max(PORTS) < 32_768


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)


def test_every_address_is_loopback() -> None:
    found = properties()
    assert found["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002"
    assert found["advertised.listeners"] == "PLAINTEXT://127.0.0.1:20001"


def test_nothing_expires_and_no_topic_appears_by_itself() -> None:
    found = properties()
    assert found["log.retention.ms"] == found["log.retention.bytes"] == "-1"
    assert found["auto.create.topics.enable"] == "false"
    assert int(found["offsets.retention.minutes"]) >= 10 * 365 * 24 * 60


def test_the_largest_record_we_may_produce_fits_with_its_framing() -> None:
    assert KafkaSettings().max_record_bytes + 1024 * 1024 <= MAX_RECORD_BYTES
    found = properties()
    assert int(found["message.max.bytes"]) == MAX_RECORD_BYTES <= int(found["replica.fetch.max.bytes"])
    assert int(found["queued.max.request.bytes"]) >= int(found["socket.request.max.bytes"]) > MAX_RECORD_BYTES
