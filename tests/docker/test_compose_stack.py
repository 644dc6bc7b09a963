"""compose.yml with real containers: the image of deploy/Dockerfile, a Kafka, and the host that publishes and reads."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import duckdb
import pytest

from rollstream.broker.config import is_free, port_candidates
from tests.docker.packed_images import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

WORKER_UID = 4321
PUBLISHED_STORE_S = 60
COMMAND_TIMEOUT_S = 300


class Four(BaseHTTPRequestHandler):
    """A chat model that answers everything with a boxed 4."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": r"\boxed{4}"}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "four", "choices": choices, "usage": usage}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def model_server_of_the_host() -> Iterator[int]:
    """Yields its port; containers reach it by the host's address on their network, so it listens on all."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), Four)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass(frozen=True)
class Stack:
    """One project of compose.yml and the host's side of it."""

    compose: list[str]
    environment: Mapping[str, str]
    data_dir: Path
    bootstrap: str

    def run(self, *arguments: str) -> str:
        """Call Compose, and show what it said if it fails."""
        done = subprocess.run([*self.compose, *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call `rollstream` on the host."""
        environment = {**self.environment, "KAFKA_BOOTSTRAP_SERVERS": self.bootstrap}
        command = [sys.executable, "-m", "rollstream.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)

    def ask_store(self, question: str) -> list[tuple[object, ...]]:
        """Ask the published store as anybody would, with plain DuckDB."""
        with duckdb.connect(str(self.data_dir / "trajectories.duckdb"), read_only=True) as store:
            return store.execute(question).fetchall()


@pytest.fixture(scope="module")
def stack(compose: list[str], kafka: str, rollstream_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Everything up, on a free port, with a data directory that does not exist before."""
    directory = tmp_path_factory.mktemp("compose")
    port = next(port for port in port_candidates(directory) if is_free(port))
    with model_server_of_the_host() as model_port:
        (directory / "settings.toml").write_text(
            f'[kafka]\npartitions = 3\n[models.four]\nbase_url = "http://host.docker.internal:{model_port}/v1"\n'
        )
        environment = os.environ | {
            "COMPOSE_PROJECT_NAME": f"rollstream-test-{uuid4().hex[:8]}",
            "KAFKA_IMAGE": kafka,
            "KAFKA_PORT": str(port),
            "ROLLSTREAM_IMAGE": rollstream_image,
            "ROLLSTREAM_USER": f"{WORKER_UID}:{WORKER_UID}",
            "ROLLSTREAM_DATA_DIR": str(directory / "data"),
            "ROLLSTREAM_CONFIG": str(directory / "settings.toml"),
            "OPENAI_API_KEY": "unused",
        }
        stack = Stack(compose, environment, directory / "data", f"127.0.0.1:{port}")
        try:
            stack.run("up", "-d", "--no-build", "--scale", "agent_worker=2")
            yield stack
        finally:
            stack.run("down", "--volumes", "--timeout", "60")


def container(stack: Stack, service: str) -> str:
    return stack.run("ps", "-q", service).split()[0]


def inspect(container: str, template: str) -> str:
    command = ["docker", "inspect", "-f", template, container]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_image_runs_the_workers_without_root(rollstream_image: str) -> None:
    run = ["docker", "run", "--rm", rollstream_image]

    listed = subprocess.run([*run, "python", "-m", "services", "--help"], capture_output=True, text=True, check=True).stdout
    user = subprocess.run([*run, "id", "-u"], capture_output=True, text=True, check=True).stdout

    assert all(worker in listed for worker in ("env_worker", "agent_worker", "verifier_worker", "store_worker"))
    assert user.strip() == "1000"


def test_a_task_published_on_the_host_comes_back_scored(stack: Stack, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "2 + 3?", "answer": "5"}\n')

    published = stack.command("publish", str(tasks), "-e", "math", "-m", "four", "-k", "2", "--run", "sums", "--wait")

    assert published.returncode == 0, published.stdout + published.stderr
    counts = "select reward, count(*) from rollouts where run_id = 'sums' group by reward order by reward"
    assert eventually(lambda: stack.ask_store(counts), [(0.0, 2), (1.0, 2)]), stack.run("logs", "store_worker")


def eventually(ask: Callable[[], object], expected: object) -> bool:
    """The store is published every few seconds, and for the first time when it has something."""
    give_up = time.monotonic() + PUBLISHED_STORE_S
    while time.monotonic() < give_up:
        with contextlib.suppress(duckdb.IOException):
            if ask() == expected:
                return True
        time.sleep(0.2)
    return False


def test_only_the_keyholders_see_the_data_directory_and_everything_in_it_is_the_users(stack: Stack) -> None:
    mounts = {
        service: inspect(container(stack, service), "{{range .Mounts}}{{.Destination}} {{end}}").split()
        for service in ("env_worker", "agent_worker", "verifier_worker")
    }

    assert "/data" in mounts["env_worker"]
    assert "/data" in mounts["verifier_worker"]
    assert "/data" not in mounts["agent_worker"]
    assert {path.stat().st_uid for path in [stack.data_dir, *stack.data_dir.rglob("*")]} == {WORKER_UID}
    assert (stack.data_dir / "keys" / "sealing.key").stat().st_mode & 0o777 == 0o600


def test_provisioning_again_changes_nothing(stack: Stack) -> None:
    key = (stack.data_dir / "keys" / "sealing.key").read_bytes()

    said = stack.run("run", "--rm", "provision")

    assert "0 created" in said
    assert (stack.data_dir / "keys" / "sealing.key").read_bytes() == key


def test_a_stopped_worker_ends_by_itself_within_its_grace(stack: Stack) -> None:
    stack.run("stop", "env_worker")

    stopped = container(stack, "env_worker")
    assert inspect(stopped, "{{.State.ExitCode}}") == "0"
    logs = subprocess.run(["docker", "logs", stopped], capture_output=True, text=True, check=True).stderr
    assert '"event": "stopped"' in logs
    stack.run("start", "env_worker")
