"""The root command: which commands there are, and where each is defined.

A command's module is imported when the command is called, never before: `--help` and completion stay fast whatever a
command needs. The purpose stands here too for that reason; a test compares it with what the command says of itself.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

import rollstream

START, STEPS, RESULTS, RUNS, UPKEEP = "Start here", "Step by step", "Results", "Runs that go wrong", "Upkeep"


@dataclass(frozen=True, slots=True)
class Entry:
    """One command: its name, `module:attribute` (a function or a Typer app), its purpose and its place in the help."""

    name: str
    target: str
    purpose: str
    panel: str


COMMANDS: tuple[Entry, ...] = (
    Entry("demo", "rollstream.cli.demo:demo", "Run a small task set end to end on this machine, with a local model.", START),
    Entry("run", "rollstream.cli.run:run", "Publish a task file, watch it to its end and print the report.", START),
    Entry("up", "rollstream.cli.up:up", "Start the broker and the workers, and keep them running.", STEPS),
    Entry("publish", "rollstream.cli.publish:publish", "Publish a task file as a run.", STEPS),
    Entry("watch", "rollstream.cli.watch:watch", "Follow a run from the log until every attempt is terminal.", STEPS),
    Entry("down", "rollstream.cli.up:down", "Stop the workers and the embedded broker of a data directory.", STEPS),
    Entry("report", "rollstream.cli.report:report", "Print the numbers of a run: reward, pass@k, failures, usage.", RESULTS),
    Entry("show", "rollstream.cli.show:show", "Print trajectories readably.", RESULTS),
    Entry("sql", "rollstream.cli.sql:sql", "Ask the published store anything, in SQL.", RESULTS),
    Entry("export", "rollstream.cli.export:export", "Write a data set for SFT, DPO or GRPO, or trajectories in ATIF.", RESULTS),
    Entry("audit", "rollstream.cli.audit:audit", "Prove from the log that every attempt of a run ended exactly once.", RUNS),
    Entry(
        "cancel", "rollstream.cli.cancel:cancel", "End a run: what has not ended is stopped, and recorded as cancelled.", RUNS
    ),
    Entry(
        "resume",
        "rollstream.cli.resume:resume",
        "Let a paused or cancelled run go on, and drive its errored attempts again in a new round.",
        RUNS,
    ),
    Entry(
        "regrade",
        "rollstream.cli.regrade:regrade",
        "Verify what agents handed in once more, without running them.",
        RUNS,
    ),
    Entry(
        "dead-letters",
        "rollstream.cli.dead_letters:app",
        "Look at records that nobody could handle, and replay or discard them.",
        RUNS,
    ),
    Entry(
        "env",
        "rollstream.cli.env:app",
        "List environments, show one, and check a task file against its own.",
        STEPS,
    ),
    Entry(
        "matrix",
        "rollstream.cli.matrix:matrix",
        "Say of every harness, environment and sandbox backend whether they run together, or why not.",
        STEPS,
    ),
    Entry("topics", "rollstream.cli.topics:app", "List, create and describe the topics.", UPKEEP),
    Entry("broker", "rollstream.cli.broker:app", "Start, stop and look at the embedded Kafka of a data directory.", UPKEEP),
    Entry("store", "rollstream.cli.store:app", "Look after the store: rebuild, verify, prune, compact.", UPKEEP),
    Entry("sandboxes", "rollstream.cli.sandboxes:app", "Look at the sandboxes of this host, and remove orphans.", UPKEEP),
    Entry("doctor", "rollstream.cli.doctor:doctor", "Check everything a run needs, with a remedy for what is missing.", UPKEEP),
)


class LazyCommand(TyperCommand):
    """Stands for a command that is imported when it is called or asked for its own help."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(name=entry.name, help=entry.purpose, rich_help_panel=entry.panel)
        self.entry = entry

    def load(self) -> TyperCommand | TyperGroup:
        """The command itself."""
        module, _, attribute = self.entry.target.partition(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(self.entry.name)(found)
            found = alone
        command = cast("TyperCommand | TyperGroup", typer.main.get_command(found))
        command.name = self.entry.name
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)


def root() -> TyperGroup:
    """The command `rollstream`."""
    app = typer.Typer(name="rollstream", no_args_is_help=True)
    app.callback()(_rollstream)
    group = cast("TyperGroup", typer.main.get_command(app))
    for entry in COMMANDS:
        group.add_command(LazyCommand(entry))
    return group


def _print_version(asked: bool) -> None:
    if asked:
        print(f"rollstream {rollstream.__version__}")
        raise typer.Exit


def _rollstream(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Event-sourced rollouts for LLM agents on Kafka.

    Example: rollstream demo
    """
