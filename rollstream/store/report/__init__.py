"""Reports: the numbers of a run and of two runs side by side, from the published store, with honest intervals.

`attempts` asks the store, `statistics` estimates and knows nothing of stores, `report` and `comparison` put the two together.
"""

from rollstream.store.report.report import Report, read_report
from rollstream.store.report.runs import resolve_run

__all__ = ["Report", "read_report", "resolve_run"]
