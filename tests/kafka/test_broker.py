"""The embedded broker for real: one data directory, whose name is as awkward as a user's may be, shared by all tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil  # type: ignore[import-untyped]
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from typer.testing import CliRunner

from rollstream.broker import EmbeddedBroker, Running, ensure_broker, find_broker
from rollstream.broker.state import read_state, write_state
from rollstream.cli.broker import app
from rollstream.errors import BrokerUnavailable
from rollstream.settings import Settings

pytestmark = pytest.mark.kafka

START = "import sys; from pathlib import Path; from rollstream.broker import EmbeddedBroker; "
START += "print(EmbeddedBroker(Path(sys.argv[1])).start().pid)"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A data directory in which a broker may or may not run, used from a shell with secrets and a poor locale."""
    embedded = EmbeddedBroker(tmp_path_factory.mktemp("own") / "a, b = ü")
    with pytest.MonkeyPatch.context() as shell:
        shell.setenv("OPENAI_API_KEY", "secret")
        shell.setenv("LC_ALL", "C")
        yield embedded
        embedded.stop()


@pytest.fixture
def running(broker: EmbeddedBroker) -> Running:
    return broker.start()


def process_of(running: Running) -> psutil.Process:
    assert running.pid is not None
    return psutil.Process(running.pid)


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true in time"
        time.sleep(0.02)


def test_start_finds_the_running_broker(broker: EmbeddedBroker, running: Running) -> None:
    assert broker.start() == running
    assert broker.status() == running
    settings = Settings(data_dir=broker.data_dir)
    assert ensure_broker(settings) == find_broker(settings) == running.bootstrap


def test_it_is_in_a_session_of_its_own_so_that_ctrl_c_does_not_reach_it(running: Running) -> None:
    assert running.pid is not None
    assert os.getsid(running.pid) == running.pid


def test_it_listens_on_loopback_only(running: Running) -> None:
    listening = [c.laddr for c in process_of(running).net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(listening) == 2
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_it_does_not_inherit_the_secrets_of_the_shell_it_is_started_from(running: Running) -> None:
    assert os.environ["OPENAI_API_KEY"]
    assert "OPENAI_API_KEY" not in process_of(running).environ()


def test_its_memory_is_bounded(running: Running) -> None:
    process = process_of(running)
    assert "-Xmx384m" in process.cmdline()
    assert process.memory_info().rss < 400 * 1024 * 1024


async def test_records_survive_kill_9_and_clients_reconnect(broker: EmbeddedBroker, running: Running) -> None:
    topic, partition = "survivors", TopicPartition("survivors", 0)
    admin = AIOKafkaAdminClient(bootstrap_servers=running.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 1, 1)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=running.bootstrap, acks="all")
    await producer.start()
    for number in range(100):
        await producer.send(topic, b"%d" % number)
    await producer.flush()

    process_of(running).kill()
    again = broker.start()

    assert again.bootstrap == running.bootstrap
    assert again.pid != running.pid
    await producer.send_and_wait(topic, b"100")
    await producer.stop()
    consumer = AIOKafkaConsumer(bootstrap_servers=again.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign([partition])
    found = [int((await consumer.getone()).value) for _ in range(101)]
    await consumer.stop()
    assert found == list(range(101))


async def test_records_of_16_mib_pass(running: Running) -> None:
    value = os.urandom(16 * 1024 * 1024)
    admin = AIOKafkaAdminClient(bootstrap_servers=running.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic("large", 1, 1)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=running.bootstrap, acks="all", max_request_size=len(value) + 1024)
    await producer.start()
    await producer.send_and_wait("large", value)
    await producer.stop()
    consumer = AIOKafkaConsumer("large", bootstrap_servers=running.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    assert (await consumer.getone()).value == value
    await consumer.stop()


def test_two_concurrent_starts_start_one_broker_that_outlives_them(broker: EmbeddedBroker) -> None:
    broker.stop()
    command = [sys.executable, "-c", START, str(broker.data_dir)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    pids = {start.communicate(timeout=60)[0].strip() for start in starts}
    running = broker.status()
    assert running is not None
    assert pids == {str(running.pid)}


def test_a_taken_port_is_replaced_and_a_free_one_kept(broker: EmbeddedBroker, running: Running) -> None:
    broker.stop()
    port = int(running.bootstrap.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        moved = broker.start()
    assert moved.bootstrap != running.bootstrap


def test_a_recycled_process_id_is_not_taken_for_the_broker(broker: EmbeddedBroker, running: Running) -> None:
    broker.stop()
    state_path = broker.data_dir / "broker" / "broker.json"
    state = read_state(state_path)
    assert state is not None
    write_state(state_path, state.model_copy(update={"pid": os.getpid()}))
    assert broker.status() is None
    assert broker.stop() is False
    assert broker.start().pid != os.getpid()


def test_a_broker_whose_id_was_never_written_down_is_found(broker: EmbeddedBroker, running: Running) -> None:
    state_path = broker.data_dir / "broker" / "broker.json"
    state = read_state(state_path)
    assert state is not None
    write_state(state_path, state.model_copy(update={"pid": None}))
    assert broker.start() == running


def test_a_stuck_broker_is_told_from_a_stopped_one_and_can_be_stopped(broker: EmbeddedBroker, running: Running) -> None:
    process = process_of(running)
    process.send_signal(signal.SIGSTOP)
    found = broker.status()
    assert found is not None
    assert not found.answers
    with pytest.raises(BrokerUnavailable, match="runs but does not answer; look at `rollstream broker logs`"):
        find_broker(Settings(data_dir=broker.data_dir))
    assert broker.stop(timeout_s=0.5) is True
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(BrokerUnavailable, match=r"no broker is running for .*; start one with `rollstream up`"):
        find_broker(Settings(data_dir=broker.data_dir))


def test_a_broker_that_cannot_start_is_explained_by_its_log(broker: EmbeddedBroker) -> None:
    broker.stop()
    metadata = broker.data_dir / "broker" / "data" / "meta.properties"
    intact = metadata.read_text()
    metadata.write_text(intact.replace("node.id=1", "node.id=2"))
    try:
        with pytest.raises(BrokerUnavailable, match=r"(?s)ended while it started; the last lines of .*Stored node id 2"):
            broker.start()
    finally:
        metadata.write_text(intact)


def test_commands_start_show_and_stop_it(broker: EmbeddedBroker) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*arguments, "--data-dir", str(broker.data_dir)])
        return result.exit_code, result.output

    broker.stop()
    assert run("status") == (3, f"no broker is running for {broker.data_dir}\n")
    code, output = run("start")
    assert code == 0
    assert output.startswith("broker is running at 127.0.0.1:")
    assert run("status")[0] == 0
    assert run("logs", "-n", "1")[1].endswith("Kafka Server started (KafkaRaftServer)\n")
    assert run("stop") == (0, "broker is stopped\n")
    assert run("stop") == (0, "no broker was running\n")
