"""Worker processes of one data directory: `plan` decides, `processes` runs them, `state` says who does."""

from rollstream.supervisor.plan import WORKERS, ProcessSpec, plan, pool_suffix
from rollstream.supervisor.processes import Supervisor, WorkersFailed, last_lines
from rollstream.supervisor.state import (
    AlreadyRunning,
    SupervisorLock,
    SupervisorState,
    logs_dir,
    running,
    stop_running,
    supervised_pools,
)

__all__ = [
    "WORKERS",
    "AlreadyRunning",
    "ProcessSpec",
    "Supervisor",
    "SupervisorLock",
    "SupervisorState",
    "WorkersFailed",
    "last_lines",
    "logs_dir",
    "plan",
    "pool_suffix",
    "running",
    "stop_running",
    "supervised_pools",
]
