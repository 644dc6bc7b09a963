"""One Kafka request, spoken by hand: "who are you, and is your broker in service?".

Only a metadata answer counts as "up": a KRaft node accepts connections before its broker has left the fence, and the
cluster id tells our broker from a stranger that took its port.
"""

import socket
import struct
from dataclasses import dataclass

METADATA, VERSION, CORRELATION_ID = 3, 4, 1


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    cluster_id: str | None
    ports: tuple[int, ...]
    """Advertised ports of the brokers in service; empty while the only one is fenced."""


def metadata_request() -> bytes:
    """A Metadata request (version 4) for no topic, framed."""
    no_client_id, no_topics, create_topics = -1, 0, False
    body = struct.pack(">hhihi?", METADATA, VERSION, CORRELATION_ID, no_client_id, no_topics, create_topics)
    return struct.pack(">i", len(body)) + body


def parse_metadata(body: bytes) -> ClusterAnswer:
    """Read the brokers and the cluster id of a Metadata response (version 4), without its frame.

    Raises:
        ValueError: these bytes are something else.

    Source: the Kafka protocol guide, "Metadata Response (Version: 4)".
    """
    try:
        correlation_id, _throttle_ms, brokers = struct.unpack_from(">iii", body)
        if correlation_id != CORRELATION_ID:
            raise ValueError(f"expected correlation id {CORRELATION_ID}, found {correlation_id}")
        at, ports = 12, []
        for _ in range(brokers):
            (host_length,) = struct.unpack_from(">h", body, at + 4)
            if host_length < 0:
                raise ValueError("a broker without a host")
            at += 6 + host_length
            port, rack_length = struct.unpack_from(">ih", body, at)
            at += 6 + max(rack_length, 0)
            ports.append(port)
        (id_length,) = struct.unpack_from(">h", body, at)
        cluster_id = body[at + 2 : at + 2 + id_length].decode() if id_length >= 0 else None
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a metadata response: {error}") from None
    return ClusterAnswer(cluster_id, tuple(ports))


def ask_cluster(port: int, *, timeout_s: float = 2.0) -> ClusterAnswer | None:
    """Ask 127.0.0.1:`port`, or None if nothing that speaks Kafka answers in time."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(metadata_request())
            with connection.makefile("rb") as stream:
                (length,) = struct.unpack(">i", stream.read(4))
                return parse_metadata(stream.read(length)) if 0 < length < 1_000_000 else None
    except (OSError, struct.error, ValueError):
        return None
