"""A real Apache Kafka for a machine that has none: `ensure_broker` starts it, `find_broker` only looks.

Both hand back the user's own broker if the settings name one; then nothing is started and nothing is asked.
"""

from collections.abc import Callable

from rollstream.broker.embedded import EmbeddedBroker, Running, print_to_stderr
from rollstream.errors import BrokerUnavailable
from rollstream.settings import Settings

__all__ = ["EmbeddedBroker", "Running", "ensure_broker", "find_broker"]


def ensure_broker(settings: Settings, *, notice: Callable[[str], None] = print_to_stderr) -> str:
    """The bootstrap servers to use, with the embedded broker started if the settings name no other.

    Blocks for seconds (minutes at first use): call it through `asyncio.to_thread` inside an event loop.

    Raises:
        BrokerUnavailable: none is named and none can be started.
    """
    return settings.bootstrap_servers or EmbeddedBroker(settings.data_dir, notice=notice).start().bootstrap


def find_broker(settings: Settings) -> str:
    """The bootstrap servers to use, without starting anything.

    Raises:
        BrokerUnavailable: none is named and the embedded one is not in service.
    """
    if settings.bootstrap_servers:
        return settings.bootstrap_servers
    running = EmbeddedBroker(settings.data_dir).status()
    if running is None:
        raise BrokerUnavailable(
            f"no broker is running for {settings.data_dir}; start one with `rollstream up` "
            "or name your own in KAFKA_BOOTSTRAP_SERVERS"
        )
    if not running.answers:
        raise BrokerUnavailable(f"the broker at {running.bootstrap} runs but does not answer; look at `rollstream broker logs`")
    return running.bootstrap
