"""`rollstream broker`: the embedded Kafka of one data directory.

These commands speak about the embedded broker only, even where the settings name another one for all the rest.
"""

import time
from datetime import timedelta

import typer

from rollstream.broker import EmbeddedBroker, Running
from rollstream.broker.logs import follow, tail
from rollstream.cli.common import Config, DataDir, err, out, read_settings

NOT_RUNNING = 3

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Start, stop and look at the embedded Kafka of a data directory."
)


@app.command()
def start(data_dir: DataDir = None, config: Config = None) -> None:
    """Start the broker, or find it running, and return when it serves.

    Example: rollstream broker start
    """
    settings = read_settings(data_dir, config)
    running = EmbeddedBroker(settings.data_dir).start()
    out.print(f"broker is running at {_described(running)}")
    if settings.bootstrap_servers not in (None, running.bootstrap):
        err.print(f"note: all other commands use {settings.bootstrap_servers}, which the settings name")


@app.command()
def stop(data_dir: DataDir = None, config: Config = None) -> None:
    """Stop the broker cleanly; its log and its ports are kept.

    Example: rollstream broker stop --data-dir .rollstream
    """
    stopped = EmbeddedBroker(read_settings(data_dir, config).data_dir).stop()
    out.print("broker is stopped" if stopped else "no broker was running")


@app.command()
def status(data_dir: DataDir = None, config: Config = None) -> None:
    """Say whether the broker runs; exits with 0 if it serves, else with 3.

    Example: rollstream broker status || rollstream broker start
    """
    broker = EmbeddedBroker(read_settings(data_dir, config).data_dir)
    running = broker.status()
    if running is None:
        out.print(f"no broker is running for {broker.data_dir}")
        raise typer.Exit(NOT_RUNNING)
    if not running.answers:
        out.print(f"broker does not answer (yet) at {_described(running)}")
        raise typer.Exit(NOT_RUNNING)
    out.print(f"broker is running at {_described(running)}")


@app.command()
def logs(
    data_dir: DataDir = None,
    config: Config = None,
    lines: int = typer.Option(50, "-n", "--lines", min=0, help="How many of the last lines to show."),
    following: bool = typer.Option(False, "-f", "--follow", help="Go on with new lines until Ctrl-C."),
) -> None:
    """Show Kafka's own log, which survives restarts.

    Example: rollstream broker logs -n 100 --follow
    """
    broker = EmbeddedBroker(read_settings(data_dir, config).data_dir)
    if not following and not broker.logs_path.exists():
        err.print(f"no broker has run yet for {broker.data_dir}")
        return
    try:
        for line in follow(broker.logs_path, lines) if following else tail(broker.logs_path, lines):
            out.print(line)
    except KeyboardInterrupt:
        return


def _described(running: Running) -> str:
    process = "in Docker" if running.pid is None else f"pid {running.pid}"
    age = timedelta(seconds=round(max(0.0, time.time() - running.started_at)))
    return f"{running.bootstrap} (Apache Kafka {running.version}, {process}, up {age})"
