"""Runs workers: `python -m services [NAME …]` runs the named ones, or all, in one process until SIGTERM or Ctrl-C.

With `--pool NAME` they serve that pool of the settings; the store_worker, which reads everything, is then not among them.

`python -m services asyncapi` prints the AsyncAPI document of all of them and exits; `python -m services.health` asks those that
run on this host how they are.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import time

import uvloop

from rollstream.broker import find_broker
from rollstream.errors import BrokerUnavailable, RollstreamError, UsageError
from rollstream.eventlog.apps import WorkerApp, asyncapi
from rollstream.health import HealthSocket
from rollstream.settings import Settings, load_settings
from rollstream.supervisor.plan import WORKERS, workers_of

DECLARE_IN = {
    "env_worker": "rollstream.environments.registry",
    "verifier_worker": "rollstream.environments.registry",
    "agent_worker": "services.agent_worker.harnesses.registry",
}
"""Where a worker's own plug-ins, which only the settings of this process name, are made known."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services",
        description="Run workers in this process.",
        epilog="example: python -m services env_worker agent_worker verifier_worker --pool gpu",
    )
    parser.add_argument("names", nargs="*", choices=[*WORKERS, "asyncapi"], default=[], help="workers to run; none means all")
    parser.add_argument("--pool", metavar="NAME", help="which pool of the settings they serve; default: the setting `pool`")
    arguments = parser.parse_args()
    names: list[str] = arguments.names
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for chatty in ("aiokafka", "httpx2", "openai"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings = load_settings(pool=arguments.pool)
        if "asyncapi" in names:
            print(describe(settings))
            return
        settings = settings.model_copy(update={"bootstrap_servers": find_broker(settings)})
        uvloop.run(run(list(workers_of(settings.pool, names)), settings))
    except BrokerUnavailable as error:
        sys.exit(_failed(error, 3))
    except UsageError as error:
        sys.exit(_failed(error, 2))
    except RollstreamError as error:
        sys.exit(_failed(error, 1))


def build(name: str, settings: Settings) -> WorkerApp:
    """The application of one worker; only its own modules are imported.

    Raises:
        UsageError: the settings declare a plug-in under a name that is taken.
    """
    if registry := DECLARE_IN.get(name):
        importlib.import_module(registry).declare(settings)
    app: WorkerApp = importlib.import_module(f"services.{name}.app").build(settings)
    return app


def describe(settings: Settings) -> str:
    """The AsyncAPI document of all workers."""
    lanes = [build(name, settings).brokers[0] for name in WORKERS if name != "store_worker"]
    return asyncapi([*lanes, importlib.import_module("services.store_worker.app").describe(settings)])


async def run(names: list[str], settings: Settings) -> None:
    """Run workers until told to stop; a worker that breaks stops all.

    Raises:
        RollstreamError: a worker could not start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    started = time.monotonic()
    apps: dict[str, WorkerApp] = {}
    async with HealthSocket(settings.data_dir, lambda: tuple(app.health() for app in apps.values())):
        try:
            for name in names:
                apps[name] = app = build(name, settings)
                await app.start()
                _say(event="ready", worker=name, pid=os.getpid(), seconds=round(time.monotonic() - started, 3))
            await _first(stop, apps)
        finally:
            results = await asyncio.gather(*(app.stop() for app in apps.values()), return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    logging.getLogger(__name__).error("while stopping: %r", result)
            _say(event="stopped", workers=list(apps), pid=os.getpid())


async def _first(stop: asyncio.Event, apps: dict[str, WorkerApp]) -> None:
    """Wait for the signal to stop, or for a worker to break."""
    broken = {asyncio.create_task(app.broken.wait()): name for name, app in apps.items()}
    stopping = asyncio.create_task(stop.wait())
    done, pending = await asyncio.wait([stopping, *broken], return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done & broken.keys():
        failure = apps[broken[task]].failure
        raise failure if isinstance(failure, RollstreamError) else RollstreamError(f"{broken[task]} broke: {failure!r}")


def _say(**fields: object) -> None:
    """One JSON line for whoever supervises this process."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(fields), file=sys.stderr, flush=True)


def _failed(error: RollstreamError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
