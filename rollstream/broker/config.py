"""How one Kafka node is set up for a laptop: its ports, its `server.properties`, its JVM.

Paths in the properties are relative to the broker's home, where it is started: `log.dirs` is a list, so an absolute
path with a comma would silently be two.
"""

import hashlib
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from rollstream.errors import BrokerUnavailable

MIB = 1024 * 1024
MAX_RECORD_BYTES = 20 * MIB
"""Over the largest record we produce (16 MiB by default), with room for headers and batch framing."""

# Below the range from which the kernel takes ports of outgoing connections: a client that keeps trying to reach a
# stopped broker in that range would in the end connect to itself and hold the broker's port.
PORTS = range(20_000, 30_000)

JVM_OPTIONS = (
    "-Xms96m",
    "-Xmx384m",
    # Both measured on two cores, against G1 and the full compiler: half the CPU time for the same work, a fifth less
    # memory, a third off the start.
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    # A broker that is out of memory should be seen to be gone, not limp.
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:ErrorFile=log/jvm-crash-%p.log",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    "-Dlog4j2.configurationFile=log4j2.properties",
)

FIXED_PROPERTIES: dict[str, str | int] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    # The log is the source of truth: topics are made by our catalogue and nothing is ever deleted.
    "auto.create.topics.enable": "false",
    "log.retention.ms": -1,
    "log.retention.bytes": -1,
    "offsets.retention.minutes": 100 * 365 * 24 * 60,
    # One node.
    "default.replication.factor": 1,
    "min.insync.replicas": 1,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "offsets.topic.num.partitions": 4,
    "transaction.state.log.num.partitions": 2,
    "share.coordinator.state.topic.num.partitions": 1,
    # Large records, many small partitions.
    "message.max.bytes": MAX_RECORD_BYTES,
    "replica.fetch.max.bytes": MAX_RECORD_BYTES,
    "replica.fetch.response.max.bytes": MAX_RECORD_BYTES,
    "log.segment.bytes": 256 * MIB,
    # The index of a full segment of 256 MiB needs 0.75 MiB; every partition maps two of them.
    "log.index.size.max.bytes": MIB,
    # Consumers come and go all the time in development, and a crashed one should be noticed soon.
    "group.initial.rebalance.delay.ms": 200,
    "group.min.session.timeout.ms": 1_000,
    # After a crash the node's former self is registered until its session ends, and a restart waits that long. It asks
    # 1.5 s and then 3.1 s after its first try; a shorter session would fence a healthy broker on a loaded machine.
    "broker.session.timeout.ms": 2_500,
    "broker.heartbeat.interval.ms": 500,
    # No-op records that only tell other controllers of a quorum how far behind they are.
    "metadata.max.idle.interval.ms": 5_000,
    # Small heap, two cores.
    "num.network.threads": 2,
    "num.io.threads": 4,
    "num.recovery.threads.per.data.dir": 2,
    "group.coordinator.threads": 1,
    "socket.request.max.bytes": 64 * MIB,
    "queued.max.request.bytes": 64 * MIB,
    "log.cleaner.dedupe.buffer.size": 4 * MIB,
    "log.cleaner.io.buffer.size": MIB // 2,
}


def server_properties(*, port: int, controller_port: int, listen_host: str = "127.0.0.1", log_dir: str = "data") -> str:
    """The text of `server.properties`; clients are always told 127.0.0.1:`port`."""
    properties = FIXED_PROPERTIES | {
        "log.dirs": log_dir,
        "listeners": f"PLAINTEXT://{listen_host}:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
    }
    return "".join(f"{key}={value}\n" for key, value in properties.items())


def port_candidates(data_dir: Path) -> Iterator[int]:
    """Ports to try in turn: always the same for one data directory, different for two."""
    digest = hashlib.sha256(str(data_dir).encode()).digest()
    first = int.from_bytes(digest[:4], "big")
    for step in range(len(PORTS)):
        yield PORTS[(first + step) % len(PORTS)]


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:`port` now."""
    with socket.socket() as probe:
        # As Kafka does: connections of a broker that was just killed do not keep its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


def choose_ports(remembered: tuple[int, int] | None, data_dir: Path, free: Callable[[int], bool] = is_free) -> tuple[int, int]:
    """Client and controller port: each the remembered one if it is still free, else the first free candidate.

    Raises:
        BrokerUnavailable: every port of `PORTS` is taken.
    """
    kept = [port if free(port) else None for port in remembered or ()] or [None, None]
    fresh = (port for port in port_candidates(data_dir) if port not in kept and free(port))
    replacements = list(islice(fresh, kept.count(None)))
    if len(replacements) < kept.count(None):
        raise BrokerUnavailable(f"no free port between {PORTS.start} and {PORTS.stop - 1}")
    chosen = [replacements.pop(0) if port is None else port for port in kept]
    return chosen[0], chosen[1]
