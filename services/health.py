"""Asks the workers of this host how they are: `python -m services.health [--live] [NAME …]`, for a container's health check.

It imports no worker and asks no broker, because it is run every few seconds.
"""

import argparse
import sys
from collections.abc import Collection, Sequence

from rollstream.errors import RollstreamError
from rollstream.health import LaneHealth, ProcessHealth, ask_all
from rollstream.settings import load_settings


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.health",
        description="Ask the workers of this host and data directory how they are; exit with 1 if one is unwell or none runs.",
        epilog="example: python -m services.health --live agent_worker",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workers that must be among them")
    parser.add_argument("--live", action="store_true", help="find fault only with what a new process would mend")
    arguments = parser.parse_args()
    try:
        found = ask_all(load_settings().data_dir)
    except RollstreamError as error:
        sys.exit(f"error: {error}")
    for process in found:
        print("\n".join(described(process)))
    faults = faults_of(found, arguments.names, live=arguments.live)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    sys.exit(1 if faults else 0)


def faults_of(found: Sequence[ProcessHealth], names: Collection[str], *, live: bool) -> list[str]:
    """What is wrong, one sentence each."""
    if not found:
        return ["no worker runs here with this data directory"]
    present = {worker.worker for process in found for worker in process.workers}
    faults = [fault for process in found for fault in (process.dead if live else process.hindrances)]
    return faults + [f"no {name} answers" for name in names if name not in present]


def described(process: ProcessHealth) -> list[str]:
    """A line for each worker, and one for each of its consumer groups."""
    lines = []
    for worker in process.workers:
        lines.append(f"{worker.worker} (pid {process.pid})")
        lines += [f"  {lane.group}: {told(lane)}" for lane in worker.lanes]
    return lines


def told(lane: LaneHealth) -> str:
    marks = f"{lane.in_flight} in flight, span {lane.span}, oldest mark {lane.mark_age_s:.0f} s"
    return f"{lane.partitions} partitions, {marks}, oldest commit due {lane.commit_age_s:.1f} s"


if __name__ == "__main__":
    main()
