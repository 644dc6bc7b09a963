"""Recognising the broker's process."""

import subprocess
from pathlib import Path

from rollstream.broker.java import find_process, mark_of
from rollstream.broker.state import BrokerState

LAUNCHES = 150


def test_a_process_is_recognised_from_its_first_moment_on(tmp_path: Path) -> None:
    # For a moment after its launch a process has no command line, which must not be taken for its end.
    for _ in range(LAUNCHES):
        with subprocess.Popen(
            ["/bin/sh", "-c", "read forever", mark_of(tmp_path), "kafka.Kafka"], stdin=subprocess.PIPE
        ) as process:
            state = BrokerState(
                via="java", version="4", port=1, controller_port=2, cluster_id="c", started_at=0.0, pid=process.pid
            )
            found = find_process(tmp_path, state)
            process.kill()
        assert found is not None
        assert found.pid == process.pid
