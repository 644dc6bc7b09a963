"""What `<data_dir>/broker/broker.json` remembers about the broker of a data directory.

The file outlives the broker: its ports are taken again at the next start, so that clients reconnect after a crash.
Whether the broker runs is therefore never read from here; only a live process or container answers that.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rollstream.errors import BrokerUnavailable

Via = Literal["java", "docker"]


class BrokerState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    via: Via
    version: str
    """Of Apache Kafka."""
    port: int
    controller_port: int
    cluster_id: str
    pid: int | None = None
    """Null while it is being launched, and always for a container."""
    started_at: float
    """Unix time, for people; identity is the command line of the process."""

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"


def read_state(path: Path) -> BrokerState | None:
    """The remembered state, or None if there is none that can be understood.

    Raises:
        BrokerUnavailable: the file may not be read.
    """
    try:
        return BrokerState.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    except OSError as error:
        raise BrokerUnavailable(f"cannot read {path}: {error.strerror}") from None


def write_state(path: Path, state: BrokerState) -> None:
    write_atomically(path, json.dumps(state.model_dump() | {"bootstrap": state.bootstrap}, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old content or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold the lock file `path`; the kernel releases it when the process dies, however it dies.

    Raises:
        BrokerUnavailable: another process held it for `timeout_s`, or it cannot be made.
    """
    give_up = monotonic() + timeout_s
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise BrokerUnavailable(f"cannot write to {path.parent}: {error.strerror}") from None
    with file:
        while True:
            try:
                flock(file, LOCK_EX | LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() > give_up:
                    raise BrokerUnavailable(
                        f"another process has held {path} for {timeout_s:.0f} s; wait for it or end it"
                    ) from None
                sleep(0.05)
        yield
